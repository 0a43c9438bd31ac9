"""The likelihood of given responses as a term of the loss: its formula, under every split and share of a mini-batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fivefold.algorithms.distillation import Distillation
from fivefold.algorithms.imitation import EXPERT, NLL_WEIGHT, ExpertWeight, Imitation, TokenWeight, policy_mask
from fivefold.algorithms.loss import LossInputs
from fivefold.algorithms.losses.ppo import PPO
from fivefold.algorithms.metrics import merge_metrics, metric_values
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.batch import Columns
from fivefold.config.schema.data import ExpertDatasetConfig
from fivefold.config.schema.engine import MicroBatchConfig
from fivefold.data.examples import Examples
from fivefold.data.sft import SFTExample, sft_columns
from fivefold.engine.packing import BatchPlanner
from fivefold.layout.parser import parse_backend
from fivefold.roles import remote_batch
from fivefold.roles.remote_batch import Piece, RemoteBatch, Spans, assemble
from fivefold.update.expert_examples import RIGHT, ExpertExamples, ExpertTerm, with_imitation
from tests.unit.algorithms.random_batches import random_split, sample


@pytest.mark.parametrize("token_weight", ["one", "p", "phi"])
def test_the_terms_of_a_batch_equal_the_formula_under_every_split(token_weight: TokenWeight) -> None:
    rng = random.Random(token_weight)
    for _ in range(50):
        sampled, policy = sample(rng), PolicyLoss(1.0, PPO(), rng.choice(["token_mean", "sequence_mean"]), kl_coeff=0.1)
        batch, mu = sampled.batch, rng.random()
        experts = [rng.random() < 0.4 for _ in batch.lengths]
        weights = [rng.choice([0.0, 1.0, 2.5]) for _ in batch.lengths]
        spread = {
            name: torch.tensor([float(v) for v, n in zip(values, batch.lengths, strict=True) for _ in range(n)])
            for name, values in ((EXPERT, experts), (NLL_WEIGHT, weights))
        }
        sampled = replace(sampled, batch=batch.with_fields(**spread))
        loss = replace(policy, imitation=Imitation(1 - mu, token_weight))
        total, metrics = loss(sampled.inputs())
        own = [index for index, is_expert in enumerate(experts) if not is_expert]
        wanted = (1 - mu) * policy(sampled.inputs(own))[0]
        n_terms = 0
        for t in range(batch.n_tokens):
            if batch.mask_T[t] and spread[NLL_WEIGHT][t] > 0:
                p = sampled.logprobs_T[t].detach().exp()
                factor = {"one": 1.0, "p": p, "phi": p * (1 - p)}[token_weight] if spread[EXPERT][t] else 1.0
                wanted = wanted - spread[NLL_WEIGHT][t] * factor * sampled.logprobs_T[t]
                n_terms += 1
        torch.testing.assert_close(total, wanted)
        assert float(metrics["imitation_nll"].weight) == n_terms
        assert torch.equal(policy_mask(sampled.batch).bool(), batch.mask_T.bool() & ~spread[EXPERT].bool())
        parts = [loss(sampled.inputs(indices)) for indices in random_split(rng, len(batch))]
        torch.testing.assert_close(torch.stack([part for part, _ in parts]).sum(), total)
        for mine, theirs in zip(*(gradient(value, sampled.logprobs_T) for value in (total, wanted)), strict=True):
            torch.testing.assert_close(mine, theirs)
        assert metric_values(merge_metrics(part for _, part in parts)) == pytest.approx(metric_values(metrics))


def gradient(value: torch.Tensor, logprobs_T: torch.Tensor) -> torch.Tensor:
    if not value.requires_grad:
        return torch.zeros_like(logprobs_T)
    return torch.nan_to_num(torch.autograd.grad(value, logprobs_T, retain_graph=True)[0])


EXAMPLES = [SFTExample((1, 2), (3, 4, 5)), SFTExample((1,), (2,)), SFTExample((1, 2, 3), (4, 5))]


def samples() -> RemoteBatch:
    """Return three completions, of which the last is right and the first is not trained."""
    lengths, trained = [4, 5, 3], [3, 4, 2]
    mask_T = np.concatenate([np.arange(n) >= n - k for n, k in zip(lengths, trained, strict=True)])
    values: dict[str, Any] = {
        "tokens": np.arange(12, dtype=np.int32),
        "mask": mask_T,
        "old_logprobs": np.full(12, -1.0, np.float32),
    }
    piece = Piece(Columns(np.array(lengths, np.int32), values), np.arange(3))
    batch = RemoteBatch(np.array(lengths), np.array(trained), (piece,)).untrained([0])
    advantages, right = np.array([1.0, -1.0, 2.0], np.float32), np.array([1, 0, 1], np.float32)
    turns = Spans((((2, 1, 7.0),), (), ((0, 3, 1.0),)), np.float32)
    return batch.with_scalars(**{"advantages": advantages, RIGHT: right}).with_spans(turn=turns)


@pytest.mark.parametrize(("aggregation", "n_replicas"), [("token_mean", 1), ("sequence_mean", 2), ("token_mean", 5)])
def test_shares_of_a_mini_batch_add_up_to_the_means_of_each_term(
    aggregation: Any, n_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The columns themselves take the place of references to them.
    monkeypatch.setattr(remote_batch, "put", lambda columns: columns)
    mu, positive, batch = 0.3, 0.2, samples()
    loss = PolicyLoss(1.0, PPO(), aggregation, imitation=Imitation(1 - mu))
    divisor = loss.normalizer(batch.totals())
    term = ExpertTerm(RemoteBatch.of(sft_columns(EXAMPLES)), mu, by_sequence=aggregation == "sequence_mean")
    mixed = with_imitation(batch, divisor, term, positive)
    assert mixed.totals().n_trained_tokens == batch.totals().n_trained_tokens
    planner = BatchPlanner.of(
        MicroBatchConfig(max_tokens_per_mb=64), parse_backend(f"megatron:d{n_replicas}"), quadratic_at=100.0
    )
    plan = planner.plan(mixed.lengths_N.tolist())
    total, turns = 0.0, []
    for replica, (order, columns) in enumerate(mixed.orders(plan)):
        share = assemble(order, columns).batch
        turns += share.fields["turn"].tolist()
        assert {"advantages", "old_logprobs", EXPERT, NLL_WEIGHT} <= share.fields.keys(), replica
        # log p of a token that is the k-th of its sequence is -(k + 1) / 10.
        places = [torch.arange(n, dtype=torch.float32) for n in share.lengths]
        logprobs_T = -(torch.cat([*places, torch.empty(0)]) + 1) / 10
        predictions = {"logprobs": logprobs_T, "entropy": torch.zeros_like(logprobs_T)}
        total += float(loss(LossInputs(predictions, share.mask_T, share.lengths, share.fields))[0])

    assert sorted(turns)[-5:] == [0, 1, 1, 1, 7], "an expert's tokens have none"

    def nll(first: int, last: int) -> list[float]:
        return [(place + 1) / 10 for place in range(first, last)]

    experts = [nll(2, 5), nll(1, 2), nll(3, 5)]
    costs = {1: [-clipped(-1.0, x) for x in nll(1, 5)], 2: [-clipped(2.0, x) for x in nll(1, 3)]}
    if aggregation == "sequence_mean":
        policy = sum(sum(row) / len(row) for row in costs.values()) / 2
        expert = sum(sum(row) / len(row) for row in experts) / 3
    else:
        policy = sum(map(sum, costs.values())) / 6
        expert = sum(map(sum, experts)) / 6
    right = sum(nll(1, 3)) / 2
    assert total / divisor == pytest.approx((1 - mu) * policy + mu * expert + positive * right, rel=1e-5)


def test_an_experts_tokens_cost_the_divergence_from_their_teacher_in_place_of_their_likelihood() -> None:
    """A loop over tokens: (1 - mu) policy loss, c times an expert's divergence, -log p of right completions."""
    rows = {
        "mask": [0.0, 1.0, 1.0, 0.0, 1.0, 1.0],
        "logprobs": [0.0, -1.0, -0.5, 0.0, -2.0, -3.0],
        "divergence": [torch.nan, 0.25, 0.5, torch.nan, 2.0, 4.0],
        EXPERT: [0.0, 0.0, 0.0, 1.0, 1.0, 1.0],
        NLL_WEIGHT: [0.1, 0.1, 0.1, 0.3, 0.3, 0.3],
        "advantages": [1.0, 1.0, 1.0, 0.0, 0.0, 0.0],
    }
    fields = {name: torch.tensor(values) for name, values in rows.items()}
    predictions = {name: fields.pop(name).requires_grad_() for name in ("logprobs", "divergence")}
    predictions["entropy"] = torch.zeros(6)
    distillation, imitation = Distillation(0.7, "top_k"), Imitation(0.75, teacher_coeff=0.7)
    loss = PolicyLoss(1.0, PPO(), distillation=distillation, imitation=imitation)
    total, metrics = loss(LossInputs(predictions, fields.pop("mask"), (3, 3), fields))
    policy = sum(-1.0 + 0.7 * divergence for divergence in (0.25, 0.5))
    assert float(total) == pytest.approx(0.75 * policy + 0.3 * 0.7 * (2.0 + 4.0) + 0.1 * (1.0 + 0.5))
    of_logprobs_T, of_divergence_T = torch.autograd.grad(total, [predictions["logprobs"], predictions["divergence"]])
    torch.testing.assert_close(of_logprobs_T, torch.tensor([0, -0.75 - 0.1, -0.75 - 0.1, 0, 0, 0]))
    torch.testing.assert_close(of_divergence_T, torch.tensor([0, 0.525, 0.525, 0, 0.21, 0.21]))
    values = metric_values(metrics)
    assert (values["teacher_kl"], values["imitation_teacher_kl"]) == pytest.approx((0.375, 3.0))


def clipped(advantage: float, nll: float) -> float:
    """Return PPO's objective for a token whose old log-prob is -1."""
    ratio = float(np.exp(1.0 - nll))
    return min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)


def test_the_weight_rises_and_falls_by_its_schedule() -> None:
    weight = ExpertWeight(0.8, 0.2, warmup_steps=4, decay_steps=4)
    assert [weight(step) for step in range(1, 11)] == pytest.approx(
        [0.0, 0.2, 0.4, 0.6, 0.8, 0.5 + 0.3 * 2**-0.5, 0.5, 0.5 - 0.3 * 2**-0.5, 0.2, 0.2]
    )
    assert [ExpertWeight(0.1, 0.1)(step) for step in (1, 99)] == [0.1, 0.1]


def test_each_pass_over_a_step_has_all_of_its_examples_and_the_position_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_batch, "put", lambda columns: columns)
    config = ExpertDatasetConfig(path="x", batch_size=2, weight=0.4)
    data = Examples(tuple(SFTExample((1,), (i, i + 1)) for i in range(7)), tuple(range(1, 8)), n_rows=7, n_too_long=0)
    experts = ExpertExamples.of(config, data, n_minibatches=2, seed=1)

    def dealt(given: Sequence[Columns], step: int, updates: range) -> list[tuple[int, ...]]:
        batches = [RemoteBatch.of(columns) for columns in given]
        terms = [experts.term(step, batches, number).batch for number in updates]
        return [tuple(batch.pieces[0].columns.values["tokens"]) for batch in terms]

    drawn = []
    for step in range(1, 4):
        given = experts.draw()
        passes = [dealt(given, step, updates) for updates in (range(2), range(2, 4))]
        assert passes[0] == passes[1]
        assert len(set(passes[0])) == 2
        drawn.append(passes[0])
    assert len({tokens for step in drawn for tokens in step}) == 6, "no example comes twice in an epoch"
    again = ExpertExamples.of(config, data, n_minibatches=2, seed=1)
    again.draw()
    state = again.sampler.state_dict()
    other = ExpertExamples.of(config, data, n_minibatches=2, seed=1)
    other.sampler.load_state_dict(state)
    assert dealt(other.draw(), 2, range(2)) == drawn[1]
    assert other.imitation(2) == Imitation(0.6)
