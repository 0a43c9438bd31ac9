"""Runs whose updates replay the rollout's routes, or those of the old log-probs; resumed ones have the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import ROOT, Fivefold, cut_back
from tests.e2e.documents import as_listed, listed_metrics
from tests.rows import long

TRAIN = (
    "train", str(ROOT / "recipes" / "quickstart.yaml"), "train_dataset.batch_size=8", "valid_dataset=null",
    "recover.freq_steps=1",
)  # fmt: skip
RUN = Path("quickstart/trial-0")


def train(fivefold: Fivefold, root: Path, replay: str) -> list[dict[str, float]]:
    """Train for two steps, from a checkpoint if there is one; return the metrics of both."""
    result = fivefold(*TRAIN, f"cluster.fileroot={root}", "total_train_steps=2", f"actor.router_replay={replay}")
    assert result.returncode == 0, result.stderr + result.stdout
    return [json.loads(line) for line in (root / RUN / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("replay", long("rollout", "old_logprobs"))
def test_a_run_that_replays_routes_resumes_with_the_same_bits(replay: str, fivefold: Fivefold, tmp_path: Path) -> None:
    whole = train(fivefold, tmp_path, replay)
    copy = cut_back(tmp_path / RUN, 1)
    resumed = train(fivefold, tmp_path, replay)
    one, other = (load_file(run / "weights" / "model.safetensors") for run in (copy, tmp_path / RUN))
    assert all((one[name] == tensor).all() for name, tensor in other.items())
    of_replay = [{name: value for name, value in row.items() if name.startswith("replay/")} for row in whole]
    assert of_replay == [{name: row[name] for name in of_replay[0]} for row in resumed]
    assert {as_listed(name) for name in of_replay[0]} == {name for name in listed_metrics() if name[:7] == "replay/"}
    for row in of_replay:
        # The rollout's engine was never given the last token of a response.
        assert row["replay/share"] == 1.0 if replay == "old_logprobs" else 0.85 < row["replay/share"] < 1.0
        assert 0 <= row["replay/differs"] < 0.1
        assert row["replay/bytes"] > 0


BRANCHING = '''
import urllib3


def solve(base_url, prompt, ground_truth):
    """Ask for a digit, then for two more, each of which continues the first one in another way."""

    def ask(text):
        body = {"prompt": text}
        return urllib3.request("POST", f"{base_url}/completions", json=body, timeout=None).json()["choices"][0]["text"]

    first = ask(prompt)
    return float(ground_truth in (first, ask(prompt + first + "<1+2="), ask(prompt + first + ">1+2=")))
'''


@pytest.mark.parametrize("age", [0, *long(1)])
def test_turns_that_join_and_branch_replay_the_routes_of_each_sequence(
    age: int, fivefold: Fivefold, tmp_path: Path
) -> None:
    """An episode is two sequences of 11 tokens: the prompt's 4, a digit that both have, an answer of 5, and a digit."""
    (tmp_path / "branching.py").write_text(BRANCHING)
    result = fivefold(
        "train", str(ROOT / "recipes" / "guess-digit.yaml"), f"cluster.fileroot={tmp_path}", "total_train_steps=3",
        "environment.game=null", "environment.agent=branching.py:solve", "gconfig.n_samples=4", "valid_dataset=null",
        "evaluator=null",
        "actor.router_replay=rollout", "actor.backend=megatron:(attn:d2|ffn:e2)", "actor.mb_spec.max_tokens_per_mb=40",
        f"rollout.max_head_offpolicyness={age}",
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr + result.stdout
    [file] = tmp_path.glob("*/*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert (row["episode/turns/mean"], row["episode/sequences/mean"], row["response_length/mean"]) == (3, 2, 3)
        # All but the last token of each sequence, which no model of the rollout was given.
        assert row["replay/share"] == pytest.approx(20 / 22)
        assert row["rollout_mismatch"] < 1e-3 or age > 0
        # A place that is off by one would differ in three of four choices.
        assert row["replay/differs"] < (0.2 if age else 0.01)
        assert row["grad_norm"] > 0
