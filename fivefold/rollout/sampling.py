"""From logits to sampled tokens and their log-probabilities.

Random choices are made by inverting the cumulative distribution at one uniform number for each (request, token). The
number comes from a counter-based generator, so it depends on the request's seed and the token's place alone: neither
on the batch that the request shares, nor on how many tokens its neighbours took.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from fivefold.rollout.protocol import SamplingParams

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_NUCLEUS_WIDTH = 256
_NUCLEUS_GROWTH = 4
_CDF_BLOCK = 512


def choose_tokens(
    logits_BV: Tensor, uniforms_B: Tensor, sampling: SamplingParams, forbidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The next token of each row (int64 [B]) and its log-probability (float32 [B]).

    Sampled tokens carry their log-probability under the distribution that they were drawn from: temperature, then
    top-k, then top-p, renormalised. A greedy choice is drawn from nothing; it carries log softmax(logits), as the model
    gave them.

    Args:
        logits_BV: any float dtype; the arithmetic is float32.
        uniforms_B: float64 in [0, 1), one for each row.
        forbidden: int64 token ids that must not be chosen; they are outside the sampling distribution.
    """
    logits_BV = logits_BV.float()
    allowed_BV = logits_BV if forbidden is None else logits_BV.index_fill(1, forbidden, -torch.inf)
    if sampling.greedy:
        ids_B1 = allowed_BV.argmax(dim=-1, keepdim=True)
        logprobs_B1 = logits_BV.log_softmax(dim=-1).gather(1, ids_B1)
        return ids_B1.squeeze(1), logprobs_B1.squeeze(1)
    scores_BK, ids_BK = _candidates(allowed_BV / sampling.temperature, sampling.top_k, sampling.top_p)
    logprobs_BK = scores_BK.log_softmax(dim=-1)
    choice_B1 = _invert_cdf(logprobs_BK, uniforms_B)
    ids_B1 = choice_B1 if ids_BK is None else ids_BK.gather(1, choice_B1)
    return ids_B1.squeeze(1), logprobs_BK.gather(1, choice_B1).squeeze(1)


def uniform_numbers(seeds: Sequence[int], n_tokens: int) -> Tensor:
    """float64 [len(seeds), n_tokens] in [0, 1): SplitMix64 (Steele et al. 2014), one stream for each seed."""
    seeds_B1 = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)[:, None]
    counters_T = np.arange(1, n_tokens + 1, dtype=np.uint64) * _GOLDEN_GAMMA
    bits_BT = _mix(_mix(seeds_B1 + _GOLDEN_GAMMA) + counters_T)
    return torch.from_numpy((bits_BT >> np.uint64(11)) * 2.0**-53)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _candidates(scores_BV: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor | None]:
    """Scores that are left (-inf where cut) and their token ids; ids None where columns are token ids."""
    ids_BK: Tensor | None = None
    if 0 < top_k < scores_BV.shape[1]:
        scores_BV, ids_BK = scores_BV.topk(top_k, dim=-1)
    if top_p == 1.0:
        return scores_BV, ids_BK
    nucleus_BN, columns_BN = _nucleus(scores_BV, top_p)
    return nucleus_BN, columns_BN if ids_BK is None else ids_BK.gather(1, columns_BN)


def _nucleus(scores_BK: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The smallest set of likeliest tokens whose mass reaches top_p (Holtzman et al. 2020), as scores and columns.

    A full sort of a large vocabulary costs more than the model's forward on a CPU, so the search begins among the
    likeliest few and widens until they hold the mass.
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
    """Column [B, 1] where the cumulative probability first exceeds the uniform number.

    First among the sums of blocks, then inside one block: a running sum over a whole vocabulary is slow on any device,
    and in float32 it is off by more than rare tokens weigh.
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
    """The first column whose running sum is above the threshold, which rounding must not lift to the sum itself.

    A column of probability 0 does not raise the sum, so it is never the first above.
    """
    below_B1 = torch.minimum(threshold_B1, cdf_BK[:, -1:] * (1 - 2.0**-50))
    return torch.searchsorted(cdf_BK, below_B1, right=True).clamp_(max=cdf_BK.shape[1] - 1)
