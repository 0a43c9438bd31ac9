"""A run whose reward function gives rewards to single tokens: each token's advantage is what is earned from it on."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pyarrow.parquet
import pytest

from tests.e2e.conftest import ROOT, Fivefold
from tests.rows import long

MODULE = '''\
def digits(response, ground_truth, *, token_ids, data_source, extra_info):
    """0.25 for each token that is even; 1 for the whole if it has the right answer."""
    return {"token_rewards": [0.25 * (token % 2 == 0) for token in token_ids], "score": float(ground_truth in response)}
'''


@pytest.mark.parametrize("recipe", ["quickstart.yaml", *long("quickstart-ppo.yaml")])
def test_tokens_have_what_is_earned_from_them_on(recipe: str, tmp_path: Path, fivefold: Fivefold) -> None:
    (tmp_path / "my_tokens.py").write_text(MODULE)
    of_ppo = recipe == "quickstart-ppo.yaml"
    own = ["actor.gae_lambda=1", "actor.discount=1"] if of_ppo else ["actor.advantage=reinforce_pp"]
    result = fivefold(
        "train", str(ROOT / "recipes" / recipe), "total_train_steps=2", "train_dataset.batch_size=8",
        "valid_dataset=null", "reward={fn: 'my_tokens.py:digits'}", "stats.n_logged_samples=all",
        "actor.whiten_advantages=false", "actor.ppo_n_minibatches=1", f"cluster.fileroot={tmp_path}", *own,
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr + result.stdout
    (folder,) = tmp_path.glob("*/trial-0/samples")
    rows = [row for file in sorted(folder.glob("*.parquet")) for row in pyarrow.parquet.read_table(file).to_pylist()]
    first_step = [row for row in rows if row["step"] == 1]
    for row in first_step:
        advantages = row["advantages"]
        # The critic's values are 0 before its first update, so that GAE is the return too.
        assert advantages[0] == pytest.approx(row["reward"], abs=1e-5)
        earned = [a - b for a, b in pairwise(advantages)]
        assert all(min(abs(each), abs(each - 0.25)) < 1e-5 for each in earned)
        rest = row["reward"] - sum(earned)
        assert advantages[-1] == pytest.approx(rest, abs=1e-5)
    drops = [a - b for row in first_step for a, b in pairwise(row["advantages"])]
    assert max(drops) > 0.2, "some token was even"
