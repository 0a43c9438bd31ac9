"""Training state is the same from every layout and on every layout; on its own, training resumes bit for bit."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import AnyCase, case_of
from compare import assert_close
from fsdp_cases import OpenFSDPEngine
from hf_reference import Tensors
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron_cases import Case, OpenEngine, whole
from ragged import uneven_batch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.config.schema.engine import OptimizerConfig
from fivefold.engine.contract import Snapshot
from fivefold.engine.state.dcp_files import finish
from tests.rows import long

# With a schedule, the step count matters; a large eps keeps Adam from amplifying rounding errors.
OPTIMIZER = OptimizerConfig(lr=1e-3, lr_scheduler_type="linear", eps=1e-3, gradient_clipping=0.0)
KINDS = ("param", "exp_avg", "exp_avg_sq")

CASES = [
    ("qwen3_moe", "megatron:(attn:p2t2|ffn:p2e2)", ("megatron:d4e4", "megatron:d1"), "bfloat16"),
    ("qwen2_moe", "fsdp:d2t2", ("megatron:(attn:t2|ffn:d2)", "fsdp:d3"), "bfloat16"),
]
FURTHER = [
    ("qwen2", "megatron:p2", ("megatron:t2", "megatron:d3"), "float32"),
    ("gpt_oss", "megatron:(attn:t2|ffn:e2)", ("megatron:p2", "fsdp:d3"), "float32"),
    ("gpt_oss", "megatron:(attn:d2t2|ffn:t2e2)", ("megatron:d1",), "float32"),
    ("qwen3_moe", "megatron:(attn:d2t2|ffn:t2e2)", ("megatron:(attn:p2v2d2|ffn:p2v2e2)", "megatron:t2"), "float32"),
    ("deepseek_v2", "megatron:d4", ("megatron:d2c2", "megatron:(attn:t2c2|ffn:e4)"), "float32"),
    ("qwen2_moe", "megatron:(attn:t2|ffn:d2)", ("megatron:d2", "megatron:p2"), "bfloat16"),
    ("qwen3_5", "megatron:p2t2", ("megatron:t2", "fsdp:d3"), "float32"),
    ("qwen2", "megatron:t2", ("fsdp:d3", "fsdp:t2", "megatron:p2t2"), "float32"),
]
"""A model, the layout that saves, layouts that load, and the dtype.

In bfloat16, the stored weights are the master weights, which are split over ranks as the moments are anyway.
"""
SAME_LAYOUTS = ("megatron:(attn:p2t2|ffn:p2e2)", "fsdp:d2t2")
"""Layouts that both save and load."""


@dataclass(frozen=True)
class Trained:
    weights: Tensors
    """As they are exported; on rank 0 only."""
    gradients: list[Tensors]
    """Of each step; on rank 0 only."""
    rate: float
    """The last learning rate."""
    generators: Tensors
    """States of torch's generator and, on Megatron-Core, of those that it tracks."""


def train(engine: OpenEngine | OpenFSDPEngine, n_steps: int, skipped: int | None = None) -> Trained:
    """Make steps. Step `skipped` has a gradient that is not finite."""
    gradients = []
    for step in range(n_steps):
        engine.forward_backward_of(uneven_batch(), SFTLoss())
        gradients.append(whole(engine.gradients()))
        if step == skipped:
            engine.spoil_gradient()
        rate = engine.optim_step().learning_rate
        torch.rand(3)
        if isinstance(engine, OpenEngine):
            with get_cuda_rng_tracker().fork():  # as for dropout
                torch.rand(3)
    generators = {"torch": torch.get_rng_state()}
    if isinstance(engine, OpenEngine):
        generators |= get_cuda_rng_tracker().get_states()
    return Trained(whole(engine.export_weights()), gradients, rate, generators)


def commit(snapshot: Snapshot, folder: Path) -> None:
    """Write the snapshots of all ranks; rank 0 takes the driver's part."""
    part = snapshot.write()
    parts = [part] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    if dist.get_rank() == 0:
        finish(folder, parts)
    dist.barrier()


def save_and_go_on(case: AnyCase, model: Path, folder: Path, skipped: int | None = None) -> Trained:
    """In a worker: make two steps, take a snapshot, and write it after two more steps."""
    engine = case.engine(model, OPTIMIZER)
    torch.manual_seed(dist.get_rank())
    train(engine, 2, skipped)
    snapshot = engine.snapshot(folder)
    trained = train(engine, 2)
    commit(snapshot, folder)
    return trained


def go_on(case: AnyCase, model: Path, folder: Path) -> Trained:
    """In a worker: load, then make two steps."""
    engine = case.engine(model, OPTIMIZER)
    engine.load(folder)
    return train(engine, 2)


def train_and_save(case: AnyCase, model: Path, folder: Path) -> Trained:
    """In a worker: make two steps, and save."""
    engine = case.engine(model, OPTIMIZER)
    trained = train(engine, 2)
    commit(engine.snapshot(folder), folder)
    return trained


def load_and_save(case: AnyCase, model: Path, folder: Path, again: Path) -> tuple[Tensors, Trained]:
    """In a worker: load into an engine with another history, save, and make a step. Returns the loaded weights, too."""
    engine = case.engine(model, OPTIMIZER)
    train(engine, 1)
    engine.forward_backward_of(uneven_batch(), SFTLoss())
    engine.load(folder)
    assert not any(tensor.any() for _, tensor in engine.gradients())
    commit(engine.snapshot(again), again)
    return whole(engine.export_weights()), train(engine, 1)


def read_with_torch(folder: Path) -> dict[str, Tensors]:
    """Return all tensors by kind and name, as torch.distributed.checkpoint loads them in one process."""
    file = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, file)
    tensors = torch.load(file)
    return {
        kind: in_files({key.split("/", 1)[1]: each for key, each in tensors.items() if key.split("/", 1)[0] == kind})
        for kind in KINDS
    }


def in_files(tensors: Tensors) -> Tensors:
    """Return tensors as model files have them; those of GPT-OSS's experts are in one, where states have each alone."""
    found, experts = dict[str, torch.Tensor](), dict[str, dict[int, torch.Tensor]]()
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.+\.experts)\.(\d+)\.((?:gate_up|down)_proj(?:_bias)?)", name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([own[expert] for expert in sorted(own)]) for name, own in experts.items()}


def adams_moments(gradients: list[Tensors]) -> dict[str, Tensors]:
    """Return the moments after steps with these gradients, by the formulas of Kingma and Ba (2015)."""
    moments = {"exp_avg": dict.fromkeys(gradients[0], 0.0), "exp_avg_sq": dict.fromkeys(gradients[0], 0.0)}
    for step in gradients:
        for name, gradient in step.items():
            for kind, beta, value in (
                ("exp_avg", OPTIMIZER.beta1, gradient),
                ("exp_avg_sq", OPTIMIZER.beta2, gradient.square()),
            ):
                moments[kind][name] = beta * moments[kind][name] + (1 - beta) * value
    return moments


def assert_equal(got: Tensors, want: Tensors) -> None:
    assert got.keys() == want.keys()
    assert [name for name, tensor in want.items() if not torch.equal(got[name], tensor)] == []


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, "bfloat16") for layout in SAME_LAYOUTS),
        *long(*((layout, "bfloat16") for layout in ("megatron:d1", "megatron:d2e2", "megatron:p2v2"))),
        *long(("megatron:p2v2", "float32")),
    ],
)
def test_training_resumes_bit_for_bit_on_the_same_layout(
    workers: Workers, models: Path, tmp_path: Path, layout: str, dtype: str
) -> None:
    case, model = case_of(layout, dtype=dtype), models / "qwen3_moe"
    run = workers(case.world_size)
    unbroken = run.run(save_and_go_on, case, model, tmp_path)
    resumed = run.run(go_on, case, model, tmp_path)
    assert [rank.rate for rank in resumed] == [rank.rate for rank in unbroken]
    for ours, theirs in zip(resumed, unbroken, strict=True):
        assert_equal(ours.generators, theirs.generators)
    assert_equal(resumed[0].weights, unbroken[0].weights)


def save_both_and_go_on(case: Case, model: Path, copied: Path, written: Path) -> Trained:
    """In a worker: make two steps, save from a copy and without one, and make two more steps."""
    engine = case.engine(model, OPTIMIZER)
    train(engine, 2)
    commit(engine.snapshot(copied), copied)
    with patch("fivefold.engine.state.state_store.CHUNK_ELEMENTS", 500):
        commit(engine.snapshot(written, copy=False), written)
    return train(engine, 2)


def test_a_state_that_is_written_without_a_copy_is_the_same(workers: Workers, models: Path, tmp_path: Path) -> None:
    case, model = Case("megatron:(attn:t2|ffn:e2)", dtype="bfloat16"), models / "qwen3_moe"
    copied, written = tmp_path / "copied", tmp_path / "written"
    unbroken = workers(2).run(save_both_and_go_on, case, model, copied, written)
    for kind, tensors in read_with_torch(copied).items():
        assert_equal(read_with_torch(written)[kind], tensors)
    resumed = workers(2).run(go_on, case, model, written)
    for ours, theirs in zip(resumed, unbroken, strict=True):
        assert_equal(ours.generators, theirs.generators)
    assert_equal(resumed[0].weights, unbroken[0].weights)


@pytest.mark.parametrize(
    ("family", "layout", "others", "dtype"),
    [*CASES, *long(*FURTHER)],
    ids=[f"{family} {layout} {dtype}" for family, layout, _, dtype in (*CASES, *FURTHER)],
)
def test_weights_and_moments_are_the_same_on_every_layout(
    workers: Workers, models: Path, tmp_path: Path, family: str, layout: str, others: tuple[str, ...], dtype: str
) -> None:
    case, model = case_of(layout, dtype=dtype), models / family
    trained, *_ = workers(case.world_size).run(train_and_save, case, model, tmp_path / "first")
    state = read_with_torch(tmp_path / "first")
    assert_equal({name: tensor.to(getattr(torch, dtype)) for name, tensor in state["param"].items()}, trained.weights)
    for kind, moments in adams_moments(trained.gradients).items():
        assert_close(state[kind], moments, 1e-6)
    for number, other in enumerate(others):
        case = case_of(other, dtype=dtype)
        again = tmp_path / str(number)
        (loaded, after), *_ = workers(case.world_size).run(load_and_save, case, model, tmp_path / "first", again)
        assert_equal(loaded, trained.weights)
        for kind, tensors in read_with_torch(again).items():
            assert_equal(tensors, state[kind])
        assert after.rate == pytest.approx(0.8e-3)


def test_training_continues_within_rounding_on_another_layout(workers: Workers, models: Path, tmp_path: Path) -> None:
    model = models / "qwen3_moe"
    unbroken, *_ = workers(2).run(save_and_go_on, Case("megatron:d2"), model, tmp_path)
    resumed, *_ = workers(4).run(go_on, Case("megatron:(attn:p2t2|ffn:p2e2)"), model, tmp_path)
    assert resumed.rate == unbroken.rate
    for name, tensor in unbroken.weights.items():
        torch.testing.assert_close(resumed.weights[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_a_skipped_step_counts_for_the_schedule_and_not_for_adam(
    workers: Workers, models: Path, tmp_path: Path
) -> None:
    case, model = Case("megatron:d2e2"), models / "qwen3_moe"
    unbroken, *_ = workers(2).run(save_and_go_on, case, model, tmp_path, 1)
    resumed, *_ = workers(2).run(go_on, case, model, tmp_path)
    assert resumed.rate == unbroken.rate
    assert_equal(resumed.weights, unbroken.weights)


def test_tied_embeddings_are_stored_once(workers: Workers, models: Path, tmp_path: Path) -> None:
    case, model = Case("megatron:p2"), models / "qwen2"
    unbroken, *_ = workers(2).run(save_and_go_on, case, model, tmp_path)
    resumed, *_ = workers(2).run(go_on, case, model, tmp_path)
    assert_equal(resumed.weights, unbroken.weights)
    assert all("lm_head.weight" not in tensors for tensors in read_with_torch(tmp_path).values())


def load_broken(case: Case, model: Path, folder: Path) -> str:
    """In a worker: return the message of the error with which `load` ends."""
    engine = case.engine(model, OPTIMIZER)
    before = whole(engine.export_weights())
    with pytest.raises(ValueError, match=r"another model|missing|truncated|metadata") as raised:
        engine.load(folder)
    assert_equal(whole(engine.export_weights()), before)
    return str(raised.value)


def test_a_state_that_is_not_whole_or_of_another_model_is_refused(
    workers: Workers, models: Path, tmp_path: Path
) -> None:
    case, model, whole_state, broken = Case("megatron:d1"), models / "qwen3_moe", tmp_path / "a", tmp_path / "b"
    workers(1).run(train_and_save, case, model, whole_state)

    def message(family: str = "qwen3_moe") -> str:
        return workers(1).run(load_broken, case, models / family, broken)[0]

    def break_anew() -> Path:
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(whole_state, broken)
        return broken / "__0_0.distcp"

    break_anew()
    other = message("qwen3_moe_mixed")
    assert "another model" in other
    assert "model.layers.0.mlp.gate_proj.weight" in other
    (broken / ".metadata").unlink()
    assert ".metadata" in message()
    file = break_anew()
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(size // 2)
    assert all(part in message() for part in ("__0_0.distcp", "truncated", f"{size // 2:,}", f"{size:,}"))
    break_anew().unlink()
    assert "__0_0.distcp is missing" in message()
    (broken / ".metadata").write_bytes(b"no index")
    assert ".metadata" in message()


def take_two(case: Case, model: Path, folder: Path) -> None:
    """In a worker: take a second snapshot while the first is not written."""
    engine = case.engine(model, OPTIMIZER)
    first = engine.snapshot(folder)
    with pytest.raises(ValueError, match="not written yet"):
        engine.snapshot(folder)
    first.write()
    engine.snapshot(folder)


def test_a_snapshot_is_not_overwritten_before_it_is_written(workers: Workers, models: Path, tmp_path: Path) -> None:
    workers(1).run(take_two, Case("megatron:d1"), models / "qwen3_moe", tmp_path)
