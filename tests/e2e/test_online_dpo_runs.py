"""A run of online DPO on pairs of its own samples learns, and writes the metrics that the page lists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Fivefold
from tests.e2e.documents import listed_metrics


@pytest.mark.long
def test_pairs_of_its_own_samples_raise_the_reward(tmp_path: Path, fivefold: Fivefold) -> None:
    result = fivefold(
        "train", str(ROOT / "recipes" / "quickstart.yaml"), "algorithm=online_dpo", "total_train_steps=14",
        "valid_dataset=null", "actor.backend=megatron:d1", "ref.refresh_every=7", f"cluster.fileroot={tmp_path}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr + result.stdout
    rows = [json.loads(line) for line in (tmp_path / "quickstart/trial-0/metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
    own = {name for name in listed_metrics() if name.partition("/")[0] == "pairs"}
    assert all(own <= row.keys() and 0 < row["pairs"] <= 32 and row["kl_ctl"] == 0.1 for row in rows)
    assert max(row["pairs/accuracy"] for row in rows) > 0.7
