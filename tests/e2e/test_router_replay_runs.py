"""Runs whose updates replay the rollout's routes, or those of the old log-probs; resumed ones have the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import ROOT, Fivefold
from tests.e2e.documents import as_listed, listed_metrics

TRAIN = (
    "train", str(ROOT / "recipes" / "quickstart.yaml"), "train_dataset.batch_size=8", "valid_dataset=null",
    "recover.freq_steps=1",
)  # fmt: skip


def run(fivefold: Fivefold, folder: Path, n_steps: int, replay: str) -> list[dict[str, float]]:
    """Train up to a step, from a checkpoint if there is one; return the metrics of all steps."""
    keys = (f"cluster.fileroot={folder}", f"total_train_steps={n_steps}", f"actor.router_replay={replay}")
    result = fivefold(*TRAIN, *keys)
    assert result.returncode == 0, result.stderr + result.stdout
    [file] = folder.glob("*/*/metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("replay", ["rollout", "old_logprobs"])
def test_a_run_that_replays_routes_resumes_with_the_same_bits(replay: str, fivefold: Fivefold, tmp_path: Path) -> None:
    whole = run(fivefold, tmp_path / "whole", 2, replay)
    run(fivefold, tmp_path / "resumed", 1, replay)
    resumed = run(fivefold, tmp_path / "resumed", 2, replay)
    one, other = (load_file(next((tmp_path / name).glob("*/*/weights/*.safetensors"))) for name in ("whole", "resumed"))
    assert all((one[name] == tensor).all() for name, tensor in other.items())
    of_replay = [{name: value for name, value in row.items() if name.startswith("replay/")} for row in whole]
    assert of_replay == [{name: row[name] for name in of_replay[0]} for row in resumed]
    assert {as_listed(name) for name in of_replay[0]} == {name for name in listed_metrics() if name[:7] == "replay/"}
    for row in of_replay:
        # The rollout's engine was never given the last token of a response.
        assert row["replay/share"] == 1.0 if replay == "old_logprobs" else 0.85 < row["replay/share"] < 1.0
        assert 0 <= row["replay/differs"] < 0.1
        assert row["replay/bytes"] > 0
