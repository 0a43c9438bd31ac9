"""Optimizer steps besides AdamW itself: schedule, weight decay, clipping, gradient norms and bad gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hf_reference import Tensors
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron_cases import Case, whole
from ragged import uneven_batch
from safetensors.torch import load_file
from transformers import get_cosine_with_hard_restarts_schedule_with_warmup
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.batch import Batch
from fivefold.config.schema.engine import OptimizerConfig
from fivefold.engine.contract import StepResult
from fivefold.engine.state.optimizer_state import learning_rate
from tests.rows import long

LAYOUT, *FURTHER = "megatron:(attn:t2p2|ffn:e2)", "megatron:d1", "megatron:(attn:d2t2|ffn:t2e2)"


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.25), (1, 0.5), (2, 0.75), (3, 1.0), (4, 1.0), (7, 1.0 - 3 / 6), (9, 1.0 - 5 / 6), (10, 0.0), (99, 0.0)],
)
def test_the_linear_schedule_reaches_its_end_one_step_after_the_last(step: int, expected: float) -> None:
    config = OptimizerConfig(lr=1.0, lr_scheduler_type="linear", warmup_steps_proportion=0.4)
    assert learning_rate(step, config, total_steps=10) == pytest.approx(expected)


def test_the_cosine_schedule_is_that_of_torch() -> None:
    config = OptimizerConfig(lr=3.0, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=0.3)
    for step in range(10):
        assert learning_rate(step, config, total_steps=10) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


def test_a_cosine_that_starts_again_is_that_of_transformers() -> None:
    config = OptimizerConfig(lr=2.0, lr_scheduler_type="cosine", cycles=3, warmup_steps=4)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, 4, 40, num_cycles=3)
    for step in range(45):
        if step >= 4:  # this project's warm-up has no step of rate 0
            assert learning_rate(step, config, 40) == pytest.approx(schedule.get_last_lr()[0]), step
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("shape", ["linear", "cosine", "exponential", "minus_sqrt"])
@pytest.mark.parametrize("keys", [{"decay_steps": 8}, {"decay_steps_proportion": 0.2}])
def test_a_decay_at_the_end_is_that_of_megatron_core(shape: str, keys: dict[str, float]) -> None:
    config = OptimizerConfig(
        lr=2.0, lr_scheduler_type="wsd", decay_shape=shape, min_lr_ratio=0.1, warmup_steps=4, **keys
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = OptimizerParamScheduler(
        optimizer,  # type: ignore[arg-type]
        init_lr=0.0,
        max_lr=2.0,
        min_lr=0.2,
        lr_warmup_steps=4,
        lr_decay_steps=40,
        lr_decay_style="WSD",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1,
        wd_incr_style="constant",
        wsd_decay_steps=8,
        lr_wsd_decay_style=shape,
    )
    for step in range(4, 45):
        schedule.num_steps = step
        assert learning_rate(step, config, 40) == pytest.approx(schedule.get_lr(optimizer.param_groups[0])), step


def test_the_warm_up_may_be_a_number_of_updates() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(step, config, 100) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"warmup_steps_proportion=0\.1 has no effect with warmup_steps=4"):
        OptimizerConfig(warmup_steps=4, warmup_steps_proportion=0.1)


def test_a_warm_up_may_begin_above_0_as_torchs_does() -> None:
    config = OptimizerConfig(lr=2.0, warmup_steps=5, warmup_start_ratio=0.25)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=5)
    for step in range(8):
        assert learning_rate(step, config, 100) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    with pytest.raises(ValueError, match=r"warmup_start_ratio=0\.25 has no effect without a warm-up"):
        OptimizerConfig(warmup_start_ratio=0.25)


def test_the_constant_schedule_has_no_warm_up_by_default() -> None:
    assert {learning_rate(step, OptimizerConfig(lr=2.0), total_steps=5) for step in range(9)} == {2.0}


@pytest.mark.parametrize(("proportion", "total_steps", "warmup"), [(0.07, 100, 7), (0.071, 100, 8), (6 / 11, 11, 6)])
def test_a_warm_up_has_its_share_of_the_steps_rounded_up(proportion: float, total_steps: int, warmup: int) -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps_proportion=proportion)
    rates = [learning_rate(step, config, total_steps) for step in range(total_steps)]
    assert rates == pytest.approx([min(1.0, (step + 1) / warmup) for step in range(total_steps)])


def rates(case: Case, folder: Path, config: OptimizerConfig, n_steps: int) -> list[tuple[float, set[float]]]:
    """In a worker: return the rate that each step reports, and the rates of the parameter groups."""
    engine, batch = case.engine(folder, config, total_steps=n_steps), uneven_batch()
    found = []
    for _ in range(n_steps):
        engine.forward_backward_of(batch, SFTLoss())
        result = engine.optim_step()
        found.append((result.learning_rate, {group["lr"] for group in engine.optimizer.megatron.param_groups}))
    return found


@pytest.mark.parametrize("layout", ["megatron:(attn:t2|ffn:e2)", *long("megatron:d1")])
def test_every_parameter_group_gets_the_scheduled_rate(workers: Workers, models: Path, layout: str) -> None:
    config = OptimizerConfig(lr=1e-3, lr_scheduler_type="cosine", warmup_steps_proportion=0.4, min_lr_ratio=0.1)
    scheduled = [learning_rate(step, config, 5) for step in range(5)]
    case = Case(layout)
    assert len(set(scheduled)) >= 4
    for found in workers(case.world_size).run(rates, case, models / "qwen3_moe", config, 5):
        assert found == [(rate, {rate}) for rate in scheduled]


def untrained(batch: Batch) -> Batch:
    return Batch(batch.lengths, batch.tokens_T, torch.zeros_like(batch.mask_T))


def step_without_gradient(case: Case, folder: Path, config: OptimizerConfig) -> tuple[StepResult, Tensors]:
    """In a worker: make one step on a batch that trains no token."""
    engine = case.engine(folder, config)
    engine.forward_backward_of(untrained(uneven_batch()), SFTLoss())
    return engine.optim_step(), whole(engine.export_weights())


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (LAYOUT, "qwen3_moe"),
        ("megatron:d2p2", "qwen2"),
        *long(*((layout, "qwen3_moe") for layout in FURTHER), ("megatron:d1", "qwen2")),
    ],
)
def test_weight_decay_shrinks_matrices_and_exempts_norms_and_biases(
    workers: Workers, models: Path, layout: str, model: str
) -> None:
    case, config = Case(layout), OptimizerConfig(lr=0.1, weight_decay=0.5)
    results = workers(case.world_size).run(step_without_gradient, case, models / model, config)
    before, after = load_file(models / model / "model.safetensors"), results[0][1]
    assert all(step == StepResult(0.0, 0.1, skipped=False) for step, _ in results)
    for name, weight in before.items():
        factor = 0.95 if weight.ndim > 1 else 1.0
        torch.testing.assert_close(after[name], weight * factor, rtol=1e-6, atol=0, msg=name)


@dataclass(frozen=True)
class NormAndGradient:
    reported: float
    gradients: Tensors


def gradient_norm(case: Case, folder: Path) -> NormAndGradient:
    """In a worker: return the gradient norm that a step reports, and the gradient."""
    engine = case.engine(folder, OptimizerConfig())
    engine.forward_backward_of(uneven_batch(), SFTLoss())
    gradients = whole(engine.gradients())
    return NormAndGradient(engine.optim_step().grad_norm, gradients)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (LAYOUT, "qwen3_moe_mixed"),
        ("megatron:d2p2", "qwen2"),
        *long(*((layout, "qwen3_moe_mixed") for layout in FURTHER), ("megatron:d1", "qwen2")),
    ],
)
def test_the_gradient_norm_counts_every_parameter_once(workers: Workers, models: Path, layout: str, model: str) -> None:
    case = Case(layout)
    results = workers(case.world_size).run(gradient_norm, case, models / model)
    squares = sum(float(gradient.double().square().sum()) for gradient in results[0].gradients.values())
    for result in results:
        assert result.reported == pytest.approx(math.sqrt(squares), rel=1e-5)


def clipped_update(case: Case, folder: Path, config: OptimizerConfig) -> tuple[float, Tensors]:
    """In a worker: make one step whose update is nearly proportional to the clipped gradient, as epsilon dwarfs it."""
    engine = case.engine(folder, config)
    before = {name: tensor.double().clone() for name, tensor in engine.export_weights()}
    engine.forward_backward_of(uneven_batch(), SFTLoss())
    norm = engine.optim_step().grad_norm
    after = whole(engine.export_weights())
    return norm, {name: after[name].double() - before[name] for name in after}


@pytest.mark.parametrize("layout", [LAYOUT, *long(*FURTHER)])
def test_clipping_scales_the_gradient_to_the_limit_and_no_further(workers: Workers, models: Path, layout: str) -> None:
    case, largest, lr, eps = Case(layout), 0.5, 1e6, 1e6

    def applied_norm(clipping: float) -> tuple[float, float]:
        config = OptimizerConfig(lr=lr, eps=eps, weight_decay=0.0, gradient_clipping=clipping)
        norm, update = workers(case.world_size).run(clipped_update, case, models / "qwen3_moe", config)[0]
        # Adam's first step is lr * g / (|g| + eps), so g = update * eps / lr to one part in a million.
        return norm, math.sqrt(sum(float(delta.square().sum()) for delta in update.values())) * eps / lr

    norm, applied = applied_norm(largest)
    assert norm > 2 * largest
    assert applied == pytest.approx(largest, rel=1e-4)
    for generous in (0.0, 2 * norm) if layout == "megatron:d1" else (2 * norm,):
        assert applied_norm(generous) == pytest.approx((norm, norm), rel=1e-4)


@dataclass(frozen=True)
class BadStep:
    result: StepResult
    is_unchanged: bool
    next_result: StepResult
    next_weights: Tensors


def bad_step(case: Case, folder: Path, poisoned: tuple[str, ...], value: float) -> BadStep:
    """In a worker: make a step after an element of some parameters' gradients was set to `value`, then a good one."""
    engine, batch = case.engine(folder, OptimizerConfig(lr=0.1)), uneven_batch()
    before = {name: tensor.clone() for name, tensor in engine.parameters.tensors.items()}
    engine.forward_backward_of(batch, SFTLoss())
    for name in poisoned:
        if name in engine.parameters.tensors:
            vars(engine.parameters.tensors[name])["main_grad"].flatten()[-1] = value
    result = engine.optim_step()
    is_unchanged = all(tensor.equal(before[name]) for name, tensor in engine.parameters.tensors.items())
    engine.forward_backward_of(batch, SFTLoss())
    return BadStep(result, is_unchanged, engine.optim_step(), whole(engine.export_weights()))


def good_step(case: Case, folder: Path) -> Tensors:
    engine = case.engine(folder, OptimizerConfig(lr=0.1))
    engine.forward_backward_of(uneven_batch(), SFTLoss())
    engine.optim_step()
    return whole(engine.export_weights())


@pytest.mark.parametrize(
    ("layout", "value"),
    [("megatron:d1", math.inf), (LAYOUT, math.nan), *long(*((layout, math.nan) for layout in FURTHER))],
)
def test_a_bad_gradient_changes_no_weight_and_is_named(
    workers: Workers, models: Path, layout: str, value: float
) -> None:
    case, folder = Case(layout), models / "qwen3_moe"
    poisoned = ("decoder.layers.1.self_attention.linear_proj.weight", "decoder.layers.3.mlp.experts.weight2")
    results = workers(case.world_size).run(bad_step, case, folder, poisoned, value)
    undisturbed = workers(case.world_size).run(good_step, case, folder)[0]
    for bad in results:
        assert bad.result.skipped
        assert not math.isfinite(bad.result.grad_norm)
        assert set(bad.result.non_finite) == set(poisoned)
        assert bad.is_unchanged
        assert not bad.next_result.skipped
        assert bad.next_result.non_finite == ()
    # Neither the gradient nor Adam's moments keep anything of the bad one.
    assert all(results[0].next_weights[name].equal(tensor) for name, tensor in undisturbed.items())


def step_with_a_huge_gradient(case: Case, folder: Path) -> tuple[StepResult, bool]:
    """In a worker: make a step with a finite gradient of infinite norm. Return it, and whether it changed no weight."""
    engine = case.engine(folder, OptimizerConfig(lr=0.1))
    before = {name: tensor.clone() for name, tensor in engine.parameters.tensors.items()}
    engine.forward_backward_of(uneven_batch(), SFTLoss())
    for parameter in engine.parameters.with_gradient:
        vars(parameter.tensor)["main_grad"].fill_(1e19)
    result = engine.optim_step()
    return result, all(tensor.equal(before[name]) for name, tensor in engine.parameters.tensors.items())


def test_a_step_whose_norm_exceeds_float32_is_skipped_and_names_none(workers: Workers, models: Path) -> None:
    for result, is_unchanged in workers(2).run(step_with_a_huge_gradient, Case("megatron:d2"), models / "qwen3"):
        assert result.skipped
        assert result.grad_norm == math.inf
        assert result.non_finite == ()
        assert is_unchanged


class ExplodingLoss(SFTLoss):
    """An infinite loss, as of a ratio that overflows."""

    def __call__(self, inputs):  # type: ignore[no-untyped-def]
        total, metrics = super().__call__(inputs)
        return total * math.inf, metrics


def exploding_step(case: Case, folder: Path) -> StepResult:
    engine = case.engine(folder, OptimizerConfig())
    engine.forward_backward_of(uneven_batch(), ExplodingLoss())
    return engine.optim_step()


@pytest.mark.parametrize("layout", ["megatron:d2", "megatron:(attn:t2p2|ffn:e2)"])
def test_of_many_bad_gradients_the_first_few_are_named(workers: Workers, models: Path, layout: str) -> None:
    case = Case(layout)
    results = workers(case.world_size).run(exploding_step, case, models / "qwen3_moe")
    assert all(result.skipped and 0 < len(result.non_finite) <= 8 for result in results)
    assert len({result.non_finite for result in results}) == 1
