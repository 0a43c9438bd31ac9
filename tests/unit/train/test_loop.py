"""Files of a training run that fails in a step: the loop, with stand-ins for its processes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold import evaluate, train
from fivefold.algorithms.metrics import Metric
from fivefold.batch import Columns
from fivefold.checkpoints.start import FromScratch
from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.scores import Logprobs, Score
from fivefold.experience.stream import Stream
from fivefold.observe.columns import TRAIN_COLUMNS
from fivefold.observe.console import RunConsole
from fivefold.observe.errors import RunFailed
from fivefold.observe.run_dir import RunDir
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.devices import Roles
from fivefold.roles.frozen import FrozenModel, HostedModel
from fivefold.roles.models import MovedBytes, Trainer, Turn
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.roles.responses import Job, Responses
from fivefold.roles.rollout_worker import RolloutWorker
from fivefold.roles.trainer_worker import UpdateResult
from fivefold.roles.weight_sync import WeightSync
from fivefold.run.resume import state_at_start
from fivefold.run.setup import OpenRun
from fivefold.run.stepwise import to_the_end
from fivefold.train_setup import set_up
from fivefold.types import Completion, Episode
from fivefold.update.step import MOST_SKIPPED, Skips
from tests.unit.experience.local_replicas import LocalGroup, LocalRollout

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"


class FixedWorker(RolloutWorker):
    """Answers jobs of `n_answers` rounds with the same two tokens, then fails."""

    def __init__(self, n_answers: int) -> None:
        self._n_answers = n_answers
        self._waiting: list[Job] = []
        self.taken: list[int] = []
        """Versions of the weights that it was given."""
        self.has_weights = True

    def take_version(self, version: int) -> None:
        self.taken.append(version)
        self.has_weights = True

    def advance(self, jobs: Sequence[Job], seconds: float) -> tuple[Responses, Columns | None]:
        if not self.has_weights:
            return _lost(jobs), None
        if jobs and self._n_answers == 0:
            raise OSError("the rollout is out of answers")
        self._n_answers -= bool(jobs)
        done = [self.trajectory(job) for job in jobs for _ in job.requests]
        return Responses.of([job.number for job in jobs], done, self.texts(jobs), 0.001), Columns.of(done)

    def trajectory(self, job: Job) -> Episode:
        return Episode.single_turn(job.prompt, Completion.of([5, 6], [-1.0, -1.0], "length", 0))

    def texts(self, jobs: Sequence[Job]) -> list[str]:
        return ["56" for job in jobs for _ in job.requests]


def _lost(jobs: Sequence[Job]) -> Responses:
    """Return the report of a server that has died, and has no weights."""
    return replace(Responses.of([], [], []), lost={job.number: job.requests for job in jobs}, has_weights=False)


class DyingWorker(FixedWorker):
    """Has a server that dies while it takes the weights of step 1 for the first time, which its next report tells."""

    def take_version(self, version: int) -> None:
        super().take_version(version)
        self.has_weights = self.taken != [0, 1]


class DyingInEvaluation(FixedWorker):
    """Has a server that dies in the evaluation after step 1."""

    def advance(self, jobs: Sequence[Job], seconds: float) -> tuple[Responses, Columns | None]:
        if self.taken == [0, 1]:
            self.has_weights = False
        return super().advance(jobs, seconds)


class DyingInStep(FixedWorker):
    """Has a server that dies in step 1."""

    def advance(self, jobs: Sequence[Job], seconds: float) -> tuple[Responses, Columns | None]:
        if self.taken == [0] and jobs and not jobs[0].sampling.greedy:
            self.has_weights = False
        return super().advance(jobs, seconds)


class FixedRollout(LocalRollout):
    """Replicas that take no tensors."""

    def __init__(self, worker: FixedWorker, *, is_server: bool = False) -> None:
        super().__init__(LocalGroup([worker]), is_server=is_server)
        self.device_share = None
        self._worker = worker

    def can_generate(self) -> bool:
        return self._worker.has_weights


class FixedSync(WeightSync):
    """Sends versions without tensors."""

    def __init__(self, rollout: FixedRollout) -> None:
        self._rollout = rollout

    def send(self, version: int) -> None:
        self._rollout._worker.take_version(version)


class FixedActor(Actor):
    def __init__(self, grad_norm: float) -> None:
        self._grad_norm = grad_norm
        self.moved = MovedBytes()
        self._turn = Turn()

    def save(self, folder: Path) -> None: ...

    def device_names(self) -> list[str | None]:
        return [None]

    def score(self, batch: RemoteBatch, what: Score) -> tuple[Piece, ...]:
        return ()

    def update(self, *_: Any) -> UpdateResult:
        skipped = not math.isfinite(self._grad_norm)
        metrics = {
            "loss": Metric(0.0),
            "grad_norm": Metric(self._grad_norm),
            "lr": Metric(1e-6, reduce="last"),
            "skipped_updates": Metric(float(skipped), reduce="sum"),
        }
        return UpdateResult(metrics, skipped, non_finite=("layers.0",))


def loop(
    root: Path, actor: FixedActor, rollout: FixedRollout, **resumed: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the metrics and the samples that a run of two steps has written when an error ends it.

    `resumed` are fields of its state before the first step that a new run has otherwise.
    """
    overrides = [
        f"cluster.fileroot={root}", "total_train_steps=2", "train_dataset.limit=64", "valid_dataset.limit=4",
        "actor.ppo_n_minibatches=4", "evaluator.freq_steps=1", "recover.mode=disabled",
        "stats.logged_tokens=false",
    ]  # fmt: skip
    setup = set_up(load_recipe(QUICKSTART, overrides, TrainRecipe))
    folder = RunDir.create(setup.recipe, overwrite=False)
    run = OpenRun(folder, RunConsole(TRAIN_COLUMNS, timers := PhaseTimers()), timers, session=None)  # type: ignore[arg-type]
    state, _ = state_at_start(setup.recipe, FromScratch("from scratch"), setup.sampler, setup.ground, setup.total_steps)
    roles = Roles(actor, rollout=rollout, sync=FixedSync(rollout))
    with pytest.raises((RunFailed, OSError)), folder:
        to_the_end(train.run_loop(setup, roles, run, replace(state, **resumed), began=0.0))
    return tuple(  # type: ignore[return-value]
        [json.loads(line) for line in file.read_text().splitlines()] for file in (folder.metrics, folder.samples)
    )


def test_metrics_and_samples_of_a_step_are_written_even_if_its_updates_are_not_finite(tmp_path: Path) -> None:
    metrics, samples = loop(tmp_path, FixedActor(math.nan), FixedRollout(FixedWorker(9)))
    assert [(row["step"], row["skipped_updates"]) for row in metrics] == [(1, MOST_SKIPPED)]
    assert "response_length/mean" in metrics[0]
    assert {sample["step"] for sample in samples} == {1}


@pytest.mark.parametrize("before", range(MOST_SKIPPED))
def test_updates_that_were_skipped_before_an_interruption_count_after_it(before: int, tmp_path: Path) -> None:
    rollout = FixedRollout(FixedWorker(9))
    metrics, _ = loop(tmp_path, FixedActor(math.nan), rollout, skips_in_a_row=before)
    assert [row["skipped_updates"] for row in metrics] == [MOST_SKIPPED - before]


def test_the_rollout_gets_the_weights_of_every_step(tmp_path: Path) -> None:
    # It answers before training, in two steps and in the evaluation between them.
    worker = FixedWorker(4)
    loop(tmp_path, FixedActor(1.0), FixedRollout(worker))
    assert worker.taken == [0, 1, 2]


@pytest.mark.parametrize(
    ("dies", "taken"), [(DyingWorker, [0, 1, 1]), (DyingInEvaluation, [0, 1, 1]), (DyingInStep, [0, 0, 1])]
)
def test_a_server_that_was_started_again_gets_the_weights_of_now_and_answers(
    dies: type[FixedWorker], taken: list[int], tmp_path: Path
) -> None:
    worker = dies(3)
    metrics, _ = loop(tmp_path, FixedActor(1.0), FixedRollout(worker, is_server=True))
    assert worker.taken == taken
    assert [row["step"] for row in metrics if "eval/accuracy" in row] == [1]


def test_metrics_of_a_step_are_written_even_if_its_evaluation_fails(tmp_path: Path) -> None:
    # The rollout answers before training and in step 1, but not in the evaluation after it.
    metrics, samples = loop(tmp_path, FixedActor(1.0), FixedRollout(FixedWorker(2)))
    assert [row["step"] for row in metrics] == [1]
    assert metrics[0]["grad_norm"] == 1.0
    assert "eval/accuracy" not in metrics[0]
    assert {sample["step"] for sample in samples} == {1}


class NoSession:
    """A session without processes."""

    @classmethod
    def open(cls, *_: Any) -> NoSession:
        return cls()

    def __enter__(self) -> NoSession:
        return self

    def __exit__(self, *_: object) -> None: ...

    def launch(self, *_: Any) -> dict[str, Any]:
        return {"rollout": LocalGroup([None])}

    def progress(self) -> dict[str, Any]:
        return {}


def test_an_evaluation_that_fails_is_a_failed_run_and_leaves_its_logs_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def judge(*_: Any) -> None:
        raise ValueError("the reward is nan")

    monkeypatch.setattr(evaluate, "Session", NoSession)
    monkeypatch.setattr(evaluate.Evaluator, "run", judge)
    monkeypatch.setattr(evaluate.tempfile, "tempdir", str(tmp_path))
    left = []
    for _ in range(2):
        with pytest.raises(RunFailed, match="the reward is nan"):
            evaluate.evaluate(load_recipe(QUICKSTART, [], TrainRecipe))
        left.append(list(tmp_path.iterdir()))
    assert [len(each) for each in left] == [1, 1]
    assert left[0] != left[1]


def test_an_evaluation_tells_the_chance_that_one_of_k_completions_is_right() -> None:
    class Halves(FixedWorker):
        """Answers each prompt rightly the first time, and wrongly the other three times."""

        def texts(self, jobs: Sequence[Job]) -> list[str]:
            return [text for job in jobs for text in [str(job.prompt.ground_truth), *["no number"] * 3]]

    keys = ["valid_dataset.limit=3", "evaluator.greedy=false", "evaluator.n_samples=4"]
    setup = set_up(load_recipe(QUICKSTART, keys, TrainRecipe))
    assert setup.evaluator is not None
    parts = (setup.recipe, FixedRollout(Halves(1)), setup.rewards, PhaseTimers(), lambda version: None)
    with Stream(*parts, tell=print) as stream:
        measures = setup.evaluator.run(stream).measures
    assert measures == {
        "accuracy": 0.25, "pass_at/2": 0.5, "pass_at/4": 1.0, "reward": 0.25, "response_length": 2.0,
    }  # fmt: skip


class NotedTrainer(Trainer):
    """A trainer without processes that logs its calls."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def score(self, batch: RemoteBatch, what: Score, model: str = "own") -> tuple[Piece, ...]:
        self._log.append(f"{self._name}: {what.name} of its {model} model")
        return ()

    def release(self) -> None:
        self._log.append(f"{self._name}: release")


def test_roles_on_the_same_devices_release_their_memory() -> None:
    log: list[str] = []
    actors, references = NotedTrainer("actor", log), NotedTrainer("ref", log)
    batch, what = RemoteBatch(np.array([3]), np.array([1]), ()), Logprobs(1.0, "ref_logprobs")
    HostedModel(Actor(actors)).score(batch, what)
    assert log == ["actor: ref_logprobs of its reference model"]
    log.clear()
    FrozenModel(references).score(batch, what)
    assert log == ["ref: ref_logprobs of its own model"]
    log.clear()
    FrozenModel(references, Turn(neighbour=Actor(actors))).score(batch, what)
    assert log == ["actor: release", "ref: ref_logprobs of its own model", "ref: release"]


@pytest.mark.parametrize(
    ("non_finite", "where"),
    [(("layers.0", "layers.3"), "first in layers.0, layers.3"), ((), "the norm of all of them is beyond float32")],
)
def test_a_run_ends_after_three_skipped_updates_and_says_where(non_finite: tuple[str, ...], where: str) -> None:
    skips, skipped = Skips(), UpdateResult({}, skipped=True, non_finite=non_finite)
    for result in (skipped, skipped, UpdateResult({}, skipped=False), skipped, skipped):
        skips = skips.after(result, step=4)
        assert skips.problem is None
    skips = skips.after(skipped, step=4)
    assert skips.problem is not None
    assert re.search(f"3 updates in a row.*step 4.*{where}", skips.problem)
