"""Training resumes from a saved state bit for bit on the same layout, and within rounding on another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_reference import Tensors
from megatron_cases import Case, whole
from ragged import uneven_batch
from safetensors.torch import load_file
from worker_pool import Workers

from fivefold.algorithms.loss import SFTLoss
from fivefold.config.schema import OptimizerConfig

# With a schedule, the step count matters; a large eps keeps Adam from amplifying rounding errors.
OPTIMIZER = OptimizerConfig(lr=1e-3, lr_scheduler_type="linear", eps=1e-3)


def train_saving(case: Case, model: Path, folder: Path, skipped: int | None = None) -> tuple[Tensors, float]:
    """In a worker: make two steps, save, make two more. Returns the weights then, and the last rate.

    Step `skipped` has a gradient that is not finite.
    """
    engine = case.engine(model, OPTIMIZER)
    for step in range(4):
        engine.forward_backward_of(uneven_batch(), SFTLoss())
        if step == skipped:
            next(iter(engine.parameters.values())).main_grad.fill_(torch.nan)
        rate = engine.optim_step().learning_rate
        if step == 1:
            engine.save(folder)
    return whole(engine.export_weights()), rate


def go_on(case: Case, model: Path, folder: Path) -> tuple[Tensors, float]:
    """In a worker: load, then make two steps. Returns the weights then, and the last rate."""
    engine = case.engine(model, OPTIMIZER)
    engine.load(folder)
    for _ in range(2):
        engine.forward_backward_of(uneven_batch(), SFTLoss())
        rate = engine.optim_step().learning_rate
    return whole(engine.export_weights()), rate


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["megatron:d1", "megatron:d2e2", "megatron:(attn:p2t2|ffn:p2e2)", "megatron:p2v2"])
def test_training_resumes_bit_for_bit_on_the_same_layout(
    workers: Workers, models: Path, tmp_path: Path, layout: str, dtype: str
) -> None:
    case, model = Case(layout, dtype=dtype), models / "qwen3_moe"
    run = workers(case.world_size)
    (unbroken, rate), *_ = run.run(train_saving, case, model, tmp_path)
    (resumed, resumed_rate), *_ = run.run(go_on, case, model, tmp_path)
    assert resumed_rate == rate
    assert resumed.keys() == unbroken.keys()
    assert [name for name in unbroken if not torch.equal(resumed[name], unbroken[name])] == []


def test_a_skipped_step_counts_for_the_schedule_and_not_for_adam(
    workers: Workers, models: Path, tmp_path: Path
) -> None:
    case, model = Case("megatron:d2e2"), models / "qwen3_moe"
    (unbroken, rate), *_ = workers(2).run(train_saving, case, model, tmp_path, 1)
    (resumed, resumed_rate), *_ = workers(2).run(go_on, case, model, tmp_path)
    assert resumed_rate == rate
    assert [name for name in unbroken if not torch.equal(resumed[name], unbroken[name])] == []


def test_training_resumes_within_rounding_on_another_layout(workers: Workers, models: Path, tmp_path: Path) -> None:
    model = models / "qwen3_moe"
    (unbroken, _), *_ = workers(2).run(train_saving, Case("megatron:d2"), model, tmp_path)
    (resumed, _), *_ = workers(4).run(go_on, Case("megatron:(attn:p2t2|ffn:p2e2)"), model, tmp_path)
    for name, tensor in unbroken.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_the_state_of_tied_embeddings_is_saved_once(workers: Workers, models: Path, tmp_path: Path) -> None:
    case, model = Case("megatron:p2"), models / "qwen2"
    (unbroken, _), *_ = workers(2).run(train_saving, case, model, tmp_path)
    (resumed, _), *_ = workers(2).run(go_on, case, model, tmp_path)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in unbroken.items())
    assert "lm_head.weight" not in load_file(tmp_path / "exp_avg" / "model.safetensors")


def test_an_incomplete_state_is_refused(workers: Workers, models: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"state\.json"):
        workers(1).run(go_on, Case("megatron:d1"), models / "qwen3_moe", tmp_path)
