"""Samples tokens from logits, with their log-probabilities.

A token is chosen by inverting the cumulative distribution at a uniform number, one for each (request, token). The
number comes from a counter-based generator: it depends on the request's seed and the token's index alone, and not on
the other requests in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from fivefold.rollout.protocol import SamplingParams

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""SplitMix64's increment: 2^64 divided by the golden ratio."""
_NUCLEUS_WIDTH = 256
"""Number of likeliest tokens among which top-p is searched first."""
_NUCLEUS_GROWTH = 4
"""Factor by which the search widens where these do not hold the mass."""
_CDF_BLOCK = 512
"""Columns of one block, whose probabilities are summed before the blocks are."""


def choose_tokens(
    logits_BV: Tensor,
    uniforms_B: Tensor,
    sampling: SamplingParams,
    forbidden: Tensor | None,
    seen_BV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the next token of each row (int64 [B]) and its log-probability (float32 [B]).

    The log-probability of a sampled token belongs to the distribution from which it is drawn: bias, repetition penalty,
    temperature, then min-p, top-k and top-p, renormalised. The log-probability of a greedy choice is log
    softmax(logits), without a bias, a penalty or a temperature.

    Args:
        logits_BV: logits of any float dtype; the arithmetic is float32.
        uniforms_B: float64 in [0, 1), one for each row.
        sampling: how tokens are chosen.
        forbidden: int64 token ids that must not be chosen; they are outside the sampling distribution. None: no ids.
        seen_BV: bool, whether prompt or completion have a token already, for `repetition_penalty`. None: no penalty.
    """
    logits_BV = logits_BV.float()
    allowed_BV = logits_BV if forbidden is None else logits_BV.index_fill(1, forbidden, -torch.inf)
    if bias := sampling.bias:
        ids = torch.tensor(list(bias), device=logits_BV.device)
        allowed_BV = allowed_BV.index_add(
            1, ids, torch.tensor(list(bias.values()), device=ids.device).expand(len(allowed_BV), -1)
        )
    if seen_BV is not None:
        allowed_BV = torch.where(seen_BV, _penalized(allowed_BV, sampling.repetition_penalty), allowed_BV)
    if sampling.greedy:
        ids_B1 = allowed_BV.argmax(dim=-1, keepdim=True)
        logprobs_B1 = logits_BV.log_softmax(dim=-1).gather(1, ids_B1)
        return ids_B1.squeeze(1), logprobs_B1.squeeze(1)
    scores_BV = allowed_BV / sampling.temperature
    if sampling.min_p > 0:
        least_B1 = scores_BV.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        scores_BV = scores_BV.masked_fill(scores_BV < least_B1, -torch.inf)
    scores_BK, ids_BK = _candidates(scores_BV, sampling.top_k, sampling.top_p)
    logprobs_BK = scores_BK.log_softmax(dim=-1)
    choice_B1 = _invert_cdf(logprobs_BK, uniforms_B)
    ids_B1 = choice_B1 if ids_BK is None else ids_BK.gather(1, choice_B1)
    return ids_B1.squeeze(1), logprobs_BK.gather(1, choice_B1).squeeze(1)


def _penalized(logits_BV: Tensor, penalty: float) -> Tensor:
    return torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)


def uniform_numbers(seeds: Sequence[int], n_tokens: int) -> Tensor:
    """Return float64 [len(seeds), n_tokens] in [0, 1) by SplitMix64 (Steele et al. 2014), one stream for each seed."""
    seeds_B1 = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)[:, None]
    counters_T = np.arange(1, n_tokens + 1, dtype=np.uint64) * _GOLDEN_GAMMA
    bits_BT = _mix(_mix(seeds_B1 + _GOLDEN_GAMMA) + counters_T)
    return torch.from_numpy((bits_BT >> np.uint64(11)) * 2.0**-53)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _candidates(scores_BV: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor | None]:
    """Return the scores after the cuts (-inf: cut) and their token ids; the ids are None if columns are token ids."""
    ids_BK: Tensor | None = None
    if 0 < top_k < scores_BV.shape[1]:
        scores_BV, ids_BK = scores_BV.topk(top_k, dim=-1)
    if top_p == 1.0:
        return scores_BV, ids_BK
    nucleus_BN, columns_BN = _nucleus(scores_BV, top_p)
    return nucleus_BN, columns_BN if ids_BK is None else ids_BK.gather(1, columns_BN)


def _nucleus(scores_BK: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the scores and columns of the fewest tokens whose mass reaches top_p (Holtzman et al. 2020).

    On a CPU, a full sort of a large vocabulary costs more than the model's forward. So the search begins among the
    likeliest tokens, and widens until they hold the mass.
    """
    n_columns = scores_BK.shape[1]
    total_B1 = scores_BK.logsumexp(dim=-1, keepdim=True)
    width = min(_NUCLEUS_WIDTH, n_columns)
    while True:
        top_BN, columns_BN = scores_BK.topk(width, dim=-1)
        mass_BN = (top_BN - total_B1).exp()
        reached_BN = mass_BN.cumsum(dim=-1)
        if width == n_columns or bool((reached_BN[:, -1] >= top_p).all()):
            return top_BN.masked_fill(reached_BN - mass_BN >= top_p, -torch.inf), columns_BN
        width = min(width * _NUCLEUS_GROWTH, n_columns)


def _invert_cdf(logprobs_BK: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return the column [B, 1] at which the cumulative probability first exceeds the uniform number.

    The search goes over the sums of blocks first, and then inside one block. A running sum over a whole vocabulary is
    slow on any device, and in float32 its error is larger than the probability of rare tokens.
    """
    n_rows, n_columns = logprobs_BK.shape
    width = min(_CDF_BLOCK, n_columns)
    blocks_BNW = pad(logprobs_BK.exp(), (0, -n_columns % width)).view(n_rows, -1, width)
    masses_BN = blocks_BNW.sum(dim=-1).double()
    reached_BN = masses_BN.cumsum(dim=-1)
    threshold_B1 = uniforms_B[:, None] * reached_BN[:, -1:]
    block_B1 = _first_above(reached_BN, threshold_B1)
    before_B1 = (reached_BN - masses_BN).gather(1, block_B1)
    block_BW = blocks_BNW[torch.arange(n_rows, device=block_B1.device), block_B1.squeeze(1)]
    column_B1 = _first_above(block_BW.double().cumsum(dim=-1), threshold_B1 - before_B1)
    return block_B1 * width + column_B1


def _first_above(cdf_BK: Tensor, threshold_B1: Tensor) -> Tensor:
    """Return the first column whose running sum is above the threshold.

    A column of probability 0 does not raise the sum, so it is never chosen.
    """
    # Rounding may lift the threshold to the total itself, which no column exceeds.
    below_B1 = torch.minimum(threshold_B1, cdf_BK[:, -1:] * (1 - 2.0**-50))
    return torch.searchsorted(cdf_BK, below_B1, right=True).clamp_(max=cdf_BK.shape[1] - 1)
