"""A run whose samples are trained several times: their bounds, the loss's weights, and a start from a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fivefold.checkpoints.store import REPLAY_BUFFER
from fivefold.experience.replay_buffer import read_buffer
from tests.e2e.conftest import ROOT, Fivefold
from tests.e2e.documents import listed_metrics

STEPS, BATCH, AGAIN, MOST_AGE = 6, 8, 4, 4
COMMAND = (
    "train", str(ROOT / "recipes" / "quickstart-async.yaml"), f"total_train_steps={STEPS}",
    f"train_dataset.batch_size={BATCH}", "gconfig.n_samples=4", "valid_dataset=null", "recover.freq_steps=1",
    f"recover.max_to_keep={STEPS}", "rollout.max_head_offpolicyness=1", "actor.backend=megatron:d1",
    f"rollout.replay_buffer={{batch_size: {AGAIN}, max_age: {MOST_AGE}, max_uses: 2, decay: 1.0}}",
    "stats.n_logged_samples=all",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(fivefold: Fivefold, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    result = fivefold(*COMMAND, f"cluster.fileroot={root}")
    assert result.returncode == 0, result.stderr + result.stdout
    return next(root.glob("*/trial-0"))


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_steps_train_old_samples_besides_their_new_ones_within_the_bounds(run: Path) -> None:
    metrics = rows(run / "metrics.jsonl")
    assert metrics[0]["reuse/share"] == 0
    for row in metrics[1:]:
        assert row["reuse/share"] == pytest.approx(AGAIN / (AGAIN + BATCH))
        assert row["reuse/uses/max"] == 1
        assert 1 <= row["reuse/age"] <= row["reuse/age/max"] <= MOST_AGE
        assert row["staleness/max"] <= MOST_AGE
        assert row["rollout_mismatch_share"] == 1, "every token has the log-prob of its sampling"
        assert row["correction/weight"] > 0
        assert sum(row.get(f"staleness/tokens/{age}", 0.0) for age in range(MOST_AGE + 1)) == pytest.approx(1)
    assert max(row["reuse/age/max"] for row in metrics[1:]) > 1
    listed = {name for name in listed_metrics() if name.startswith("reuse/")}
    assert listed == {name for row in metrics for name in row if name.startswith("reuse/")}
    # Rewards, lengths and logs are of the new samples.
    assert len(rows(run / "samples.jsonl")) == STEPS * BATCH * 4


def test_a_run_goes_on_with_the_buffer_of_its_checkpoint(run: Path, fivefold: Fivefold) -> None:
    checkpoints, before = run / "checkpoints", rows(run / "metrics.jsonl")
    kept = [(each.group.place, each.used["uses"]) for each in read_buffer(checkpoints / "step-000003" / REPLAY_BUFFER)]
    # Two steps have trained again what they chose, and groups that were used twice leave with the next choice.
    assert len(kept) == 3 * BATCH - AGAIN
    assert sum(uses == 2 for _, uses in kept) == AGAIN
    (run / "summary.json").unlink()
    for step in range(4, STEPS + 1):
        shutil.rmtree(checkpoints / f"step-{step:06}")
    result = fivefold(*COMMAND, f"cluster.fileroot={run.parents[1]}")
    assert result.returncode == 0, result.stderr + result.stdout
    assert "continues after step 3" in result.stdout
    after = rows(run / "metrics.jsonl")
    for name in ("reuse/age", "reuse/age/max", "reuse/uses", "reuse/kept", "reuse/share"):
        assert after[3][name] == before[3][name]
