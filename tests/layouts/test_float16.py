"""Models in float16: the loss has a factor, which an overflow halves, and which the training state keeps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from fsdp_cases import FSDPCase
from megatron_cases import Case, OpenEngine
from ragged import uneven_batch
from test_checkpoint import commit
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.config.schema.engine import OptimizerConfig
from fivefold.engine.contract import StepResult
from fivefold.engine.state import loss_scale
from fivefold.engine.state.loss_scale import FIRST, LossScale
from tests.rows import long

AnyCase = Case | FSDPCase
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, gradient_clipping=0.5)


def of(layout: str, dtype: str = "float16") -> AnyCase:
    return FSDPCase(layout, dtype=dtype) if layout.startswith("fsdp") else Case(layout, dtype=dtype)


def step(engine: OpenEngine) -> StepResult:
    engine.forward_backward_of(uneven_batch(), SFTLoss())
    return engine.optim_step()


def steps_with(case: AnyCase, folder: Path, factor: float | None, n_steps: int) -> list[tuple[float, float]]:
    """In a worker: train with a factor of the loss, None: the engine's own one. Returns losses and gradient norms."""
    engine = case.engine(folder, OPTIMIZER)
    found = []
    for _ in range(n_steps):
        if factor is not None:
            engine.optimizer.loss_scale.value = factor
        loss = engine.forward_backward_of(uneven_batch(), SFTLoss())["loss"]
        found.append((loss, engine.optim_step().grad_norm))
    return found


@pytest.mark.parametrize(
    "layout", ["megatron:d1", "fsdp:d1", *long("megatron:(attn:t2|ffn:e2)", "fsdp:d2", "megatron:p2v2")]
)
def test_a_scaled_loss_keeps_the_gradient_and_a_tiny_one_loses_it(workers: Workers, models: Path, layout: str) -> None:
    folder, case = models / "qwen3_moe", of(layout)
    exact = workers(1).run(steps_with, of("megatron:d1", "float32"), folder, None, 2)[0]
    run = workers(case.world_size).run
    scaled, tiny = (run(steps_with, case, folder, factor, 2)[0] for factor in (None, 2.0**-20))
    for (loss, norm), (exact_loss, exact_norm) in zip(scaled, exact, strict=True):
        assert loss == pytest.approx(exact_loss, rel=0.002)
        assert norm == pytest.approx(exact_norm, rel=0.02)
    assert tiny[0][0] == scaled[0][0]
    assert tiny[0][1] < 0.9 * exact[0][1]


@dataclass(frozen=True)
class Resumed:
    first: StepResult
    is_unchanged: bool
    norms: list[float]
    scales: list[float | None]
    norms_again: list[float]
    scales_again: list[float | None]


def overflow_and_resume(case: AnyCase, folder: Path, saved: Path) -> Resumed:
    """In a worker: overflow, save, make two steps, load, and make them again."""
    engine = case.engine(folder, OPTIMIZER)
    engine.optimizer.loss_scale.value = 2.0**40
    before = [part.get("param").clone() for part in engine.optimizer.slices()]
    first = step(engine)
    same = all(old.equal(part.get("param")) for old, part in zip(before, engine.optimizer.slices(), strict=True))
    engine.optimizer.loss_scale.value = 2.0 * FIRST
    commit(engine.snapshot(saved), saved)
    results = [step(engine) for _ in range(2)]
    again = case.engine(folder, OPTIMIZER)
    again.load(saved)
    repeated = [step(again) for _ in range(2)]
    return Resumed(
        first,
        same,
        *([result.grad_norm for result in results], [result.loss_scale for result in results]),
        *([result.grad_norm for result in repeated], [result.loss_scale for result in repeated]),
    )


@pytest.mark.parametrize("layout", ["megatron:d1", *long("megatron:d2e2", "fsdp:d2")])
def test_an_overflow_halves_the_factor_which_a_run_resumes_with(
    workers: Workers, models: Path, tmp_path: Path, layout: str
) -> None:
    case = of(layout)
    for found in workers(case.world_size).run(overflow_and_resume, case, models / "qwen3_moe", tmp_path / "state"):
        assert (found.first.skipped, found.first.was_scaled, found.first.loss_scale) == (True, True, 2.0**40)
        assert found.is_unchanged
        assert found.scales == [2 * FIRST] * 2
        assert (found.norms_again, found.scales_again) == (found.norms, found.scales)


def test_the_factor_falls_at_once_and_rises_after_many_good_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROWS_AFTER", 3)
    scale, values = LossScale.of("float16"), []
    for is_finite in (False, True, True, False, True, True, True, True):
        scale.after(is_finite=is_finite)
        values.append(scale.value / FIRST)
    assert values == [0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.5, 0.5]
    for _ in range(40):
        scale.after(is_finite=False)
    assert scale.value == 1.0
    other = LossScale.of("bfloat16")
    other.after(is_finite=False)
    assert (other.value, other.shown) == (1.0, None)
