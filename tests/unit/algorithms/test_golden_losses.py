"""Every policy loss, aggregation, KL term and correction against its formula, evaluated token by token in plain Python.

The oracle shares no code with `fivefold.algorithms`: it loops over sequences and tokens, and decides by `if` where the
papers have minima and clips. Its gradients are those of autograd through these scalars, in float64.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, log, prod

import pytest
import torch

from fivefold.algorithms.corrections import KEPT_TOKENS, RolloutCorrection
from fivefold.algorithms.loss import Surrogate
from fivefold.algorithms.losses.covariance import CHOSEN, ClipCov, KLCov
from fivefold.algorithms.losses.entropy_clips import CLIPPED, ClipB, ClipV
from fivefold.algorithms.losses.policy_gradient import CISPO, DPPOKL, DPPOTV, REC, TOPR, Reinforce
from fivefold.algorithms.losses.ppo import PPO
from fivefold.algorithms.losses.sequence_ratios import GMPO, GSPO
from fivefold.algorithms.losses.soft_clips import CPGD, SAPO, Kimi
from fivefold.algorithms.metrics import merge_metrics, metric_values
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.algorithms.sample_weights import SAMPLE_WEIGHT
from fivefold.algorithms.token_sums import zero_unless
from fivefold.config.methods import LOSSES
from tests.unit.algorithms.random_batches import Sampled, random_split, sample

BATCHES = 50
"""Random batches for each loss."""

Scalar = torch.Tensor
"""A tensor of no dimensions, in float64."""


@dataclass(frozen=True)
class Token:
    """One trained token."""

    logprob: Scalar
    entropy: Scalar
    old: float
    rollout: float
    ref: float
    advantage: float
    is_chosen: bool
    """Whether Clip-Cov, KL-Cov, Clip-B or Clip-V chose the token."""
    is_kept: bool
    """Whether M2PO's mask keeps the token."""
    sample_weight: float
    place: int
    """Its place among all tokens; those of a turn follow each other."""

    @property
    def ratio(self) -> Scalar:
        return torch.exp(self.logprob - self.old)


def number(value: float) -> Scalar:
    return torch.tensor(value, dtype=torch.float64)


Oracle = Callable[[list[Token]], list[Scalar]]
"""The trained tokens of one sequence -> the cost of each."""


def ppo(low: float, high: float, dual: float | None = None) -> Oracle:
    def cost(token: Token) -> Scalar:
        a, r = token.advantage, token.ratio
        if a >= 0:
            return -a * r if r <= 1 + high else number(-a * (1 + high))
        if r < 1 - low:
            return number(-a * (1 - low))
        if dual is not None and r > dual:
            return number(-a * dual)
        return -a * r

    return lambda tokens: [cost(token) for token in tokens]


def reinforce(tokens: list[Token]) -> list[Scalar]:
    return [-token.advantage * token.logprob for token in tokens]


def gspo(low: float, high: float) -> Oracle:
    """Eq. 14, whose gradient goes through the token's own log-prob."""

    def costs(tokens: list[Token]) -> list[Scalar]:
        log_s = sum((t.logprob - t.old for t in tokens), number(0.0)) / len(tokens)
        result = []
        for t in tokens:
            s = torch.exp(log_s).detach() * t.ratio / t.ratio.detach()
            stopped = s > 1 + high if t.advantage >= 0 else s < 1 - low
            bound = 1 + high if t.advantage >= 0 else 1 - low
            result.append(number(-t.advantage * bound) if stopped else -t.advantage * s)
        return result

    return costs


def gmpo(low: float, high: float) -> Oracle:
    def costs(tokens: list[Token]) -> list[Scalar]:
        total = number(0.0)
        for t in tokens:
            d = t.logprob - t.old
            if t.advantage > 0 and d > high:
                d = number(high)
            elif t.advantage <= 0 and d < -low:
                d = number(-low)
            total = total + d
        mean_advantage = sum(t.advantage for t in tokens) / len(tokens)
        return [-mean_advantage * torch.exp(total / len(tokens)) for _ in tokens]

    return costs


def cispo(low: float, high: float) -> Oracle:
    def cost(token: Token) -> Scalar:
        weight = min(max(token.ratio.item(), 1 - low), 1 + high)
        return -weight * token.advantage * token.logprob

    return lambda tokens: [cost(token) for token in tokens]


def sapo(tau_pos: float, tau_neg: float) -> Oracle:
    def cost(token: Token) -> Scalar:
        tau = tau_pos if token.advantage > 0 else tau_neg
        return -token.advantage * 4 / tau / (1 + torch.exp(-tau * (token.ratio - 1)))

    return lambda tokens: [cost(token) for token in tokens]


def topr(positive: float, negative: float) -> Oracle:
    def costs(tokens: list[Token]) -> list[Scalar]:
        whole = exp(sum(t.logprob.item() - t.old for t in tokens))
        return [
            -(positive if t.advantage > 0 else negative * min(1.0, whole)) * t.advantage * t.logprob for t in tokens
        ]

    return costs


def clip_cov(low: float, high: float, largest: float | None = None) -> Oracle:
    def costs(tokens: list[Token]) -> list[Scalar]:
        plain = ppo(low, high, largest)(tokens)
        return [number(0.0) if t.is_chosen else cost for t, cost in zip(tokens, plain, strict=True)]

    return costs


def kl_cov(coefficient: float) -> Oracle:
    def cost(t: Token) -> Scalar:
        distance = t.logprob - t.old if t.logprob > t.old else t.old - t.logprob
        return -t.advantage * t.ratio + (coefficient * distance if t.is_chosen else 0.0)

    return lambda tokens: [cost(token) for token in tokens]


def kimi(tau: float) -> Oracle:
    """The square of the whole sequence's log-ratio, as the sum over its tokens of the whole times the token's."""

    def costs(tokens: list[Token]) -> list[Scalar]:
        whole = sum((t.logprob - t.old for t in tokens), number(0.0))
        return [-t.advantage * t.logprob + tau / 2 * whole * (t.logprob - t.old) for t in tokens]

    return costs


def cpgd(low: float, high: float, drift: float) -> Oracle:
    def cost(t: Token) -> Scalar:
        d = t.logprob - t.old
        bound = log(1 + high) if t.advantage >= 0 else log(1 - low)
        stopped = d > bound if t.advantage >= 0 else d < bound
        gain = number(-t.advantage * bound) if stopped else -t.advantage * d
        return gain + drift * (torch.exp(d) - 1 - d)

    return lambda tokens: [cost(token) for token in tokens]


def dppo(kind: str, low: float, high: float, largest: float) -> Oracle:
    def cost(t: Token) -> Scalar:
        p, p_old = exp(t.logprob.item()), exp(t.old)
        if kind == "tv":
            out = p - p_old > high if t.advantage > 0 else p_old - p > low
        else:
            q, q_old = max(1 - p, 1e-12), max(1 - p_old, 1e-12)
            divergence = p_old * log(p_old / p) + (1 - p_old) * log(q_old / q)
            out = divergence > high and p > p_old if t.advantage > 0 else divergence > low and p < p_old
        return number(0.0) if out else -min(p / p_old, largest) * t.advantage * t.logprob

    return lambda tokens: [cost(token) for token in tokens]


def rec(region: str, low: float, high: float, weigh: Callable[[Token], float], penalty: str, coeff: float) -> Oracle:
    """The ring is between 1 - 0.6 and 1 - low, and between 1 + high and 1 + 2."""

    def is_inside(t: Token) -> bool:
        r, a = t.ratio.item(), t.advantage
        if region == "none" or (region == "one_side" and a == 0) or 1 - low <= r <= 1 + high:
            return True
        if region == "one_side":
            return r < 1 if a > 0 else r > 1
        return region == "ring" and (r <= 0.4 if a >= 0 else r >= 3)

    def cost(t: Token) -> Scalar:
        gain = -weigh(t) * t.advantage * t.logprob if is_inside(t) else number(0.0)
        terms = {"none": number(0.0), "k2": (t.logprob - t.old) ** 2, "forward_kl": -t.logprob}
        return gain + coeff * terms[penalty]

    return lambda tokens: [cost(token) for token in tokens]


CASES: dict[str, list[tuple[Surrogate, Oracle]]] = {
    "ppo": [(PPO(0.2, 0.28), ppo(0.2, 0.28)), (PPO(0.3, None, 1.5), ppo(0.3, 0.3, 1.5))],
    "reinforce": [(Reinforce(), reinforce)],
    "gspo": [(GSPO(), gspo(3e-4, 4e-4)), (GSPO(0.2, 0.3), gspo(0.2, 0.3))],
    "gmpo": [(GMPO(), gmpo(0.4, 0.4)), (GMPO(0.1, 0.3), gmpo(0.1, 0.3))],
    "cispo": [(CISPO(), cispo(1.0, 4.0)), (CISPO(0.2, None), cispo(0.2, 0.2))],
    "sapo": [(SAPO(), sapo(1.0, 1.05)), (SAPO(2.0, 3.0), sapo(2.0, 3.0))],
    "topr": [(TOPR(), topr(1.0, 1.0)), (TOPR(0.5, 2.0), topr(0.5, 2.0))],
    "clip_cov": [(ClipCov(0.2, 0.3, 0.3, -1.0, 1.0), clip_cov(0.2, 0.3))],
    "kl_cov": [(KLCov(0.3, 0.7), kl_cov(0.7))],
    "clip_b": [(ClipB(0.2, 0.3, 1.5), clip_cov(0.2, 0.3, 1.5))],
    "clip_v": [(ClipV(0.1), clip_cov(0.1, 0.1))],
    "kimi": [(Kimi(0.3), kimi(0.3))],
    "cpgd": [(CPGD(0.2, 0.3, 0.1), cpgd(0.2, 0.3, 0.1))],
    "dppo_tv": [(DPPOTV(0.02, 0.03, 1.5), dppo("tv", 0.02, 0.03, 1.5)), (DPPOTV(), dppo("tv", 0.2, 0.2, 20.0))],
    "dppo_kl": [(DPPOKL(0.01, 0.02), dppo("kl", 0.01, 0.02, 20.0))],
    "rec": [
        (REC(0.2, 0.3), rec("one_side", 0.2, 0.3, lambda t: 1.0, "none", 0.0)),
        (
            REC(0.1, None, "two_side", weight="ratio", penalty="k2", penalty_coeff=0.3),
            rec("two_side", 0.1, 0.1, lambda t: t.ratio.item(), "k2", 0.3),
        ),
        (
            REC(region="ring", weight="advantage", weight_temperature=2.0),
            rec("ring", 0.2, 0.2, lambda t: exp(t.advantage / 2), "none", 0.0),
        ),
        (
            REC(region="none", penalty="forward_kl", penalty_coeff=0.1),
            rec("none", 0, 0, lambda t: 1.0, "forward_kl", 0.1),
        ),
    ],
}
CORRECTIONS = [
    None,
    None,
    RolloutCorrection("token", 1.2),
    RolloutCorrection("sequence", 2.0),
    RolloutCorrection("token", None, "token", 1.5, 0.0),
    RolloutCorrection("sequence", None, "sequence", 1.5, 0.0),
    RolloutCorrection("token", None, "token", 1.5, 0.6),
    RolloutCorrection(None, None, "geometric", 1.05, 0.95),
    RolloutCorrection("token", 1.3, "geometric", None, 0.9, veto_below=0.5),
    RolloutCorrection("token", 1.1, "token", 0.02, mask_by="k2", weight_floor=0.9),
    RolloutCorrection(None, None, "sequence", 0.05, mask_by="k3"),
    RolloutCorrection(None, None, "geometric", 0.02, mask_by="k3"),
    RolloutCorrection(None, None, "geometric", 1.1, mask_by="error"),
    RolloutCorrection("sequence", None, "largest", 0.05, mask_by="k2", weight_floor=0.5),
    RolloutCorrection(None, None, "largest", 1.3, 0.5),
    RolloutCorrection(None, None, "token", 0.01, mask_by="binary_kl"),
    RolloutCorrection("token", None, "second_moment", 0.05),
    RolloutCorrection("token", 1.2, weight_normalized=True),
    RolloutCorrection("sequence", 1.5, "token", 1.4, 0.6, weight_normalized=True),
    RolloutCorrection("token", None, "second_moment", 0.05, weight_normalized=True),
    RolloutCorrection(None, None, "turn", 1.05, 0.9),
    RolloutCorrection("token", None, "turn", 1.3, 0.7, difference_above=0.03, difference_below=-0.02),
    RolloutCorrection(None, None, "sequence", 2.0, 0.5, difference_below=-0.05),
]


def random_loss(rng: random.Random, surrogate: Surrogate) -> PolicyLoss:
    correction = rng.choice(CORRECTIONS)
    return PolicyLoss(
        temperature=1.0,
        surrogate=surrogate,
        aggregation=rng.choice(["token_mean", "sequence_mean", "sequence_sum", "sequence_sum_fixed"]),
        length=rng.randint(1, 9),
        entropy_coeff=rng.choice([0.0, 0.05]),
        kl_coeff=rng.choice([0.0, 0.1]),
        kl_estimator=rng.choice(["k1", "k2", "k3", "abs"]),
        correction=correction,
        old_is_rollout=rng.random() < 0.2 and (correction is None or correction.before is None),
        opsm_delta=rng.choice([None, None, 0.0, 0.1]),
        kl_unbiased=rng.random() < 0.3,
        kl_clip=rng.choice([None, None, 0.05, 0.5]),
    )


def tokens_of(sampled: Sampled, old: str = "old_logprobs") -> list[list[Token]]:
    batch = sampled.batch
    names = (old, "rollout_logprobs", "ref_logprobs", "advantages")
    nothing_T = torch.zeros(batch.n_tokens)
    chosen_T, clipped_T, kept_T = (batch.fields.get(name, nothing_T) for name in (CHOSEN, CLIPPED, KEPT_TOKENS))
    weight_T = batch.fields.get(SAMPLE_WEIGHT, torch.ones(batch.n_tokens))
    return [
        [
            Token(
                sampled.logprobs_T[t], sampled.entropy_T[t], *(float(batch.fields[name][t]) for name in names),
                is_chosen=bool(chosen_T[t] + clipped_T[t]), is_kept=bool(kept_T[t]),
                sample_weight=float(weight_T[t]), place=t,
            )
            for t in range(start, end)
            if batch.mask_T[t]
        ]
        for start, end in pairwise(batch.offsets())
    ]  # fmt: skip


def measured(by: str, trainer: float, rollout: float) -> float:
    """Return the measure of a token by which a mask decides; w itself for `ratio`."""
    d = trainer - rollout
    if by == "binary_kl":
        (p, p_other), (q, q_other) = (
            (exp(x), 1 - exp(x)) if exp(x) < 1 - 1e-8 else (1 - 1e-8, 1e-8) for x in (trainer, rollout)
        )
        return max(p * log(p / q) + p_other * log(p_other / q_other), q * log(q / p) + q_other * log(q_other / p_other))
    return {"ratio": exp(d), "k2": d * d / 2, "k3": exp(d) - 1 - d, "error": exp(abs(d))}[by]


def correct(loss: PolicyLoss, tokens: list[Token]) -> list[tuple[float, bool]]:
    """Return the weight of each token of a sequence, and whether it is kept."""
    correction = loss.correction
    if correction is None:
        return [(1.0, True)] * len(tokens)
    trainer = [t.logprob.item() if loss.old_is_rollout else t.old for t in tokens]
    by_token = [exp(p - t.rollout) for p, t in zip(trainer, tokens, strict=True)]
    measures = [measured(correction.mask_by, p, t.rollout) for p, t in zip(trainer, tokens, strict=True)]
    is_ratio, n = correction.mask_by == "ratio", len(tokens)
    whole = prod(measures) if is_ratio else sum(measures)
    levels = {"sequence": whole, "geometric": whole ** (1 / n) if is_ratio else whole / n, "largest": max(measures)}
    differences = [exp(p) - exp(t.rollout) for p, t in zip(trainer, tokens, strict=True)]
    result = []
    for i, token in enumerate(tokens):
        run = [j for j in range(n) if tokens[j].place - token.place == j - i]
        if correction.mask == "turn":
            levels["turn"] = prod(measures[j] for j in run) ** (1 / len(run))
        difference = {"sequence": sum(differences), "turn": sum(differences[j] for j in run) / len(run)}
        weight = {None: 1.0, "token": by_token[i], "sequence": prod(by_token)}[correction.weight]
        if correction.weight_cap is not None:
            weight = min(weight, correction.weight_cap)
        if correction.weight_floor is not None:
            weight = max(weight, correction.weight_floor)
        kept = correction.veto_below is None or min(by_token) >= correction.veto_below
        if correction.mask == "second_moment":
            kept &= token.is_kept
        elif correction.mask is not None:
            judged = levels.get(correction.mask, measures[i])
            kept &= correction.mask_above is None or judged <= correction.mask_above
            kept &= correction.mask_below is None or judged >= correction.mask_below
            for bound, sign in ((correction.difference_above, 1), (correction.difference_below, -1)):
                kept &= bound is None or sign * difference[correction.mask] <= sign * bound
        result.append((weight, kept))
    return result


def mean_weight(loss: PolicyLoss, sequences: list[list[Token]]) -> float:
    """Return by what the weights of a mini-batch are divided."""
    correction = loss.correction
    if correction is None or not correction.weight_normalized:
        return 1.0
    weights = [[weight for weight, _ in correct(loss, tokens)] for tokens in sequences if tokens]
    if correction.weight == "sequence":
        weights = [own[:1] for own in weights]
    every = [weight for own in weights for weight in own]
    return sum(every) / len(every)


def naive(loss: PolicyLoss, oracle: Oracle, sequences: list[list[Token]]) -> Scalar:
    """Return the loss of a whole mini-batch, divided as its aggregation says."""
    sums = []
    for tokens in sequences:
        total = number(0.0)
        if not tokens:
            continue
        divisor = mean_weight(loss, sequences)
        corrected = [(weight / divisor, kept) for weight, kept in correct(loss, tokens)]
        drift = sum(t.old - t.logprob.item() for t in tokens) / len(tokens)
        advantage = sum(t.advantage for t in tokens) / len(tokens)
        for t, cost, (weight, kept) in zip(tokens, oracle(tokens), corrected, strict=True):
            if not kept:
                continue
            d = t.logprob - t.ref
            kls = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d, "abs": d if d > 0 else -d}
            kl = kls[loss.kl_estimator]
            if loss.kl_clip is not None and abs(kl.item()) > loss.kl_clip:
                kl = number(math.copysign(loss.kl_clip, kl.item()))
            kl = kl * (t.ratio if loss.kl_unbiased else 1.0)
            if loss.opsm_delta is not None and advantage < 0 and drift > loss.opsm_delta:
                weight = 0.0
            total = total + weight * t.sample_weight * cost - loss.entropy_coeff * t.entropy + loss.kl_coeff * kl
        sums.append(total / len(tokens) if loss.aggregation == "sequence_mean" else total)
    n_tokens = sum(map(len, sequences))
    divisors = {
        "token_mean": n_tokens,
        "sequence_mean": len(sums),
        "sequence_sum": len(sums),
        "sequence_sum_fixed": len(sums) * loss.length,
    }
    return sum(sums, number(0.0)) / max(1, divisors[loss.aggregation])


def gradients(value: torch.Tensor, sampled: Sampled) -> list[torch.Tensor]:
    tensors = (sampled.logprobs_T, sampled.entropy_T)
    if not value.requires_grad:
        return [torch.zeros_like(tensor) for tensor in tensors]
    found = torch.autograd.grad(value, tensors, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]


def weighted(sampled: Sampled, rng: random.Random) -> Sampled:
    """Return the batch with a weight of each sequence, or as it is."""
    if rng.random() < 0.7:
        return sampled
    weights_N = torch.tensor([rng.uniform(0, 2) for _ in sampled.batch.lengths], dtype=torch.float64)
    weight_T = torch.repeat_interleave(weights_N, torch.tensor(sampled.batch.lengths))
    return replace(sampled, batch=sampled.batch.with_fields(**{SAMPLE_WEIGHT: weight_T}))


def prepared(sampled: Sampled, loss: PolicyLoss) -> Sampled:
    """Return the batch after what the loss computes over a whole mini-batch, on one replica."""
    if loss.before is None:
        return sampled
    return replace(sampled, batch=loss.before(sampled.batch, lambda tensor: [tensor]))


def test_every_loss_has_a_golden_case() -> None:
    assert CASES.keys() == LOSSES.keys()


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_formula_under_every_split(name: str) -> None:
    rng = random.Random(name)
    for _ in range(BATCHES):
        surrogate, oracle = rng.choice(CASES[name])
        loss = random_loss(rng, surrogate)
        sampled = prepared(weighted(sample(rng), rng), loss)
        scale = loss.normalizer(sampled.batch.totals())
        total, metrics = loss(sampled.inputs())
        value = total / scale
        old = "rollout_logprobs" if loss.old_is_rollout else "old_logprobs"
        wanted = naive(loss, oracle, tokens_of(sampled, old))
        torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-12)
        got = gradients(value, sampled)
        trained_T = sampled.batch.mask_T.bool()
        for mine, theirs in zip(got, gradients(wanted, sampled), strict=True):
            torch.testing.assert_close(mine, zero_unless(trained_T, theirs), rtol=1e-8, atol=1e-12)

        parts = [loss(sampled.inputs(indices)) for indices in random_split(rng, len(sampled.batch))]
        split = torch.stack([part for part, _ in parts]).sum() / scale
        torch.testing.assert_close(split, value, rtol=1e-9, atol=1e-12)
        for mine, whole in zip(gradients(split, sampled), got, strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-9, atol=1e-12)
        of_parts = metric_values(merge_metrics(part for _, part in parts))
        assert of_parts == pytest.approx(metric_values(metrics), rel=1e-9)


def test_gspo_has_the_gradient_of_the_sequences_ratio_where_its_tokens_have_one_advantage() -> None:
    rng = random.Random(0)
    loss = PolicyLoss(1.0, GSPO(0.2, 0.3), "sequence_mean")
    for _ in range(50):
        sampled = sample(rng)
        advantages_T = torch.cat([number(rng.gauss(0, 1)).expand(length) for length in sampled.batch.lengths])
        sampled = replace(sampled, batch=sampled.batch.with_fields(advantages=advantages_T))
        objective = number(0.0)
        for tokens in tokens_of(sampled):
            if tokens:  # eq. 5 and 7
                s = torch.exp(sum((t.logprob - t.old for t in tokens), number(0.0)) / len(tokens))
                a = tokens[0].advantage
                objective = objective + torch.minimum(s * a, s.clamp(0.8, 1.3) * a)
        total, _ = loss(sampled.inputs())
        torch.testing.assert_close(total, -objective)
        torch.testing.assert_close(gradients(total, sampled)[0], torch.nan_to_num(gradients(-objective, sampled)[0]))
