"""Old log-probs that lie between rollout and trainer, and metrics by the age of tokens, against numbers by hand."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
import torch

from fivefold.algorithms.ages import MOST_TOLD
from fivefold.algorithms.corrections import RolloutCorrection
from fivefold.algorithms.loss import LossInputs
from fivefold.algorithms.losses.ppo import PPO
from fivefold.algorithms.metrics import metric_values
from fivefold.algorithms.policy_loss import PolicyLoss

VERSION = 7
P = [0.0, 0.5, 0.2, 0.9, 0.3, 0.4]
Q = [0.0, 0.4, 0.8, 0.1, 0.2, 0.4]
AGES = [VERSION + 1, 0, 1, 3, 3, 0]
"""Probabilities in trainer and rollout, and ages: of a prompt's token, and of five that were sampled."""
A = 1.5
LOSS = PolicyLoss(
    1.0, PPO(0.1), correction=RolloutCorrection("token", 2.0), version=VERSION, max_age=3, old_is_interpolated=True
)


def inputs(logprobs_T: torch.Tensor, **fields: torch.Tensor) -> LossInputs:
    n = len(logprobs_T)
    own = {
        "advantages": torch.full((n,), A, dtype=torch.float64),
        "rollout_logprobs": torch.tensor([log(q) if q else 0.0 for q in Q], dtype=torch.float64),
        "versions": torch.tensor([VERSION - age for age in AGES], dtype=torch.int32),
    }
    mask_T = torch.tensor([0.0] + [1.0] * (n - 1), dtype=torch.float64)
    return LossInputs({"logprobs": logprobs_T, "entropy": torch.zeros(n)}, mask_T, (n,), own | fields)


def current() -> torch.Tensor:
    return torch.tensor([log(p) if p else 0.0 for p in P], dtype=torch.float64, requires_grad=True)


def test_a_token_of_age_a_has_a_proximal_policy_a_steps_from_the_rollouts_and_one_from_the_actors() -> None:
    logprobs_T = current()
    total, metrics = LOSS(inputs(logprobs_T))
    total.backward()
    wanted, slopes = 0.0, [0.0]
    for p, q, age in list(zip(P, Q, AGES, strict=True))[1:]:
        old = q ** (1 / (age + 1)) * p ** (age / (age + 1))
        weight, ratio = min(old / q, 2.0), p / old
        wanted -= weight * min(ratio, 1.1) * A
        slopes.append(-weight * ratio * A if ratio < 1.1 else 0.0)
    assert total.item() == pytest.approx(wanted)
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.tolist() == pytest.approx(slopes)
    assert float(metrics["ratio/max"].sum) == pytest.approx(max(0.5 / 0.4, (0.9 / 0.1) ** 0.25))


def test_mismatch_and_truncated_weights_are_told_by_age() -> None:
    for loss in (LOSS, replace(LOSS, old_is_interpolated=False)):
        told = metric_values(loss(inputs(current()))[1])
        for age in (0, 1, 3):
            w = [p / q for p, q, own in zip(P, Q, AGES, strict=True) if own == age]
            assert told[f"staleness/tokens/{age}"] == pytest.approx(len(w) / 5)
            assert told[f"staleness/ratio/{age}"] == pytest.approx(sum(w) / len(w))
            assert told[f"staleness/mismatch_kl/{age}"] == pytest.approx(sum(x - 1 - log(x) for x in w) / len(w))
        assert not [name for name in told if name.endswith("/2") and name.startswith("staleness")]
        # 0.9 / 0.1 and its power 3/4 are above 2.
        cuts = [told[f"staleness/cut/{age}"] for age in (0, 1, 3)]
        assert cuts == pytest.approx([0.0, 0.0, 0.5])


def test_tokens_above_the_last_age_that_is_told_count_for_it() -> None:
    old = torch.full((len(P),), -MOST_TOLD - 5, dtype=torch.int32) + VERSION
    _, metrics = replace(LOSS, max_age=1000)(inputs(current(), versions=old))
    assert float(metrics[f"staleness/tokens/{MOST_TOLD}"].sum) == 5
    assert f"staleness/tokens/{MOST_TOLD + 1}" not in metrics
