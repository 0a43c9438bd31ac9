"""Recipes for GPUs fit the devices that they are for."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app

RECIPES = Path(__file__).parents[3] / "recipes"
GPUS = {"1xh100": "h100-80g", "2xh200": "h200-141g", "4xh200": "h200-141g"}
"""Devices that the end of a recipe's name tells; any other is for H100s."""


def for_gpus() -> list[Path]:
    return [file for file in sorted(RECIPES.glob("*.yaml")) if "n_gpus_per_node: 0" not in file.read_text()]


@pytest.mark.parametrize("recipe", for_gpus(), ids=lambda file: file.stem)
def test_a_recipe_for_gpus_fits_them(recipe: Path) -> None:
    gpu = GPUS.get(recipe.stem.rpartition("-")[2], "h100-80g")
    result = CliRunner().invoke(app, ["plan", str(recipe), "--gpu", gpu])
    assert result.exit_code == 0, result.output
    assert "It fits." in result.output
