"""PPO on FSDP, and a run that goes on from its checkpoint on Megatron-Core with the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, Fivefold, cut_back

N_STEPS = 3
TRAIN = (
    "train", str(ROOT / "recipes" / "quickstart-ppo.yaml"), f"total_train_steps={N_STEPS}",
    "train_dataset.batch_size=8", "valid_dataset=null", "recover.freq_steps=1", f"recover.max_to_keep={N_STEPS}",
    "actor.kl_ctl=0.01", "actor.kl_in=reward", "actor.optimizer.eps=1e-3", "critic.optimizer.eps=1e-3",
    "critic.warmup_steps=0", "critic.colocate=false", "ref.ema_decay=0.5",
)  # fmt: skip
"""A large eps keeps Adam from amplifying rounding errors. The actor's processes hold the reference, too, which
follows as an average."""


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(fivefold: Fivefold, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    result = fivefold(
        *TRAIN, f"cluster.fileroot={root}", "actor.backend=fsdp:d2", "critic.backend=fsdp:d1",
        "actor.fsdp.recompute=full",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr + result.stdout
    return root / "quickstart-ppo" / "trial-0"


def test_actor_and_critic_train_on_fsdp(run: Path) -> None:
    on_fsdp = rows(run)
    assert all(row["grad_norm"] > 0 and row["critic/grad_norm"] > 0 for row in on_fsdp)
    assert all(row["rollout_mismatch/max"] < 1e-3 for row in on_fsdp), "trainer and rollout have different weights"


@pytest.mark.long
def test_a_run_on_fsdp_goes_on_on_megatron(run: Path, fivefold: Fivefold) -> None:
    on_fsdp = rows(run)
    cut_back(run, 1)
    goes_on = fivefold(
        *TRAIN, f"cluster.fileroot={run.parents[1]}", "actor.backend=megatron:t2", "critic.backend=megatron:d1"
    )
    assert goes_on.returncode == 0, goes_on.stderr + goes_on.stdout
    assert "continues after step" in goes_on.stdout
    for mine, other in zip(rows(run), on_fsdp, strict=True):
        for name in ("reward/mean", "policy_loss", "grad_norm", "critic/grad_norm", "critic/values", "kl_ref", "lr"):
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name
