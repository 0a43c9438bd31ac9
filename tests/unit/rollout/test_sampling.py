"""Sampling: tokens are drawn from the distribution whose log-probs are reported."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.config.schema.rollout import GenerationConfig
from fivefold.rollout.protocol import SamplingParams
from fivefold.rollout.sampling import choose_tokens, uniform_numbers

N = 40_000


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams.from_config(GenerationConfig(**options))


def draw(
    logits_V: Tensor, params: SamplingParams, forbidden: Tensor | None = None, n: int = N
) -> tuple[Tensor, Tensor]:
    return choose_tokens(logits_V.expand(n, -1), uniform_numbers(range(n), 1)[:, 0], params, forbidden)


def filtered(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """The sampling distribution by its definition, one token at a time, in float64."""
    biased = logits_V.double()
    for token, bias in params.bias.items():
        biased[token] += bias
    probabilities = (biased / params.temperature).softmax(-1)
    order = probabilities.argsort(descending=True).tolist()
    order = [token for token in order if probabilities[token] >= params.min_p * probabilities.max()]
    if params.top_k:
        order = order[: params.top_k]
    mass = sum(float(probabilities[token]) for token in order)
    kept, reached = [], 0.0
    for token in order:
        if reached >= params.top_p:
            break
        kept.append(token)
        reached += float(probabilities[token]) / mass
    result = torch.zeros_like(probabilities)
    result[kept] = probabilities[kept]
    return result / result.sum()


@pytest.mark.parametrize(
    "params",
    [
        sampling(),
        sampling(temperature=2.0, top_k=5),
        sampling(top_p=0.8),
        sampling(temperature=1.5, top_k=7, top_p=0.6),
        sampling(top_p=1e-6),
        sampling(top_k=1),
        sampling(top_k=1000, top_p=0.999),
        sampling(min_p=0.2),
        sampling(min_p=0.1, top_k=4, temperature=2.0),
        sampling(logit_bias={"3": 2.0, "5": -1.0}, bad_token_ids=[0, 7]),
        sampling(logit_bias={"1": 4.0}, min_p=0.05, top_p=0.9),
    ],
)
def test_frequencies_and_logprobs_follow_the_definition(params: SamplingParams) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 1.5
    expected = filtered(logits, params)
    tokens, logprobs = draw(logits, params)
    torch.testing.assert_close(logprobs, expected.log().float()[tokens], rtol=0, atol=1e-5)
    counts = torch.bincount(tokens, minlength=12).double()
    assert set(counts.nonzero().squeeze(1).tolist()) <= set(expected.nonzero().squeeze(1).tolist())
    kept = expected > 0
    chi_square = float(((counts - N * expected)[kept] ** 2 / (N * expected[kept])).sum())
    degrees = int(kept.sum()) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees) + 1e-9, "4 sigma above the mean of chi-square"


@pytest.mark.parametrize("top_p", [0.3, 0.999])
def test_a_nucleus_wider_than_the_first_search(top_p: float) -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(2)) * 0.1
    params = sampling(top_p=top_p)
    expected = filtered(logits, params)
    tokens, logprobs = draw(logits, params, n=200)
    assert bool((expected[tokens] > 0).all())
    torch.testing.assert_close(logprobs, expected.log().float()[tokens], rtol=0, atol=1e-3)


def test_blocks_of_a_large_vocabulary_give_the_token_of_one_running_sum() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(64, 3001, generator=generator) * 3
    logits[:, 700:1400] = -torch.inf
    uniforms = uniform_numbers(range(64), 1)[:, 0]
    cdf = logits.double().softmax(-1).cumsum(-1)
    expected = (cdf <= uniforms[:, None]).sum(-1)
    tokens, logprobs = choose_tokens(logits, uniforms, sampling(), None)
    assert torch.equal(tokens, expected)
    assert bool(logprobs.isfinite().all())


def test_forbidden_tokens_are_outside_the_distribution() -> None:
    logits = torch.tensor([5.0, 1.0, 0.0, 0.5])
    tokens, logprobs = draw(logits, sampling(), forbidden=torch.tensor([0, 3]))
    assert set(tokens.tolist()) == {1, 2}
    expected = logits[[1, 2]].log_softmax(-1)
    torch.testing.assert_close(logprobs, expected[tokens - 1])


def test_greedy_tokens_have_the_log_probs_of_the_unmodified_logits() -> None:
    logits = torch.tensor([[5.0, 1.0, 0.0], [0.0, 2.0, 3.0]])
    params = sampling(greedy=True, temperature=0.1)
    tokens, logprobs = choose_tokens(logits, torch.zeros(2), params, forbidden=torch.tensor([0]))
    assert tokens.tolist() == [1, 2]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1], [1, 2]])


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_unit_interval_choose_possible_tokens(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.1, 0.2, -torch.inf, 0.3, -torch.inf]])
    token, logprob = choose_tokens(logits, torch.tensor([uniform], dtype=torch.float64), sampling(), None)
    assert token.item() == (1 if uniform == 0.0 else 4)
    assert math.isfinite(logprob.item())


def test_uniform_numbers_are_splitmix64() -> None:
    """Against the generator's published outputs for the seed that our seed mixes to."""
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF, "SplitMix64's first output for seed 0"
    for seed in (0, 1, 2**64 - 1):
        state = mix((seed + 0x9E3779B97F4A7C15) & mask)
        expected = [(mix((state + i * 0x9E3779B97F4A7C15) & mask) >> 11) * 2.0**-53 for i in range(1, 6)]
        assert uniform_numbers([seed], 5)[0].tolist() == expected


def test_uniform_numbers_are_even_and_uncorrelated() -> None:
    numbers = uniform_numbers(range(2000), 50)
    assert torch.equal(numbers[7:9, :20], uniform_numbers([7, 8], 20))
    counts = torch.histc(numbers, bins=100, min=0.0, max=1.0)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 99 + 4 * math.sqrt(2 * 99)
    correlation = torch.corrcoef(
        torch.stack([numbers[:-1].flatten(), numbers[1:].flatten(), numbers[1:].roll(1, 1).flatten()])
    )
    assert float((correlation - torch.eye(3)).abs().max()) < 0.02
