"""What a training run leaves behind if a step fails: the loop with stand-ins for its processes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold import evaluate, train
from fivefold.config.load import load_recipe
from fivefold.config.schema import TrainRecipe
from fivefold.observe.console import RunConsole
from fivefold.observe.errors import RunFailed
from fivefold.observe.run_dir import RunDir
from fivefold.observe.table import TRAIN_COLUMNS
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.launch import Actor, Reference, Roles, Rollout, UpdateResult
from fivefold.types import Batch, Completion, Prompt

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"


class FixedRollout(Rollout):
    """Always the same two tokens, until its last answer is given."""

    def __init__(self, n_answers: int) -> None:
        self.shares_devices = False
        self._n_answers = n_answers

    def generate(self, prompts: Sequence[Prompt], n_samples: int, *_: Any) -> list[Completion]:
        if self._n_answers == 0:
            raise OSError("the rollout is out of answers")
        self._n_answers -= 1
        return [Completion((5, 6), (-1.0, -1.0), "length", 0)] * (len(prompts) * n_samples)


class FixedActor(Actor):
    def __init__(self, grad_norm: float) -> None:
        self._grad_norm = grad_norm

    def send_weights(self, *_: Any, **__: Any) -> None: ...

    def save(self, folder: Path) -> None: ...

    def logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        return batch.fields["rollout_logprobs"]

    def update(self, *_: Any) -> UpdateResult:
        metrics = {"loss": 0.0, "grad_norm": self._grad_norm, "lr": 1e-6}
        return UpdateResult(metrics, skipped=not math.isfinite(self._grad_norm), non_finite=("layers.0",))


def loop(root: Path, actor: FixedActor, rollout: FixedRollout) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The metrics and the samples that a run of two steps has written when it has ended by an error."""
    overrides = [
        f"cluster.fileroot={root}", "total_train_steps=2", "train_dataset.limit=64", "valid_dataset.limit=4",
        "actor.ppo_n_minibatches=4", "evaluator.freq_steps=1",
    ]  # fmt: skip
    plan = train.plan_run(load_recipe(QUICKSTART, overrides, TrainRecipe))
    with pytest.raises((RunFailed, OSError)), RunDir.create(plan.recipe, overwrite=False) as run:
        train._loop(plan, Roles(actor, rollout, None), run, RunConsole(TRAIN_COLUMNS), PhaseTimers())
    return tuple(  # type: ignore[return-value]
        [json.loads(line) for line in file.read_text().splitlines()] for file in (run.metrics, run.samples)
    )


def test_samples_of_a_step_that_could_not_be_trained_on_are_there(tmp_path: Path) -> None:
    metrics, samples = loop(tmp_path, FixedActor(math.nan), FixedRollout(9))
    assert metrics == []
    assert {sample["step"] for sample in samples} == {1}


def test_metrics_of_a_trained_step_are_there_though_its_evaluation_failed(tmp_path: Path) -> None:
    # Before training, step 1, and not the evaluation after it.
    metrics, samples = loop(tmp_path, FixedActor(1.0), FixedRollout(2))
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

    def launch(self, *_: Any) -> dict[str, None]:
        return {"rollout": None}


def test_an_evaluation_that_fails_under_way_is_a_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(*_: Any) -> None:
        raise ValueError("the reward is nan")

    monkeypatch.setattr(evaluate, "Session", NoSession)
    monkeypatch.setattr(evaluate.Evaluator, "run", judge)
    with pytest.raises(RunFailed, match="the reward is nan"):
        evaluate.evaluate(load_recipe(QUICKSTART, [], TrainRecipe))


class Calls:
    """Stands for a group of processes: notes what is called."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def call(self, method: str, *_: Any) -> None:
        self._log.append(f"{self._name}.{method}")

    def call_first(self, method: str, *_: Any) -> torch.Tensor:
        self.call(method)
        return torch.zeros(1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"beside_actor": True}, ["ref.compute_reference_logprobs"]),
        ({"beside_actor": False}, ["ref.compute_logprobs", "ref.release_cache"]),
        (
            {"beside_actor": False, "actor_on_devices": True},
            ["actor.release_cache", "ref.compute_logprobs", "ref.release_cache"],
        ),
    ],
)
def test_roles_on_the_same_devices_give_their_memory_back(options: dict[str, Any], expected: list[str]) -> None:
    log: list[str] = []
    if options.get("actor_on_devices"):
        options = {**options, "actor_on_devices": Actor(Calls("actor", log))}
    Reference(Calls("ref", log), **options).logprobs(None, 1.0)  # type: ignore[arg-type]
    assert log == expected
