"""A run whose samples are ahead of its steps, with a reward model, is killed; the same command goes on with it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from fivefold.checkpoints.store import EXPERIENCE
from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.prompts import load_prompts
from fivefold.experience.waiting import read_waiting
from fivefold.rollout.tokenizer import load_tokenizer
from tests.e2e.conftest import ROOT, Fivefold, killed_after
from tests.e2e.documents import listed_metrics
from tests.e2e.held_reward import held_after
from tests.e2e.reward_models import check_scores, write_reward_model
from tests.forks import start_forked

BATCH, SAMPLES, STEPS, AGE = 8, 4, 6, 2
KEYS = (
    "rollout.max_head_offpolicyness=2", f"total_train_steps={STEPS}", f"train_dataset.batch_size={BATCH}",
    f"gconfig.n_samples={SAMPLES}", "valid_dataset=null", "recover.freq_steps=1", "stats.n_logged_samples=32",
    "actor.backend=megatron:d1", "actor.ppo_n_minibatches=1", "actor.advantage=optimal_token_baseline",
)  # fmt: skip
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


def command(root: Path) -> list[str]:
    right = {"fn": "tests.e2e.held_reward:right", "kwargs": {"hold": str(root / "hold")}}
    # By default, the model shares the actor's devices, in turn.
    model = {"path": str(root / "model"), "backend": "megatron:d1", "dtype": "float32", "offload": True}
    reward = {"rewards": {"right": right, "liked": {"fn": "model", "weight": 0.1}}, "model": model}
    return ["train", str(QUICKSTART), *KEYS, f"cluster.fileroot={root}", f"reward={json.dumps(reward)}"]


def test_every_prompt_is_trained_once_though_the_run_is_killed(tmp_path: Path, fivefold: Fivefold) -> None:
    run, model = tmp_path / "quickstart" / "trial-0", write_reward_model(tmp_path / "model")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with held_after(run / "checkpoints" / "step-000002", tmp_path / "hold"):
        errors = tmp_path / "errors"
        first = start_forked(
            command(tmp_path), cwd=ROOT, environment=environment, output=tmp_path / "output", errors=errors
        )
        latest = killed_after(first, run, 2, errors)
    assert latest.step < STEPS
    waiting = read_waiting(latest.path / EXPERIENCE).groups
    assert {group.place // BATCH for group in waiting} <= set(range(AGE + 1))

    second = fivefold(*command(tmp_path))
    assert second.returncode == 0, second.stderr + second.stdout
    assert "continues after step" in second.stdout
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    recipe = load_recipe(QUICKSTART, list(KEYS), TrainRecipe)
    data = load_prompts(recipe.train_dataset, load_tokenizer(str(ROOT / "fivefold/models/tiny-moe")))
    sampler = data.sampler(recipe.train_dataset, recipe.seed)
    expected = [
        (step, prompt.text) for step in range(1, STEPS + 1) for prompt in sampler.next_batch() for _ in range(SAMPLES)
    ]
    assert [(sample["step"], sample["prompt"]) for sample in samples] == expected
    check_scores(samples, model)

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    own = {name for name in listed_metrics() if name.startswith(("staleness/", "idle/", "correction/"))}
    own = {name for name in own if "<" not in name}
    for row in rows:
        assert own <= row.keys()
        assert 0 <= row["staleness/mean"] <= row["staleness/max"] <= min(AGE, row["step"] - 1)
        assert row["rollout_mismatch_share"] == 1
        assert math.isclose(sum(row.get(f"staleness/tokens/{age}", 0.0) for age in range(AGE + 1)), 1.0, rel_tol=1e-6)
        assert math.isclose(sum(row.get(f"staleness/share/{age}", 0.0) for age in range(AGE + 1)), 1.0)
    assert max(row["staleness/max"] for row in rows) > 0, "the rollout was ahead"
    assert {"seconds/generation", "seconds/weight staging", "seconds/weight swap"} <= set().union(*rows)
