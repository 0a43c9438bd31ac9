"""A run with several files and held-out sets, whose rollout gets weights every other step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Fivefold

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
STEPS, EVERY, LIMIT, N = 4, 2, 12, 2
PACKAGED = ROOT / "fivefold" / "data" / "packaged" / "arithmetic"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two files to train on, and two sets to evaluate on, one with prompts of two data sources."""
    folder = tmp_path_factory.mktemp("data")
    rows = [json.loads(line) for line in (PACKAGED / "train.jsonl").read_text().splitlines()[: 4 * LIMIT]]
    for name, part in {"one": rows[::2], "two": rows[1::2]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    sources = [{**row, "data_source": f"source-{number % 2}"} for number, row in enumerate(rows[:LIMIT])]
    (folder / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sources))
    sets = {
        "mixed": {"path": str(folder / "mixed.jsonl")},
        "packaged": {"path": "package:arithmetic/test", "limit": LIMIT},
    }
    paths = json.dumps([str(folder / "one.jsonl"), str(folder / "two.jsonl")])
    return [
        f"train_dataset.path={paths}", "train_dataset.split=null", "train_dataset.batch_size=8",
        "valid_dataset=null", f"valid_datasets={json.dumps(sets)}",
        f"evaluator={json.dumps({'greedy': False, 'top_k': 1, 'n_samples': N, 'max_new_tokens': 2})}",
        "gconfig.n_samples=4", "gconfig.max_new_tokens=8", "actor.ppo_n_minibatches=1", "actor.advantage_clip=0.5",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(keys: list[str], fivefold: Fivefold, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    result = fivefold(
        "train", str(QUICKSTART), *keys, f"cluster.fileroot={root}", f"total_train_steps={STEPS}",
        "trial_name=sets", "evaluator.before_training=false", "evaluator.freq_steps=3", "stats.n_logged_samples=all",
        f"evaluator.n_logged_samples={LIMIT * N + 1}",
        "rollout.max_head_offpolicyness=1", f"rollout.sync_freq_steps={EVERY}", "recover.mode=disabled",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr + result.stdout
    assert "held-out accuracy before training" not in result.stdout
    return root / "quickstart" / "sets"


def test_each_set_and_source_has_its_accuracy(run: Path) -> None:
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert ["eval/accuracy" in row for row in metrics] == [False, False, True, True]
    for row in metrics[2:]:
        parts = [row[f"eval/accuracy/set/{name}"] for name in ("mixed", "packaged")]
        # Both sets have as many prompts, and both sources of the first one.
        assert row["eval/accuracy"] == pytest.approx(sum(parts) / 2)
        sources = [row[f"eval/reward/source/source-{number}"] for number in (0, 1)]
        assert row["eval/reward/set/mixed"] == pytest.approx(sum(sources) / 2)
        assert row["eval/response_length"] <= 2
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accuracy_before"] is None
    assert summary["accuracy_after"] == metrics[-1]["eval/accuracy"]
    assert summary["held_out_prompts"] == 2 * LIMIT


def test_the_first_completions_of_each_evaluation_are_logged_with_their_sets(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "held_out_samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3] * (LIMIT * N + 1) + [4] * (LIMIT * N + 1)
    assert [row["set"] for row in rows[: LIMIT * N + 1]] == ["mixed"] * LIMIT * N + ["packaged"]
    assert all(len(row["response"]) <= 2 for row in rows)


def test_weights_are_sent_every_other_step_and_before_an_evaluation(run: Path) -> None:
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    oldest = {step: {row["oldest_weight_version"] for row in samples if row["step"] == step} for step in range(1, 5)}
    # Weights 0 sample steps 1 and 2, weights 2 step 3 and the beginning of step 4, which the evaluation's may end.
    assert oldest[1] == oldest[2] == {0}
    assert oldest[3] == {2}
    assert oldest[4] <= {2, 3}
    assert all(row["weight_version"] != 1 for row in samples)


def test_answers_of_an_evaluation_are_written_to_a_file(keys: list[str], fivefold: Fivefold, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    result = fivefold("eval", str(QUICKSTART), *keys, "--samples", str(file))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 2 * LIMIT * N
    assert {row["set"] for row in rows} == {"mixed", "packaged"}
    assert found["reward"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows))
    mixed = [row["reward"] for row in rows if row["set"] == "mixed"]
    assert found["reward/set/mixed"] == pytest.approx(sum(mixed) / len(mixed))
    # Among one token there is no choice.
    assert all(rows[at]["response"] == rows[at + 1]["response"] for at in range(0, len(rows), N))


def test_a_file_that_cannot_be_written_ends_the_command_at_once(fivefold: Fivefold, keys: list[str]) -> None:
    result = fivefold("eval", str(QUICKSTART), *keys, "--samples", "/absent/answers.jsonl")
    assert result.returncode != 0
    assert "/absent/answers.jsonl" in result.stderr
    assert "Traceback" not in result.stderr
