"""Advantages and returns of GAE are those of a plain loop; their statistics do not depend on the split of a step."""

from __future__ import annotations

import pytest
import torch

from fivefold.algorithms.gae import GAE, EstimateMoments, Moments, Whitening
from fivefold.batch import Batch

LENGTHS = (6, 1, 9, 4)


def make_batch() -> Batch:
    """Return four sequences: one turn, a prompt alone, two turns with a tool's answer between them, nothing trained."""
    masks = ([0, 0, 1, 1, 1, 1], [0], [0, 1, 1, 0, 0, 1, 0, 1, 1], [0, 0, 0, 0])
    generator = torch.Generator().manual_seed(0)
    values_T, kl_T = (torch.randn(sum(LENGTHS), generator=generator) for _ in range(2))
    rewards_T = torch.tensor([1.0, 5.0, -2.0, 3.0]).repeat_interleave(torch.tensor(LENGTHS))
    mask_T = torch.tensor([float(bit) for mask in masks for bit in mask])
    # What a field has on tokens that are not trained must not matter.
    values_T[mask_T == 0] = torch.nan
    tokens_T = torch.zeros(sum(LENGTHS), dtype=torch.int64)
    return Batch(LENGTHS, tokens_T, mask_T, {"values": values_T, "rewards": rewards_T, "kl": kl_T})


def plain(batch: Batch, gamma: float, lam: float, token_rewards: list[float]) -> tuple[list[float], list[float]]:
    """Compute A_t = sum_k (gamma lam)^k delta_{t+k} by its definition."""
    advantages, returns = [0.0] * batch.n_tokens, [0.0] * batch.n_tokens
    for start, end in zip(batch.offsets(), batch.offsets()[1:], strict=False):
        steps = [place for place in range(start, end) if batch.mask_T[place]]
        values = [float(batch.fields["values"][place]) for place in steps] + [0.0]
        rewards = [token_rewards[place] for place in steps]
        if rewards:
            rewards[-1] += float(batch.fields["rewards"][start])
        deltas = [rewards[i] + gamma * values[i + 1] - values[i] for i in range(len(steps))]
        for i, place in enumerate(steps):
            advantages[place] = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[i:]))
            returns[place] = advantages[place] + values[i]
    return advantages, returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.95, 0.0)])
def test_rewards_of_tokens_are_parts_of_the_reward_at_their_places(gamma: float, lam: float) -> None:
    batch, generator = make_batch(), torch.Generator().manual_seed(1)
    own_T = torch.randn(batch.n_tokens, generator=generator) * batch.mask_T
    penalty_T = -0.1 * batch.fields["kl"]
    rewards = (own_T + penalty_T).tolist()
    for start, end in zip(batch.offsets(), batch.offsets()[1:], strict=False):
        steps = [place for place in range(start, end) if batch.mask_T[place]]
        if steps:  # what is left of the whole for the last token
            rewards[steps[-1]] -= sum(float(own_T[place]) for place in steps)
    want_advantages, want_returns = plain(batch, gamma, lam, rewards)
    advantages_T, returns_T = GAE(gamma, lam).estimate(batch.with_fields(token_rewards=own_T), penalty_T)
    torch.testing.assert_close(advantages_T, torch.tensor(want_advantages))
    torch.testing.assert_close(returns_T, torch.tensor(want_returns))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.95, 0.0)])
def test_advantages_and_returns_are_those_of_a_plain_loop(gamma: float, lam: float) -> None:
    batch = make_batch()
    penalty_T = -0.1 * batch.fields["kl"]
    for token_rewards_T in (None, penalty_T):
        rewards = [0.0] * batch.n_tokens if token_rewards_T is None else token_rewards_T.tolist()
        want_advantages, want_returns = plain(batch, gamma, lam, rewards)
        advantages_T, returns_T = GAE(gamma, lam).estimate(batch, token_rewards_T)
        torch.testing.assert_close(advantages_T, torch.tensor(want_advantages))
        torch.testing.assert_close(returns_T, torch.tensor(want_returns))


def test_without_discount_the_return_is_the_reward() -> None:
    batch = make_batch()
    _, returns_T = GAE(gamma=1.0, lam=1.0).estimate(batch)
    torch.testing.assert_close(returns_T, batch.fields["rewards"] * batch.mask_T)


def test_lambda_follows_the_length_and_returns_have_their_own() -> None:
    batch = make_batch()
    advantages_T, _ = GAE(0.9, 1.0, length_alpha=0.5).estimate(batch)
    for mask_L, own_L, index in zip(
        batch.split(batch.mask_T), batch.split(advantages_T), range(len(batch)), strict=True
    ):
        lam = max(0.0, 1 - 1 / (0.5 * max(1, int(mask_L.sum()))))
        torch.testing.assert_close(own_L, GAE(0.9, lam).estimate(batch.select([index]))[0])
    advantages_T, returns_T = GAE(0.9, 0.5, returns_lam=1.0).estimate(batch)
    torch.testing.assert_close(advantages_T, GAE(0.9, 0.5).estimate(batch)[0])
    torch.testing.assert_close(returns_T, GAE(0.9, 1.0).estimate(batch)[1])


def test_a_share_without_sequences_has_no_advantages() -> None:
    empty = make_batch().select([])
    assert [tensor.numel() for tensor in GAE(1.0, 1.0).estimate(empty)] == [0, 0]


def test_merged_moments_are_those_of_all_values() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1)) + 100
    merged = Moments.merged([Moments.of(part) for part in (values[:0], values[:7], values[7:600], values[600:])])
    assert merged.n == 1000
    assert merged.mean == pytest.approx(float(values.double().mean()), rel=1e-12)
    assert merged.std == pytest.approx(float(values.double().std()), rel=1e-9)


def test_whitened_advantages_have_mean_0_and_deviation_1() -> None:
    batch = make_batch()
    advantages_T, _ = GAE(1.0, 0.9).estimate(batch)
    batch = batch.with_fields(advantages=advantages_T)
    trained = batch.mask_T.bool()
    moments = Moments.of(advantages_T[trained])
    white_T = Whitening(moments.mean, moments.std).applied(batch).fields["advantages"]
    assert float(white_T[trained].mean()) == pytest.approx(0, abs=1e-6)
    assert float(white_T[trained].std()) == pytest.approx(1, rel=1e-6)
    assert not white_T[~trained].any()


def test_advantages_that_differ_by_rounding_alone_stay_small_when_they_are_whitened() -> None:
    advantages_T = torch.full((6,), 0.1)
    advantages_T[::2] += torch.finfo(torch.float32).eps / 8
    assert advantages_T.unique().numel() == 2
    batch = Batch((6,), torch.zeros(6, dtype=torch.int64), torch.ones(6), {"advantages": advantages_T})
    moments = Moments.of(advantages_T)
    white_T = Whitening(moments.mean, moments.std).applied(batch).fields["advantages"]
    assert float(white_T.abs().max()) < 1e-3


def test_the_critic_explains_all_variance_of_returns_that_it_foretells_and_none_if_it_is_constant() -> None:
    returns = torch.tensor([0.0, 1.0, 4.0, 2.0])

    def explained(errors: torch.Tensor, returns: torch.Tensor) -> float:
        return EstimateMoments(Moments.of(errors), Moments.of(returns), Moments.of(errors)).explained_variance

    assert explained(returns - returns, returns) == 1
    assert explained(returns - 3.0, returns) == pytest.approx(0)
    assert explained(2 * returns, returns) == pytest.approx(-3)
    assert explained(returns, torch.ones(4)) == 0


@pytest.mark.parametrize("gae", [GAE(0.9, 0.7), GAE(0.9, 0.7, returns_lam=1.0), GAE(0.9, 1.0, 1.0, length_alpha=0.05)])
def test_the_explained_variance_is_of_returns_and_values_whatever_lambda_they_have(gae: GAE) -> None:
    batch = make_batch()
    advantages_T, returns_T = gae.estimate(batch)
    batch = batch.with_fields(advantages=advantages_T, returns=returns_T)
    trained = batch.mask_T.bool()
    returns, values = returns_T[trained].double(), batch.fields["values"][trained].double()
    moments = EstimateMoments.merged([EstimateMoments.of(batch.select(own)) for own in ([0, 1], [], [2, 3])])
    assert moments.mean_value == pytest.approx(float(values.mean()))
    assert moments.explained_variance == pytest.approx(1 - float((returns - values).var() / returns.var()))
    assert moments.advantages.std == pytest.approx(float(advantages_T[trained].double().std()))
