"""Every advantage, the KL estimators and the adaptive weight against their formulas, in loops over random groups."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from fivefold.algorithms.advantages.compute import Scores
from fivefold.algorithms.advantages.token_baseline import token_advantages
from fivefold.algorithms.build import build_advantage
from fivefold.algorithms.gae import Moments, Whitening
from fivefold.algorithms.kl import KLEstimator, kl_estimate
from fivefold.algorithms.state import AlgorithmState
from fivefold.batch import Batch
from fivefold.config.methods import ADVANTAGES
from fivefold.config.schema.roles import ActorConfig, NormConfig

STEPS = 200
"""Random steps for each advantage."""
EPS = 1e-6

Completion = tuple[float, int, float]
"""Reward, length, reward of the greedy completion."""
Oracle = Callable[[list[Completion], list[list[Completion]]], list[float]]
"""(one group, all groups) -> the advantages of the group."""


def rewards(completions: list[Completion]) -> list[float]:
    return [reward for reward, _, _ in completions]


def is_constant(values: list[float]) -> bool:
    return len(set(values)) == 1


def grpo(mean: str, std: str) -> Oracle:
    def advantages(group: list[Completion], groups: list[list[Completion]]) -> list[float]:
        sets = {"group": rewards(group), "batch": [r for one in groups for r in rewards(one)]}
        if any(level in sets and is_constant(sets[level]) for level in (mean, std)):
            return [0.0] * len(group)
        center = statistics.mean(sets[mean]) if mean in sets else 0.0
        scale = statistics.stdev(sets[std]) + EPS if std in sets else 1.0
        return [(r - center) / scale for r in rewards(group)]

    return advantages


def gdpo(group: list[Completion], groups: list[list[Completion]]) -> list[float]:
    """GRPO's advantages, as there is one reward, normalised over the batch."""
    over_group = grpo("group", "group")
    every = [value for one in groups for value in over_group(one, groups)]
    if is_constant(every):
        return [0.0] * len(group)
    return [(a - statistics.mean(every)) / (statistics.stdev(every) + EPS) for a in over_group(group, groups)]


def rloo(group: list[Completion], _: list[list[Completion]]) -> list[float]:
    result = []
    for i, (reward, _length, _greedy) in enumerate(group):
        others = [other for j, (other, _l, _g) in enumerate(group) if j != i]
        result.append(reward - sum(others) / len(others) if others else 0.0)
    return result


def grpo_leave_one_out(group: list[Completion], _: list[list[Completion]]) -> list[float]:
    result = []
    for i, reward in enumerate(rewards(group)):
        others = [other for j, other in enumerate(rewards(group)) if j != i]
        spread = statistics.stdev(others) if len(others) > 1 else 0.0
        difference = reward - statistics.mean(others) if others else 0.0
        result.append(difference / (spread + EPS) if len(set(others)) > 1 else difference)
    return result


def plain(group: list[Completion], _: list[list[Completion]]) -> list[float]:
    return rewards(group)


def less_mean(group: list[Completion], _: list[list[Completion]]) -> list[float]:
    return [r - statistics.mean(rewards(group)) for r in rewards(group)]


def remax(group: list[Completion], _: list[list[Completion]]) -> list[float]:
    return [reward - greedy for reward, _length, greedy in group]


def opo(group: list[Completion], _: list[list[Completion]]) -> list[float]:
    baseline = sum(length * reward for reward, length, _g in group) / sum(length for _r, length, _g in group)
    return [reward - baseline for reward in rewards(group)]


def gpg(group: list[Completion], groups: list[list[Completion]]) -> list[float]:
    n = sum(len(one) for one in groups)
    without = sum(len(one) for one in groups if is_constant(rewards(one)))
    return [n / max(1, n - without) * advantage for advantage in less_mean(group, groups)]


def pass_at_k(k: int) -> Oracle:
    """By enumerating all subsets: the normalised reward of a subset is that of its best, shared by its members."""

    def advantages(group: list[Completion], _: list[list[Completion]]) -> list[float]:
        subsets = list(combinations(range(len(group)), k))
        best = {subset: float(any(group[i][0] >= 1 for i in subset)) for subset in subsets}
        mean, std = statistics.mean(best.values()), statistics.pstdev(best.values())
        if std == 0:
            return [0.0] * len(group)
        return [statistics.mean((best[s] - mean) / std for s in subsets if i in s) for i in range(len(group))]

    return advantages


def pass_at_k_best(group: list[Completion], _: list[list[Completion]]) -> list[float]:
    ordered = sorted(rewards(group))
    if len(group) == 1 or ordered[-1] == ordered[-2]:
        return [0.0] * len(group)
    return [ordered[-1] - ordered[-2] if reward == ordered[-1] else 0.0 for reward in rewards(group)]


def asymre(shift: float) -> Oracle:
    return lambda group, groups: [advantage - shift for advantage in less_mean(group, groups)]


def raft(group: list[Completion], _: list[list[Completion]]) -> list[float]:
    return [1.0 if reward >= 1 else 0.0 for reward in rewards(group)]


def opmd(tau: float) -> Oracle:
    def advantages(group: list[Completion], _: list[list[Completion]]) -> list[float]:
        mean = sum(math.exp(r / tau) for r in rewards(group)) / len(group)
        return [r - tau * math.log(mean) for r in rewards(group)]

    return advantages


LEVELS = ("group", "batch", "none")
CASES: list[tuple[str, dict[str, Any], Oracle]] = [
    *(
        ("grpo", {"reward_norm": NormConfig(mean_level=mean, std_level=std, eps=EPS)}, grpo(mean, std))  # type: ignore[arg-type]
        for mean in LEVELS
        for std in LEVELS
    ),
    ("gdpo", {"reward_norm": NormConfig(eps=EPS)}, gdpo),
    ("grpo_leave_one_out", {"reward_norm": NormConfig(eps=EPS)}, grpo_leave_one_out),
    ("rloo", {}, rloo),
    ("reinforce_pp", {}, plain),
    ("reinforce_pp_baseline", {}, less_mean),
    ("remax", {}, remax),
    ("opo", {}, opo),
    ("gpg", {}, gpg),
    ("pass_at_k", {"advantage_kwargs": {"k": 1}}, pass_at_k(1)),
    ("pass_at_k", {"advantage_kwargs": {"k": 3}}, pass_at_k(3)),
    ("pass_at_k_best", {}, pass_at_k_best),
    (
        "pass_at_k_best",
        {"advantage_kwargs": {"divide_by_std": True}},
        lambda group, groups: [
            distance / (statistics.stdev(rewards(group)) + EPS) if distance else 0.0
            for distance in pass_at_k_best(group, groups)
        ],
    ),
    ("asymre", {}, asymre(-0.1)),
    ("asymre", {"advantage_kwargs": {"baseline_shift": 0.3}}, asymre(0.3)),
    ("opmd", {}, opmd(1.0)),
    ("opmd", {"advantage_kwargs": {"tau": 0.3}}, opmd(0.3)),
    ("raft", {}, raft),
    ("optimal_token_baseline", {}, plain),
    ("dpo", {"kl_ctl": 0.1, "kl_in": "pairs"}, plain),
    ("gae", {}, plain),
    ("none", {}, lambda group, _: [0.0] * len(group)),
]


def random_groups(rng: random.Random, least: int) -> list[list[Completion]]:
    kind = rng.choice([lambda: float(rng.random() < 0.5), lambda: rng.gauss(0, 1), lambda: rng.choice([0.0, 0.5, 1.0])])
    return [
        [(kind(), rng.randint(1, 20), greedy) for _ in range(rng.randint(least, 5))]
        for greedy in (kind() for _ in range(rng.randint(1, 4)))
    ]


def test_every_advantage_has_a_golden_case() -> None:
    assert {name for name, _, _ in CASES} == ADVANTAGES.keys()


@pytest.mark.parametrize(("name", "options", "oracle"), CASES)
def test_advantages_equal_the_formula(name: str, options: dict[str, Any], oracle: Oracle) -> None:
    rng = random.Random(f"{name}{sorted(options)}")
    compute = build_advantage(ActorConfig(path="m", advantage=name, **options), 5)
    for _ in range(STEPS):
        groups = random_groups(rng, 4 if name == "pass_at_k" else 1)
        wanted = [value for group in groups for value in oracle(group, groups)]
        flat = [(completion, number) for number, group in enumerate(groups) for completion in group]
        order = rng.sample(range(len(flat)), len(flat))
        rows = [flat[i] for i in order]
        scores = Scores(
            torch.tensor([row[0][0] for row in rows], dtype=torch.float64),
            torch.tensor([row[1] for row in rows]),
            torch.tensor([row[0][1] for row in rows]),
            torch.tensor([row[0][2] for row in rows], dtype=torch.float64),
        )
        assert compute(scores).tolist() == pytest.approx([wanted[i] for i in order], rel=1e-9, abs=1e-9), groups


@pytest.mark.parametrize("zero_tail", [True, False])
def test_the_baseline_of_a_token_is_the_groups_reward_weighted_by_the_paths_up_to_it(zero_tail: bool) -> None:
    rng = random.Random(zero_tail)
    for _ in range(STEPS):
        groups = [rng.randint(0, 2) for _ in range(rng.randint(1, 7))]
        energies = [np.array([rng.random() for _ in range(rng.randint(0, 5))]) for _ in groups]
        values = [rng.gauss(0, 1) for _ in groups]
        got = token_advantages(np.array(values), groups, energies, zero_tail)
        for i, group in enumerate(groups):
            own = [j for j, other in enumerate(groups) if other == group]
            assert len(got[i]) == len(energies[i])
            for t in range(len(energies[i])):
                alive = [j for j in own if len(energies[j]) > t]
                paths = {j: sum(energies[j][: t + 1]) for j in alive}
                baseline = sum(paths[j] * values[j] for j in alive) / sum(paths.values())
                if len(own) == 1 or (zero_tail and alive == [i]):
                    baseline = 0.0
                assert got[i][t] == pytest.approx(values[i] - baseline, abs=1e-9)


def test_whitening_is_over_the_tokens_of_all_sequences() -> None:
    advantages = [[2.0, 2.0, 2.0], [-1.0], [0.5, 0.5]]
    tokens = [a for one in advantages for a in one]
    whitening = Moments.merged(Moments.of(torch.tensor(one)) for one in advantages)
    field_T = torch.tensor([9.0, *tokens])
    batch = Batch((7,), torch.zeros(7, dtype=torch.int64), torch.tensor([0.0] + [1.0] * 6), {"advantages": field_T})
    white = Whitening(whitening.mean, whitening.std).applied(batch).fields["advantages"].tolist()
    expected = [(a - statistics.mean(tokens)) / math.sqrt(statistics.variance(tokens) + 1e-8) for a in tokens]
    assert white == pytest.approx([0.0, *expected], rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_kl_estimates_and_gradients_equal_the_formula(estimator: KLEstimator) -> None:
    rng = random.Random(estimator)
    for _ in range(300):
        p, ref = -rng.expovariate(1), -rng.expovariate(1)
        logprob = torch.tensor(p, dtype=torch.float64, requires_grad=True)
        value = kl_estimate(logprob, torch.tensor(ref, dtype=torch.float64), estimator)
        d = p - ref
        expected, slope = {
            "k1": (d, 1.0),
            "k2": (d * d / 2, d),
            "k3": (math.exp(ref - p) - 1 + d, 1 - math.exp(ref - p)),
            "abs": (abs(d), math.copysign(1.0, d)),
        }[estimator]
        (gradient,) = torch.autograd.grad(value, logprob)
        assert value.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert gradient.item() == pytest.approx(slope, rel=1e-9, abs=1e-12)


def test_the_adaptive_weight_follows_its_formula_and_its_target() -> None:
    rng = random.Random(0)
    actor = ActorConfig(path="m", kl_ctl=0.1, kl_target=0.05, kl_horizon=1000)
    for _ in range(200):
        before, kl, n = rng.uniform(0.01, 1), rng.uniform(0, 0.2), rng.randint(1, 3000)
        error = kl / 0.05 - 1
        error = -0.2 if error < -0.2 else 0.2 if error > 0.2 else error
        after = AlgorithmState(before).after(actor, {"kl_ref": kl}, n).kl_ctl
        assert after == pytest.approx(before * (1 + error * (n / 1000 if n < 1000 else 1)))
        assert (after > before) == (kl > 0.05)


def test_a_weight_that_is_not_adapted_is_the_recipes_when_a_run_goes_on() -> None:
    fixed, adaptive = ActorConfig(path="m", kl_ctl=0.1), ActorConfig(path="m", kl_ctl=0.1, kl_target=1.0)
    assert AlgorithmState(0.3, True).resumed(fixed) == AlgorithmState(0.1, True)
    assert AlgorithmState(0.3, True).resumed(adaptive) == AlgorithmState(0.3, True)
    assert AlgorithmState(0.3).after(fixed, {"kl_ref": 9.0}, 8) == AlgorithmState(0.3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_metrics_of_a_skipped_update_that_are_not_finite_change_no_weight(value: float) -> None:
    actor = ActorConfig(path="m", kl_ctl=0.1, kl_target=1.0, entropy_target=0.5, entropy_coeff=0.1)
    state = AlgorithmState.of(actor)
    assert state.after(actor, {"kl_ref": value, "entropy": value, "rollout_mismatch_kl": value}, 8) == state


def test_the_weight_of_the_entropy_rises_until_the_target_is_reached_and_rests_above_it() -> None:
    actor = ActorConfig(path="m", entropy_target=0.5, entropy_step=0.1, entropy_coeff=0.1)
    state = AlgorithmState.of(actor)
    told = []
    for entropy in (0.4, 0.5, 0.6, 0.7, 0.8, 0.3):
        state = state.after(actor, {"entropy": entropy}, 8)
        told.append((round(state.entropy_coeff, 9), round(state.entropy_bonus, 9)))
    assert told == [(0.2, 0.2), (0.3, 0.3), (0.2, 0.0), (0.1, 0.0), (0.0, 0.0), (0.1, 0.1)]
    assert state.resumed(actor) == state
    assert state.resumed(ActorConfig(path="m")) == AlgorithmState(0.0)


def test_the_correction_begins_after_a_step_with_a_larger_mismatch_and_stays() -> None:
    actor = ActorConfig(path="m")
    state = AlgorithmState.of(actor)
    assert not state.after(actor, {"rollout_mismatch_kl": 0.9e-3}, 8).corrects_rollout
    state = state.after(actor, {"rollout_mismatch_kl": 1.1e-3}, 8)
    assert state.corrects_rollout
    assert state.after(actor, {"rollout_mismatch_kl": 0.0}, 8).corrects_rollout
    off = ActorConfig.model_validate({"path": "m", "rollout_correction": {"method": "none"}})
    assert not AlgorithmState.of(off).after(off, {"rollout_mismatch_kl": 1.0}, 8).corrects_rollout
