"""Offsets of routers' scores: moved against the load after an update, and kept in checkpoints, files and references."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import hf_reference
import pytest
import torch
from fsdp_cases import FSDPCase
from hf_reference import Tensors
from megatron_cases import Case, whole
from ragged import uneven_batch
from safetensors.torch import load_file
from test_checkpoint import commit
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.batch import Batch
from fivefold.config.schema.engine import EngineConfig, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.families.read import find_shape
from fivefold.layout.parser import parse_backend
from fivefold.rules.engines import megatron_problems
from tests.rows import long

RATE = 0.125
OPTIMIZER = OptimizerConfig(lr=1e-3)
BALANCING = MegatronConfig(transformer={"moe_router_bias_update_rate": RATE})
LAYOUTS = ["megatron:(attn:d2t2|ffn:t2e2)", *long("megatron:d1", "megatron:(attn:p2c2|ffn:p2e2)")]


def offsets_of(weights: Tensors) -> Tensors:
    return {name: tensor for name, tensor in weights.items() if name.endswith("correction_bias")}


def loads(folder: Path, batch: Batch) -> Tensors:
    """In a worker: return how many tokens each expert gets by Hugging Face's router, by the name of its offsets."""
    model = hf_reference.load_model(folder)
    counts: Tensors = {}

    def count(name: str, chosen: torch.Tensor) -> None:
        counts[name] = counts.get(name, 0) + torch.bincount(chosen.flatten(), minlength=8)

    for name, module in model.named_modules():
        if hasattr(module, "e_score_correction_bias"):
            key = f"{name}.e_score_correction_bias"
            module.register_forward_hook(lambda _module, _args, output, key=key: count(key, output[2]))
    with torch.no_grad():
        for tokens in batch.split(batch.tokens_T):
            model(tokens[None])
    return counts


def train(case: Case, folder: Path, state: Path) -> tuple[Tensors, Tensors, Tensors, Tensors]:
    """In a worker: offsets after an update, after a skipped one, and after two more; those of a model that follows."""
    engine = case.engine(folder, OPTIMIZER)
    follower = Case(case.layout, dtype="bfloat16").engine(folder).ema_weights(0.0)
    engine.forward_backward_of(uneven_batch(), SFTLoss())
    engine.optim_step()
    after_one = offsets_of(whole(engine.export_weights()))
    engine.forward_backward_of(uneven_batch(), SFTLoss())
    engine.spoil_gradient()
    assert engine.optim_step().skipped
    after_skip = offsets_of(whole(engine.export_weights()))
    commit(engine.snapshot(state), state)
    follower.follow(engine.held_weights())
    engine.forward_backward_of(uneven_batch(), SFTLoss())
    engine.load(state)
    engine.optim_step()
    kept = offsets_of(whole(engine.export_weights()))
    assert all(torch.equal(kept[name], after_skip[name]) for name in kept), "loads go with the gradients that are lost"
    for _ in range(2):
        engine.forward_backward_of(uneven_batch(), SFTLoss())
        engine.optim_step()
    followed = {name: held.values_N for name, held in follower._weights.items() if name.endswith("expert_bias")}
    return after_one, after_skip, offsets_of(whole(engine.export_weights())), followed


@pytest.fixture(scope="module")
def load_of(workers: Workers, models: Path) -> Callable[[], Tensors]:
    return cache(lambda: workers(1).run(loads, models / "glm4_moe", uneven_batch())[0])


@pytest.fixture(scope="module")
def alone(workers: Workers, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Tensors]:
    state = tmp_path_factory.mktemp("alone") / "state"
    case = Case("megatron:d1", BALANCING)
    return cache(lambda: workers(1).run(train, case, models / "glm4_moe", state)[0][2])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_offsets_move_against_the_load_whatever_the_layout(
    workers: Workers,
    models: Path,
    load_of: Callable[[], Tensors],
    alone: Callable[[], Tensors],
    tmp_path: Path,
    layout: str,
) -> None:
    model, case = models / "glm4_moe", Case(layout, BALANCING)
    before = offsets_of(load_file(model / "model.safetensors"))
    results = workers(case.world_size).run(train, case, model, tmp_path / "state")
    after_one, after_skip, after_three, _ = results[0]
    assert before.keys() == after_one.keys() == load_of().keys()
    for name, load_E in load_of().items():
        moved = RATE * torch.sign(load_E.float().mean() - load_E)
        assert moved.any()
        torch.testing.assert_close(after_one[name], before[name] + moved, rtol=0, atol=0)
        assert torch.equal(after_skip[name], after_one[name]), "a skipped step moves nothing"
        assert torch.equal(after_three[name], alone()[name])
    for *_, followed in results:
        for name, values_E in followed.items():
            hf = f"model.layers.{name.split('.')[2]}.mlp.gate.e_score_correction_bias"
            assert torch.equal(values_E, after_skip[hf]), "a reference in bfloat16 has them in float32"


def load_and_save(case: Case | FSDPCase, folder: Path, state: Path, saved: Path) -> tuple[Tensors, dict[str, float]]:
    """In a worker: load a training state, and write the model. Returns its offsets, and metrics of a step on FSDP."""
    engine = case.engine(folder, OPTIMIZER)
    engine.load(state)
    engine.save_hf(saved)
    loaded = offsets_of(whole(engine.export_weights()))
    metrics = engine.forward_backward_of(uneven_batch(), SFTLoss())
    engine.optim_step()
    kept = offsets_of(whole(engine.export_weights()))
    assert all(torch.equal(loaded[name], kept[name]) for name in loaded), "without a rate they stay as they are"
    return loaded, metrics


@pytest.mark.parametrize("other", ["megatron:p2", "fsdp:d2"])
def test_checkpoints_and_files_hold_offsets_in_float32(
    workers: Workers, models: Path, tmp_path: Path, other: str
) -> None:
    model, state, saved = models / "glm4_moe", tmp_path / "state", tmp_path / "saved"
    (_, wanted, *_), *_ = workers(2).run(train, Case("megatron:d2e2", BALANCING), model, state)
    case = FSDPCase(other, dtype="bfloat16") if other.startswith("fsdp") else Case(other, dtype="bfloat16")
    (loaded, metrics), *_ = workers(2).run(load_and_save, case, model, state, saved)
    written = {name: tensor for file in saved.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name, tensor in wanted.items():
        assert torch.equal(loaded[name], tensor)
        assert torch.equal(written[name], tensor)
    assert {tensor.dtype for tensor in offsets_of(written).values()} == {torch.float32}
    assert metrics["experts/imbalance"] > 1


def test_models_without_offsets_refuse_the_rate() -> None:
    config = EngineConfig(path="unused", megatron=BALANCING)
    (line,) = megatron_problems("actor", config, find_shape("Qwen3-30B-A3B"), parse_backend("megatron:d1"))
    assert "moe_router_bias_update_rate=0.125 is about offsets of router scores, and qwen3_moe has none" in line
