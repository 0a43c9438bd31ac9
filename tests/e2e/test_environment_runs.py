"""Runs whose episodes have several turns: as a game, through a URL, evaluated, and resumed."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fivefold.checkpoints.store import EXPERIENCE
from fivefold.experience.waiting import read_waiting
from tests.e2e.conftest import ROOT, Fivefold, cut_back, is_timed, killed_after
from tests.forks import start_forked
from tests.rows import long

TRAIN = (
    "train", str(ROOT / "recipes" / "guess-digit.yaml"), "gconfig.n_samples=4", "evaluator.n_samples=4",
    "evaluator.freq_steps=2", "recover.freq_steps=1", "recover.max_to_keep=4", "stats.n_logged_samples=4",
    "actor.optimizer.lr_scheduler_type=constant",
)  # fmt: skip
URL = ("environment.game=null", "environment.agent=fivefold.environments.guess_digit:play")


def place(run: Path) -> tuple[str, str]:
    return f"cluster.fileroot={run.parents[1]}", f"trial_name={run.name}"


def metrics(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not is_timed(name)} for row in rows]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, fivefold: Fivefold) -> Path:
    """A run of four steps."""
    run = tmp_path_factory.mktemp("runs") / "guess-digit" / "game"
    result = fivefold(*TRAIN, *place(run), "total_train_steps=4")
    assert result.returncode == 0, result.stderr + result.stdout
    return run


def test_a_run_says_how_its_episodes_were(played: Path) -> None:
    for row in metrics(played):
        shares = {name: value for name, value in row.items() if name.startswith("episode/ended/")}
        assert set(shares) <= {"episode/ended/done", "episode/ended/turns"}
        assert sum(shares.values()) == pytest.approx(1.0)
        assert 1 <= row["episode/turns/mean"] <= row["episode/turns/max"] == 3
        assert row["accuracy"] == row["episode/ended/done"] == row["reward/mean"]
    samples = [json.loads(line) for line in (played / "samples.jsonl").read_text().splitlines()]
    assert any("⟦<1+2=⟧" in sample["response"] or "⟦>1+2=⟧" in sample["response"] for sample in samples)
    assert all(sample["n_tokens"] == sample.get("n_turns", 1) for sample in samples), "a turn is one token"


def assert_same_weights(run: Path, other: Path) -> None:
    [mine, wanted] = [load_file(folder / "weights" / "model.safetensors") for folder in (run, other)]
    assert all((mine[name] == tensor).all() for name, tensor in wanted.items())


def test_the_same_episodes_through_a_url_train_the_same_weights(played: Path, fivefold: Fivefold) -> None:
    run = played.with_name("a-url")
    result = fivefold(*TRAIN, *place(run), "total_train_steps=4", *URL)
    assert result.returncode == 0, result.stderr + result.stdout
    assert_same_weights(run, played)
    # An agent returns in the end; a game that was not won stops for its turns.
    own, theirs = (
        [{k: v for k, v in row.items() if "ended" not in k} for row in metrics(each)] for each in (run, played)
    )
    assert own == theirs


@pytest.mark.long
def test_a_resumed_run_trains_the_same_weights(played: Path, fivefold: Fivefold) -> None:
    whole = cut_back(played, 2)
    result = fivefold(*TRAIN, *place(played), "total_train_steps=4")
    assert result.returncode == 0, result.stderr + result.stdout
    assert "continues after step 2" in result.stdout
    assert_same_weights(played, whole)
    assert metrics(played) == metrics(whole)


def test_the_weights_play_in_an_evaluation_too(played: Path, fivefold: Fivefold) -> None:
    recipe, weights = str(ROOT / "recipes" / "guess-digit.yaml"), str(played / "weights")
    result = fivefold("eval", recipe, "--model", weights, "evaluator.n_samples=4")
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["accuracy"] == told["reward"] == json.loads((played / "summary.json").read_text())["accuracy_after"]


def test_a_game_that_fails_ends_the_run_with_its_line(tmp_path: Path, fivefold: Fivefold) -> None:
    (tmp_path / "broken.py").write_text(
        "class Broken:\n    def reset(self): ...\n    def step(self, move):\n        return self.board[move]\n"
    )
    result = fivefold(
        *TRAIN, *place(tmp_path / "guess-digit" / "broken"), "environment.game=broken.py:Broken", cwd=tmp_path
    )
    assert result.returncode != 0
    said = result.stdout + result.stderr
    assert "return self.board[move]" in said
    assert "AttributeError: 'Broken' object has no attribute 'board'" in said


def test_episodes_whose_game_fails_leave_their_groups(tmp_path: Path, fivefold: Fivefold) -> None:
    """Prompt 3 fails always, and one more episode in nine; two replicas train what is left in three mini-batches."""
    (tmp_path / "flaky.py").write_text(
        "from fivefold.environments.guess_digit import GuessDigit\n\n\n"
        "class Flaky(GuessDigit):\n"
        "    def reset(self, ground_truth, seed):\n"
        "        super().reset(ground_truth)\n"
        "        self.fails = ground_truth == '3' or seed % 9 == 0\n\n"
        "    def step(self, move):\n"
        "        if self.fails:\n"
        "            raise ConnectionError('the board is away')\n"
        "        return super().step(move)\n"
    )
    run = tmp_path / "guess-digit" / "flaky"
    result = fivefold(
        *TRAIN, *place(run), "environment.game=flaky.py:Flaky", "environment.max_failed=0.6", "total_train_steps=3",
        "actor.backend=megatron:d2", "actor.ppo_n_minibatches=3",
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr + result.stdout
    assert "episodes failed, and left the group" in result.stdout
    assert "the board is away" in result.stdout
    rows = metrics(run)
    assert all(0.05 < row["episode/failed"] < 0.6 for row in rows)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert "3" not in {sample["ground_truth"] for sample in samples}


CREDITED = pytest.mark.parametrize(
    "keys",
    [
        ("algorithm=gigpo", "rollout.max_head_offpolicyness=1"),
        (
            "algorithm=ppo", "critic.path=package:tiny-moe", "critic.dtype=float32", "critic.backend=megatron:d2",
            "actor.backend=megatron:d2", "actor.credit=turn", "actor.turn_discount=0.9", "actor.gae_lambda=0.9",
            "actor.kl_ctl=0.05", "actor.kl_in=reward",
        ),
    ],
    ids=["states, asynchronous", "critic"],
)  # fmt: skip


def assert_credited(run: Path, fivefold: Fivefold, keys: tuple[str, ...], n_steps: int) -> None:
    """Train up to a step, from a checkpoint if there is one."""
    result = fivefold(*TRAIN, *place(run), *keys, f"total_train_steps={n_steps}")
    assert result.returncode == 0, result.stderr + result.stdout
    rows = metrics(run)
    assert len(rows) == n_steps
    assert all(row["grad_norm"] > 0 and row["advantage/std"] > 0 for row in rows)


@CREDITED
def test_turns_are_credited(keys: tuple[str, ...], tmp_path: Path, fivefold: Fivefold) -> None:
    assert_credited(tmp_path / "guess-digit" / "credit", fivefold, keys, 2)


@pytest.mark.long
@CREDITED
def test_turns_are_credited_in_a_run_that_resumes(keys: tuple[str, ...], tmp_path: Path, fivefold: Fivefold) -> None:
    for n_steps in (2, 3):
        assert_credited(tmp_path / "guess-digit" / "credit", fivefold, keys, n_steps)


@pytest.mark.parametrize(
    ("backend", "door"),
    [("megatron:p2", URL), *long(("megatron:t2", ()), ("megatron:d2e2", ()))],
)
def test_a_run_of_episodes_beside_steps_goes_on_after_a_kill(
    backend: str, door: tuple[str, ...], tmp_path: Path, fivefold: Fivefold
) -> None:
    run = tmp_path / "guess-digit" / "killed"
    keys = [*TRAIN, *place(run), f"actor.backend={backend}", "rollout.max_head_offpolicyness=1", *door]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    errors = tmp_path / "errors"
    first = start_forked(
        [*keys, "total_train_steps=400"], cwd=ROOT, environment=environment, output=tmp_path / "output", errors=errors
    )
    latest = killed_after(first, run, 2, errors)
    waiting = read_waiting(latest.path / EXPERIENCE).groups
    assert all(group.samples for group in waiting), "whole episodes survive"
    last = latest.step + 2
    result = fivefold(*keys, f"total_train_steps={last}")
    assert result.returncode == 0, result.stderr + result.stdout
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, last + 1))
    assert all(math.isfinite(row["grad_norm"]) and row["episode/turns/mean"] >= 1 for row in rows)
    assert all(row["staleness/max"] <= 1 for row in rows)
