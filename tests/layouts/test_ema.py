"""A frozen model that follows a trained one: copies and EMAs, on any layout, and in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fsdp_cases import FSDPCase
from hf_reference import Tensors
from megatron_cases import Case, whole
from ragged import uneven_batch
from test_checkpoint import commit
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.config.schema.engine import OptimizerConfig
from tests.rows import long

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3)
FOLDED = "megatron:(attn:p2t2|ffn:p2e2)"
CASES = [
    ("qwen3_moe", FOLDED, "bfloat16", 0.75, "megatron:d2"),
    *long(("qwen3_moe", "megatron:(attn:c2d2|ffn:t2e2)", "float32", 0.75, "megatron:t2")),
    ("qwen2", "megatron:p2", "bfloat16", 0.0, "megatron:d2"),  # its embeddings are tied
    ("qwen3_moe", "fsdp:d3", "bfloat16", 0.75, "megatron:t2"),  # rows that 3 does not divide
    *long(("qwen2", "fsdp:d2t2", "float32", 0.75, "fsdp:d3")),
]
"""A model, a layout, the dtype of the frozen model, its decay, and a layout that goes on."""
N_STEPS = 3


@dataclass(frozen=True)
class Followed:
    trained: list[Tensors]
    """Weights of the trained model, before its first step and after each one."""
    frozen: Tensors
    """Weights of the frozen model, which has followed after each step."""
    by_name: Tensors
    """The same, of a model that was given whole tensors by Hugging Face name."""
    later: Tensors
    """Weights of the first frozen model after it has followed once more."""


def case_of(layout: str, dtype: str = "float32") -> Case | FSDPCase:
    return FSDPCase(layout, dtype=dtype) if layout.startswith("fsdp") else Case(layout, dtype=dtype)


def follow(case: Case | FSDPCase, dtype: str, model: Path, decay: float, folder: Path) -> Followed:
    """In a worker: train a model that others follow, and save the state of one of these before they follow again."""
    trained = case.engine(model, OPTIMIZER)
    frozen, other = (case_of(case.layout, dtype).engine(model) for _ in range(2))
    ema, by_name = frozen.ema_weights(decay), other.ema_weights(decay)
    history = [whole(trained.export_weights())]
    for _ in range(N_STEPS):
        trained.forward_backward_of(uneven_batch(), SFTLoss())
        trained.optim_step()
        ema.follow(trained.held_weights())
        by_name.follow_whole(trained.export_weights())
        history.append(whole(trained.export_weights()))
    weights = whole(frozen.export_weights())
    commit(ema.snapshot(folder, copy=True), folder)
    ema.follow(trained.held_weights())
    return Followed(history, weights, whole(other.export_weights()), whole(frozen.export_weights()))


def go_on(case: Case | FSDPCase, model: Path, decay: float, folder: Path, trained: Tensors) -> tuple[Tensors, Tensors]:
    """In a worker: load a frozen model's state, and follow whole tensors. Returns the weights before and after it."""
    engine = case.engine(model)
    ema = engine.ema_weights(decay)
    ema.load(folder)
    before = whole(engine.export_weights())
    ema.follow_whole(iter(trained.items()))
    return before, whole(engine.export_weights())


def expected(history: list[Tensors], decay: float, dtype: torch.dtype) -> Tensors:
    """Return decay^n w_0 + (1 - decay) sum of decay^(n - k) w_k, computed in float64; w_0 is in the frozen dtype."""
    first, *later = history
    n = len(later)
    return {
        name: (
            decay**n * first[name].to(dtype).double()
            + (1 - decay) * sum(decay ** (n - k) * step[name].double() for k, step in enumerate(later, start=1))
        ).to(dtype)
        for name in first
    }


@pytest.mark.parametrize(("model", "layout", "dtype", "decay", "other"), CASES)
def test_a_frozen_model_follows_as_its_formula_says(
    model: str, layout: str, dtype: str, decay: float, other: str, models: Path, workers: Workers, tmp_path: Path
) -> None:
    case, state = case_of(layout), tmp_path / "state"
    followed, *_ = workers(case.world_size).run(follow, case, dtype, models / model, decay, state)
    kind = getattr(torch, dtype)
    wanted = expected(followed.trained, decay, kind)
    for name, tensor in followed.frozen.items():
        # One unit in the last place, where float32's average rounds to the other neighbour.
        torch.testing.assert_close(tensor, wanted[name], rtol=2**-7 if dtype == "bfloat16" else 1e-6, atol=1e-6)
        assert not torch.equal(tensor, followed.trained[0][name].to(kind)), f"{name} does not move"
        assert torch.equal(tensor, followed.by_name[name])

    # The state goes on, to the bit, on another layout.
    again = case_of(other, dtype)
    [(before, after), *_] = workers(again.world_size).run(
        go_on, again, models / model, decay, state, followed.trained[-1]
    )
    for name, tensor in followed.frozen.items():
        assert torch.equal(before[name], tensor)
        assert torch.equal(after[name], followed.later[name])
