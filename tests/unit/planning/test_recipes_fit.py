"""Recipes for GPUs fit the devices that they are for."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app

RECIPES = Path(__file__).parents[3] / "recipes"
GPUS = {"1xh100": "h100-80g", "2xh200": "h200-141g", "4xh200": "h200-141g"}
"""Devices that the end of a recipe's name tells; any other is for H100s."""


IMPORTED = Path(__file__).parents[1] / "fivefold_import" / "fixtures" / "siirl_megatron.sh"


def for_gpus() -> list[Path]:
    return [file for file in sorted(RECIPES.glob("*.yaml")) if "n_gpus_per_node: 0" not in file.read_text()]


@pytest.mark.parametrize("recipe", for_gpus(), ids=lambda file: file.stem)
def test_a_recipe_for_gpus_fits_them(recipe: Path) -> None:
    gpu = GPUS.get(recipe.stem.rpartition("-")[2], "h100-80g")
    result = CliRunner().invoke(app, ["plan", str(recipe), "--gpu", gpu])
    assert result.exit_code == 0, result.output
    assert "It fits." in result.output


def test_an_imported_script_fits_the_eight_gpus_that_it_is_for(tmp_path: Path) -> None:
    """With the layout of siiRL's manual for Qwen3-8B: tensors over 2 GPUs, 4 pipeline stages, nothing offloaded."""
    recipe, at = tmp_path / "recipe.yaml", "actor_rollout_ref.actor.megatron."
    words = [f"{at}pipeline_model_parallel_size=4", f"{at}param_offload=False", "-o", str(recipe)]
    done = CliRunner().invoke(app, ["import", "--from", "siirl", str(IMPORTED), *words])
    assert done.exit_code == 0, done.output
    result = CliRunner().invoke(app, ["plan", str(recipe), "--gpu", "h100-80g", "actor.path=Qwen/Qwen3-8B"])
    assert result.exit_code == 0, result.output
    assert "It fits." in result.output
