"""What other roles keep on the rollout's devices, for a recipe whose models were found on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fivefold.config.schema.roles import ReferenceConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import SHAPES, find_shape
from fivefold.planning.decisions import while_generating
from fivefold.planning.memory import COMMUNICATOR, CUDA_CONTEXT

KEEP_ALL = {"params": False, "grads": False, "optimizer": False}


def recipe(
    allocation: str,
    kl_ctl: float = 0.0,
    ref: str | None = None,
    reward_model: dict[str, Any] | None = None,
    **actor: Any,
) -> TrainRecipe:
    values = {
        "experiment_name": "waiting",
        "cluster": {"n_nodes": 1, "n_gpus_per_node": 8},
        "allocation_mode": allocation,
        "actor": {"path": "somewhere/on-a-hub", "kl_ctl": kl_ctl, **actor},
        **({"ref": {"path": ref}} if ref else {}),
        **({"reward": {"fn": "model", "model": {"path": "m", **reward_model}}} if reward_model is not None else {}),
        "train_dataset": {"path": "data.jsonl", "batch_size": 8, "max_length": 128},
    }
    return TrainRecipe.model_validate(values)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text((SHAPES / "Qwen3-8B.json").read_text())
    return tmp_path


@pytest.mark.parametrize(
    ("offload", "bytes_each"),
    [
        (KEEP_ALL, 2 + 4 + 12 / 8),
        ({**KEEP_ALL, "grads": True}, 2 + 12 / 8),
        ({**KEEP_ALL, "optimizer": True}, 2 + 4),
        ({**KEEP_ALL, "params": True}, 4 + 12 / 8),
        ({"params": True, "grads": True, "optimizer": True}, 0),
    ],
)
def test_an_actor_keeps_what_it_does_not_offload(folder: Path, offload: dict[str, bool], bytes_each: float) -> None:
    """bfloat16 weights and float32 gradients on every rank; float32 weights and two moments over the 8 ranks."""
    found = while_generating(recipe("vllm:d4t2|megatron:d8", offload=offload), {"actor": folder}, gpu_memory=None)
    state = bytes_each * find_shape("Qwen3-8B").n_parameters
    assert found.kept["rollout"] == pytest.approx(state + CUDA_CONTEXT + COMMUNICATOR, abs=1)
    assert set(found.offloaded) == {kind for kind, moves in offload.items() if moves}


@pytest.mark.parametrize(
    ("device_gb", "offloaded"),
    [(140, ("grads",)), (97, ("grads", "optimizer")), (85, ("params", "grads", "optimizer"))],
)
def test_the_plan_offloads_what_the_rollout_needs(folder: Path, device_gb: int, offloaded: tuple[str, ...]) -> None:
    asked = recipe("vllm:d8|megatron:d8")
    asked = asked.model_copy(
        update={
            "train_dataset": asked.train_dataset.model_copy(update={"batch_size": 256}),
            "gconfig": asked.gconfig.model_copy(update={"max_new_tokens": 1100}),
        }
    )
    assert while_generating(asked, {"actor": folder}, gpu_memory=device_gb * 10**9).offloaded == offloaded


def test_state_on_the_host_is_not_on_the_rollouts_devices(folder: Path) -> None:
    megatron = {"optimizer": {"state_on": "host"}}
    kept = [
        while_generating(
            recipe("vllm:d4t2|megatron:d8", offload=KEEP_ALL, megatron=m), {"actor": folder}, gpu_memory=None
        ).kept["rollout"]
        for m in ({}, megatron)
    ]
    assert kept[0] - kept[1] == pytest.approx(12 / 8 * find_shape("Qwen3-8B").n_parameters, abs=1)


@pytest.mark.parametrize("reference", [None, "Qwen3-0.6B"])
def test_a_reference_in_the_actors_processes_adds_its_weights(folder: Path, reference: str | None) -> None:
    model = reference or "Qwen3-8B"
    both = {"actor": folder} if reference is None else {"actor": folder, "ref": reference}
    with_reference, without = (
        while_generating(recipe("vllm:d4t2|megatron:d8", kl_ctl, ref, offload=KEEP_ALL), folders, gpu_memory=None).kept[
            "rollout"
        ]
        for kl_ctl, ref, folders in ((0.1, reference, both), (0.0, None, {"actor": folder}))
    )
    assert with_reference - without == 2 * find_shape(model).n_parameters


def test_a_reference_has_its_own_dtype_and_may_be_offloaded(folder: Path) -> None:
    def kept(**ref: Any) -> int:
        asked = recipe("vllm:d4t2|megatron:d8", 0.1, offload=KEEP_ALL)
        asked = asked.model_copy(update={"ref": ReferenceConfig.model_validate(ref)})
        return while_generating(asked, {"actor": folder}, gpu_memory=None).kept["rollout"]

    parameters = find_shape("Qwen3-8B").n_parameters
    assert kept(dtype="float32") - kept() == 2 * parameters
    assert kept() - kept(offload=True) == 2 * parameters
    assert kept(ema_decay=0.9) == kept(), "averages are in host memory"


def test_a_reward_model_stays_whole_while_the_rollout_generates(folder: Path) -> None:
    """It scores while the rollout is awake, so offloading its weights in between leaves the rollout no more room."""
    actor = {"offload": {"params": True, "grads": True, "optimizer": True}}

    def kept(**model: Any) -> int:
        asked = recipe("vllm[rollout]:d4t2|megatron[actor]:d8|megatron[reward]:d8", reward_model=model, **actor)
        return while_generating(asked, {"actor": folder, "reward": "Qwen3-0.6B"}, gpu_memory=None).kept["rollout"]

    alone = while_generating(recipe("vllm:d4t2|megatron:d8", **actor), {"actor": folder}, gpu_memory=None).kept[
        "rollout"
    ]
    weights = 2 * find_shape("Qwen3-0.6B").as_reward_model().n_parameters
    assert weights < kept() - alone < weights + 4e9
    assert kept(offload=True) == kept(offload=False)


def test_roles_on_other_devices_keep_nothing(folder: Path) -> None:
    found = while_generating(recipe("vllm:d2t2+megatron:d4"), {"actor": folder}, gpu_memory=None)
    assert (found.kept, found.offloaded) == ({"rollout": 0}, ())
