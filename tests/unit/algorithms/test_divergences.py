"""Divergences from a teacher against their formulas over whole vocabularies, in float64."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch

from fivefold.algorithms.build import build_policy_loss
from fivefold.algorithms.distillation import Direction, Distillation, coarse_divergence
from fivefold.algorithms.loss import LossInputs
from fivefold.algorithms.losses.policy_gradient import Reinforce
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.algorithms.terms import closeness
from fivefold.config.schema.roles import ActorConfig
from fivefold.config.schema.rollout import GenerationConfig

VOCAB = 23


def by_hand(
    logits_NV: torch.Tensor, teacher_NV: torch.Tensor, tokens: list[list[int]], direction: str, beta: float
) -> torch.Tensor:
    """Return the divergence over k tokens and the rest by its definition, one place and one event at a time."""
    values = []
    for logits_V, teacher_V, chosen in zip(logits_NV, teacher_NV, tokens, strict=True):
        p_V, q_V = logits_V.softmax(0), teacher_V.softmax(0)
        others = [token for token in range(VOCAB) if token not in chosen]
        events = [[token] for token in chosen] + ([others] if others else [])
        pairs = [(p_V[event].sum(), q_V[event].sum()) for event in events]
        reverse = sum(p * (p / q).log() for p, q in pairs)
        forward = sum(q * (q / p).log() for p, q in pairs)
        mixtures = [(p, q, beta * q + (1 - beta) * p) for p, q in pairs]
        jsd = sum(beta * q * (q / m).log() + (1 - beta) * p * (p / m).log() for p, q, m in mixtures)
        mixed = beta * forward + (1 - beta) * reverse
        values.append({"reverse": reverse, "forward": forward, "jsd": jsd, "mixed": mixed}[direction])
    return torch.stack(values)


@pytest.mark.parametrize("direction", ["reverse", "forward", "mixed", "jsd"])
def test_a_divergence_over_k_tokens_and_the_rest_equals_its_formula(direction: Direction) -> None:
    draw, generator = random.Random(1), torch.Generator().manual_seed(1)
    for _ in range(150):
        n, k, beta = draw.randint(1, 6), draw.choice([1, 2, 7, VOCAB]), draw.uniform(0.05, 0.95)
        logits_NV = (torch.randn(n, VOCAB, generator=generator, dtype=torch.float64) * 2).requires_grad_()
        teacher_NV = torch.randn(n, VOCAB, generator=generator, dtype=torch.float64) * 2
        tokens_NK = teacher_NV.topk(k).indices
        weights_N = torch.randn(n, generator=generator, dtype=torch.float64)
        log_p_NK = logits_NV.log_softmax(1).gather(1, tokens_NK)
        mine_N = coarse_divergence(log_p_NK, teacher_NV.log_softmax(1).gather(1, tokens_NK), direction, beta)
        (mine,) = torch.autograd.grad(weights_N @ mine_N, logits_NV)
        wanted_N = by_hand(logits_NV, teacher_NV, tokens_NK.tolist(), direction, beta)
        (wanted,) = torch.autograd.grad(weights_N @ wanted_N, logits_NV)
        torch.testing.assert_close(mine_N, wanted_N, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=2e-6)
        assert (mine_N > -1e-9).all()


def test_the_divergence_grows_with_the_number_of_tokens_up_to_that_of_the_vocabulary() -> None:
    generator = torch.Generator().manual_seed(2)
    log_p, log_q = (torch.randn(9, VOCAB, generator=generator).log_softmax(1) for _ in range(2))
    order = log_q.argsort(1, descending=True)
    for direction in ("reverse", "mixed", "jsd", "forward"):
        values = [
            coarse_divergence(log_p.gather(1, order[:, :k]), log_q.gather(1, order[:, :k]), direction)  # type: ignore[arg-type]
            for k in range(1, VOCAB + 1)
        ]
        assert all((later >= earlier - 1e-5).all() for earlier, later in pairwise(values))
    whole = torch.nn.functional.kl_div(log_p, log_q, log_target=True, reduction="none").sum(1)
    torch.testing.assert_close(values[-1], whole, rtol=1e-5, atol=1e-5)  # torch's is KL(q || p), the forward one


def test_the_generalized_jensen_shannon_divergence_tends_to_both_kl_divergences_and_is_bounded() -> None:
    generator = torch.Generator().manual_seed(4)
    log_p, log_q = (torch.randn(9, VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))
    log_p, log_q = log_p.log_softmax(1), log_q.log_softmax(1)
    forward, reverse = (coarse_divergence(log_p, log_q, kind) for kind in ("forward", "reverse"))
    for beta, limit in ((1e-4, forward), (1 - 1e-4, reverse)):
        jsd = coarse_divergence(log_p, log_q, "jsd", beta)
        torch.testing.assert_close(jsd / 1e-4, limit, rtol=1e-2, atol=1e-3)
    symmetric = coarse_divergence(log_p, log_q, "jsd", 0.5)
    torch.testing.assert_close(symmetric, coarse_divergence(log_q, log_p, "jsd", 0.5))
    assert (symmetric < math.log(2)).all()


def test_several_teachers_weigh_in_the_advantage_of_each_token() -> None:
    """The places of two teachers, of which the second has no row here with a weight in the last sequence."""
    mask_T, lengths = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]), (3, 2)
    logprobs_T = torch.tensor([0.0, -1.0, -2.0, 0.0, -3.0], requires_grad=True)
    first_T, second_T = torch.tensor([torch.nan, -0.5, -0.25, torch.nan, -4.0]), torch.tensor([0, -2.0, -1.0, 0, 0])
    weights = torch.tensor([0.25, 0.25, 0.25, 1.0, 1.0])
    fields = {
        "advantages": torch.zeros(5), "teacher_logprobs": first_T, "teacher_logprobs/1": second_T,
        "teacher_weight": weights, "teacher_weight/1": 1 - weights,
    }  # fmt: skip
    loss = PolicyLoss(temperature=1.0, surrogate=Reinforce(), distillation=Distillation(2.0, n_teachers=2))
    total, metrics = loss(LossInputs({"logprobs": logprobs_T, "entropy": logprobs_T}, mask_T, lengths, fields))
    (gradient_T,) = torch.autograd.grad(total, logprobs_T)
    closer = [0.25 * 0.5 + 0.75 * -1.0, 0.25 * 1.75 + 0.75 * 1.0, -1.0]
    torch.testing.assert_close(gradient_T[mask_T.bool()], -2 * torch.tensor(closer))
    torch.testing.assert_close(metrics["teacher_kl"].sum, -torch.tensor(closer).sum())


def test_the_sampled_form_is_the_log_ratio_as_an_advantage_of_each_token() -> None:
    """Against REINFORCE by hand: the gradient of log p(t) is coeff * (log q(t) - log p_old(t)) + A."""
    draw, generator = random.Random(3), torch.Generator().manual_seed(3)
    for _ in range(150):
        lengths = tuple(draw.randint(2, 7) for _ in range(draw.randint(1, 5)))
        n, coeff = sum(lengths), draw.uniform(0.1, 2)
        mask_T = (torch.rand(n, generator=generator) < 0.6).float()
        logprobs_T = (-torch.rand(n, generator=generator)).requires_grad_()
        fields = {name: -torch.rand(n, generator=generator) for name in ("advantages", "teacher_logprobs")}
        if has_old := draw.random() < 0.5:
            fields["old_logprobs"] = -torch.rand(n, generator=generator)
        old_T = fields["old_logprobs"] if has_old else logprobs_T.detach()
        wanted_T = -(fields["advantages"] + coeff * (fields["teacher_logprobs"] - old_T)) * mask_T
        masked = {name: torch.where(mask_T.bool(), values, torch.nan) for name, values in fields.items()}
        loss = PolicyLoss(temperature=1.0, surrogate=Reinforce(), distillation=Distillation(coeff))
        total, metrics = loss(LossInputs({"logprobs": logprobs_T, "entropy": logprobs_T}, mask_T, lengths, masked))
        (gradient_T,) = torch.autograd.grad(total, logprobs_T)
        torch.testing.assert_close(gradient_T, wanted_T)
        torch.testing.assert_close(metrics["teacher_kl"].sum, ((old_T - fields["teacher_logprobs"]) * mask_T).sum())


def test_bounds_of_a_recipe_cap_what_a_token_adds() -> None:
    keys = {"coeff": 1.0, "over": "top_k", "direction": "forward", "max_divergence": 0.5, "min_logprob": -2.0}
    config = ActorConfig.model_validate({"path": "m", "distill": keys})
    how = build_policy_loss(config, GenerationConfig()).distillation
    assert how is not None
    log_p = torch.tensor([[0.2, 0.05], [0.6, 0.3], [0.01, 0.01]], dtype=torch.float64).log().requires_grad_()
    log_q = torch.tensor([[0.3, 0.02], [0.5, 0.4], [0.9, 0.05]], dtype=torch.float64).log()
    floored = [each.clamp(min=-2.0) for each in (log_p, log_q)]
    wanted = coarse_divergence(*floored, "forward").clamp(max=0.5)
    mine = how.between(log_p, log_q)
    assert mine.tolist() == wanted.tolist()
    assert float(mine[2]) == 0.5
    (gradient,) = torch.autograd.grad(mine.sum(), log_p)
    assert (gradient[2] == 0).all()
    assert float(gradient[0, 1]) == 0  # below the least log-prob
    assert (gradient[1] != 0).all()
    sampled = Distillation(2.0, most=0.5)
    fields = {"teacher_logprobs": torch.tensor([-0.1, -3.0, -0.6])}
    closer_T = closeness(sampled, fields, torch.tensor([-2.0, -0.5, -0.5]), torch.tensor([True, True, True]))
    torch.testing.assert_close(closer_T, torch.tensor([0.5, -0.5, -0.1]))


def test_a_divergence_of_the_head_is_a_cost_of_each_token() -> None:
    mask_T = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    values_T = torch.tensor([torch.nan, 0.25, 0.5, torch.inf, 1.0], requires_grad=True)
    zeros_T = torch.zeros(5)
    loss = PolicyLoss(temperature=1.0, surrogate=Reinforce(), distillation=Distillation(2.0, "top_k", "forward"))
    assert loss.divergence == loss.distillation
    predictions = {"logprobs": zeros_T, "entropy": zeros_T, "divergence": values_T}
    total, metrics = loss(LossInputs(predictions, mask_T, (3, 2), {"advantages": zeros_T}))
    assert (float(total), float(metrics["teacher_kl"].sum)) == (3.5, 1.75)
    (gradient_T,) = torch.autograd.grad(total, values_T)
    assert gradient_T.tolist() == [0.0, 2.0, 2.0, 0.0, 2.0]
