"""Several teachers: each tells its log-probs of the rows that it teaches, and no row is asked of another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fivefold.algorithms.distillation import Distillation
from fivefold.algorithms.loss import LossInputs
from fivefold.algorithms.losses.policy_gradient import Reinforce
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.batch import Columns
from fivefold.config.schema.distillation import NamedTeacherConfig
from fivefold.config.schema.engine import MicroBatchConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.distillation import TopK
from fivefold.engine.packing import BatchPlanner
from fivefold.engine.scores import Logprobs, Score
from fivefold.layout.parser import parse_backend
from fivefold.observe.timers import PhaseTimers
from fivefold.roles import remote_batch
from fivefold.roles.frozen import FrozenModel
from fivefold.roles.remote_batch import Piece, RemoteBatch, assemble
from fivefold.types import Prompt, Sample
from fivefold.update.step import Prepared
from fivefold.update.teachers import Teachers, check_taught, places

LENGTHS = np.array([3, 2, 4, 2])
SOURCES = ["math", "code", "both", "code"]


class Model(FrozenModel):
    """Tells the same log-prob of every token, in two pieces: of the even rows of what it is asked, and of the odd."""

    def __init__(self, logprob: float) -> None:
        self.logprob = logprob
        self.asked: list[list[int]] = []

    def score(self, batch: RemoteBatch, what: Score) -> tuple[Piece, ...]:
        self.asked.append(batch.lengths_N.tolist())
        pieces = []
        for first in (0, 1):
            rows = np.arange(first, len(batch), 2)
            n = int(batch.lengths_N[rows].sum())
            columns = what.columns(torch.full((what.n_rows, n), self.logprob), torch.ones(n))
            values: dict[str, Any] = {name: tensor.numpy() for name, tensor in columns.items()}
            pieces.append(Piece(Columns(batch.lengths_N[rows].astype(np.int32), values), rows))
        return tuple(pieces)


def teachers(**sources: Sequence[str] | None) -> dict[str, NamedTeacherConfig]:
    return {
        name: NamedTeacherConfig(path=name, data_sources=None if own is None else list(own))
        for name, own in sources.items()
    }


def whole_batch() -> RemoteBatch:
    n = int(LENGTHS.sum())
    columns: Any = Columns(LENGTHS.astype(np.int32), {"tokens": np.arange(n), "mask": np.ones(n, bool)})
    return RemoteBatch(LENGTHS, LENGTHS, (Piece(columns, np.arange(4)),))


def fields_by_row(batch: RemoteBatch, n_replicas: int) -> list[dict[str, torch.Tensor]]:
    """Return the fields of each row, as the replica that has it assembles them."""
    layout = parse_backend(f"megatron:d{n_replicas}")
    plan = BatchPlanner.of(MicroBatchConfig(max_tokens_per_mb=64), layout, quadratic_at=100.0).plan(LENGTHS.tolist())
    rows: list[dict[str, torch.Tensor]] = [{} for _ in LENGTHS]
    for replica, (order, columns) in enumerate(batch.orders(plan)):
        share = assemble(order, columns).batch
        for place, row in enumerate(plan.sequences(replica)):
            rows[row] = {name: share.split(values_T)[place] for name, values_T in share.fields.items()}
    return rows


@pytest.mark.parametrize("n_replicas", [1, 2, 4])
def test_teachers_that_share_no_prompt_fill_the_same_column(n_replicas: int) -> None:
    config = teachers(a=["math", "both"], b=["code"])
    models = {"a": Model(-1.0), "b": Model(-2.0)}
    part = Teachers(models, config, Logprobs(1.0, "teacher_logprobs"), PhaseTimers())
    batch = part.taught(whole_batch(), SOURCES)
    assert models["a"].asked == [[3, 4]], "no row is asked of another's teacher"
    assert models["b"].asked == [[2, 2]]
    for row, told in enumerate(fields_by_row(batch, n_replicas)):
        assert told.keys() == {"teacher_logprobs"}
        assert told["teacher_logprobs"].tolist() == [-1.0 if SOURCES[row] in ("math", "both") else -2.0] * LENGTHS[row]


@pytest.mark.parametrize("n_replicas", [1, 2, 4])
def test_the_loss_has_the_weighted_mean_over_the_teachers_of_each_row(n_replicas: int) -> None:
    config = teachers(a=["math", "both"], b=["code", "both"], c=["both"])
    config["c"] = config["c"].model_copy(update={"weight": 2.0})
    log_q = {"a": -1.0, "b": -2.0, "c": -4.0}
    models = {name: Model(value) for name, value in log_q.items()}
    part = Teachers(models, config, Logprobs(1.0, "teacher_logprobs"), PhaseTimers())
    samples = [Sample(Prompt(i, "?", (1,), "", source), "", "stop", 3, 2, (0, 0)) for i, source in enumerate(SOURCES)]
    step = Prepared(1, samples, whole_batch(), None, np.zeros(4, np.float32))  # type: ignore[arg-type]
    prepared = part.prepare(step)
    assert prepared.metrics == {"teacher_rows/a": 0.5, "teacher_rows/b": 0.75, "teacher_rows/c": 0.25}
    loss = part.loss(PolicyLoss(1.0, Reinforce(), distillation=Distillation(1.0)), prepared)
    expected = {"math": -1.0, "code": -2.0, "both": (-1.0 - 2.0 + 2 * -4.0) / 4}
    for row, told in enumerate(fields_by_row(prepared.batch, n_replicas)):
        n = int(LENGTHS[row])
        logprobs_T = torch.full((n,), -0.5, requires_grad=True)
        predictions = {"logprobs": logprobs_T, "entropy": torch.zeros(n)}
        inputs = LossInputs(predictions, torch.ones(n), (n,), {"advantages": torch.zeros(n), **told})
        total, _ = loss(inputs)
        (gradient_T,) = torch.autograd.grad(total, logprobs_T)
        assert_allclose(gradient_T, -(expected[SOURCES[row]] + 0.5), rtol=1e-6)


def test_a_teachers_most_likely_tokens_are_columns_of_its_place() -> None:
    config = teachers(a=None, b=["code"])
    models = {"a": Model(-1.0), "b": Model(-2.0)}
    batch = Teachers(models, config, TopK(2, 1.0), PhaseTimers()).taught(whole_batch(), SOURCES)
    rows = fields_by_row(batch, 1)
    assert rows[1]["teacher_tokens"].shape == (2, 2)
    assert rows[1]["teacher_token_logprobs/1"].tolist() == [[-2.0] * 2] * 2
    assert rows[0]["teacher_weight/1"].tolist() == [0.0] * 3
    assert rows[1]["teacher_weight"].tolist() == [0.5] * 2


def test_teachers_have_the_first_place_that_no_other_teacher_of_their_prompts_has() -> None:
    assert places(teachers(a=["x"], b=["y"], c=["z"])) == {"a": 0, "b": 0, "c": 0}
    assert places(teachers(a=["x"], b=["x", "y"], c=["y"], d=["z"])) == {"a": 0, "b": 1, "c": 0, "d": 0}
    assert places(teachers(a=None, b=["y"], c=None)) == {"a": 0, "b": 1, "c": 2}


def test_every_prompt_has_a_teacher_and_every_teacher_a_prompt() -> None:
    def check(**sources: Sequence[str] | None) -> None:
        values = {"experiment_name": "e", "actor": {"path": "m", "distill": {"coeff": 1.0}}}
        recipe = TrainRecipe.model_validate({**values, "train_dataset": {"path": "d"}, "teachers": teachers(**sources)})
        check_taught(recipe, [Prompt(0, "?", (1,), "", "math"), Prompt(1, "?", (1,), "", "code")])

    check(a=["math"], b=None)
    with pytest.raises(ValueError, match=r"no teacher teaches the prompts of data_source 'code' \(1\)"):
        check(a=["math"])
    with pytest.raises(ValueError, match=r"teachers\.b\.data_sources=\['maths'\] names no data_source of the prompts"):
        check(a=None, b=["maths"])


@pytest.fixture(autouse=True)
def _without_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_batch, "put", lambda columns: columns)
