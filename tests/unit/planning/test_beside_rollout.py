"""What other roles keep on the rollout's devices, for a recipe whose models were found on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.config.schema import TrainRecipe
from fivefold.families.read import SHAPES, find_shape
from fivefold.planning.beside_rollout import bytes_kept_beside_rollout
from fivefold.planning.memory import COMMUNICATOR, CUDA_CONTEXT


def recipe(allocation: str, kl_ctl: float = 0.0) -> TrainRecipe:
    values = {
        "experiment_name": "beside",
        "cluster": {"n_nodes": 1, "n_gpus_per_node": 8},
        "allocation_mode": allocation,
        "actor": {"path": "somewhere/on-a-hub", "kl_ctl": kl_ctl},
        **({"ref": {"path": "elsewhere/on-a-hub"}} if kl_ctl else {}),
        "train_dataset": {"path": "data.jsonl", "batch_size": 8, "max_length": 128},
    }
    return TrainRecipe.model_validate(values)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text((SHAPES / "Qwen3-8B.json").read_text())
    return tmp_path


def test_an_actor_keeps_its_weights_gradients_and_optimizer(folder: Path) -> None:
    """bfloat16 weights and float32 gradients on every rank; float32 weights and two moments over the 8 ranks."""
    kept = bytes_kept_beside_rollout(recipe("vllm:d4t2|megatron:d8"), folder, None)
    state = (2 + 4 + 12 / 8) * find_shape("Qwen3-8B").n_parameters
    assert kept == pytest.approx(state + CUDA_CONTEXT + COMMUNICATOR, abs=1)


@pytest.mark.parametrize("reference", [None, "Qwen3-0.6B"])
def test_a_reference_in_the_actors_processes_adds_its_weights(folder: Path, reference: str | None) -> None:
    model = reference or "Qwen3-8B"
    with_reference, without = (
        bytes_kept_beside_rollout(recipe("vllm:d4t2|megatron:d8", kl_ctl), folder, reference) for kl_ctl in (0.1, 0.0)
    )
    assert with_reference - without == 2 * find_shape(model).n_parameters


def test_roles_on_other_devices_keep_nothing(folder: Path) -> None:
    assert bytes_kept_beside_rollout(recipe("vllm:d2t2+megatron:d4"), folder, None) == 0
