"""The gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464) on packed sequences, in plain PyTorch.

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T          o_t = S_t^T q_t

It is computed by chunks (section 3.3 of the paper). Within a chunk that begins with state S, and with G the sum of the
decays up to each token, the values that are written are V' = U - W S, where U and W solve a triangular system; then

    o = exp(G) q S + (q k^T * exp(G_i - G_j)) V'          S <- exp(G_C) S + (exp(G_C - G) k)^T V'

Chunks do not cross the boundaries of sequences, where states begin at 0. The n-th chunks of all sequences are one step:

    aaaaaaaaa bbbb   ─chunks of 4─>   step 0: aaaa bbbb   step 1: aaaa   step 2: a...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fivefold.families.delta_net import CHUNK

_NORM_EPS = 1e-6
"""What is added to the square of the length of queries and keys."""


@dataclass(frozen=True)
class ChunkPlan:
    """Packed sequences of T tokens as M chunks of C tokens, in the order of steps, the longest sequences first."""

    rows_MC: torch.Tensor
    """int64: index of each token; T is padding."""
    per_step: tuple[int, ...]
    """Chunks of each step, one of each of the first sequences."""
    places_T: torch.Tensor
    """int64: place of each token among the M * C."""


@lru_cache(maxsize=64)
def plan_chunks(spans: tuple[int, ...], device: torch.device) -> ChunkPlan:
    """Return the chunks of sequences of `spans` tokens, which are laid end to end; one plan serves all layers."""
    n_tokens = sum(spans)
    starts = torch.tensor(spans).cumsum(0) - torch.tensor(spans)
    longest_first = sorted(range(len(spans)), key=lambda index: -spans[index])
    rows, per_step = [], []
    for begin in range(0, max(spans), CHUNK):
        members = [index for index in longest_first if spans[index] > begin]
        offsets_1C = torch.arange(begin, begin + CHUNK)[None]
        is_token = offsets_1C < torch.tensor([spans[index] for index in members])[:, None]
        rows.append(torch.where(is_token, starts[members][:, None] + offsets_1C, n_tokens))
        per_step.append(len(members))
    rows_MC = torch.cat(rows)
    places = torch.empty(n_tokens + 1, dtype=torch.int64)
    places[rows_MC.flatten()] = torch.arange(rows_MC.numel())
    return ChunkPlan(rows_MC.to(device), tuple(per_step), places[:-1].to(device))


@lru_cache(maxsize=64)
def _plan_convolution(spans: tuple[int, ...], kernel: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's index, with kernel - 1 paddings (index T) before each sequence, and each token's place."""
    n_tokens, rows, start = sum(spans), [], 0
    for span in spans:
        rows += [torch.full((kernel - 1,), n_tokens), torch.arange(start, start + span)]
        start += span
    rows_P = torch.cat(rows)
    return rows_P.to(device), ((rows_P < n_tokens).nonzero().flatten() - (kernel - 1)).to(device)


def packed_convolution(x_TC: torch.Tensor, weight_C1K: torch.Tensor, spans: Sequence[int]) -> torch.Tensor:
    """Convolve each channel over the last K tokens of its sequence. Zeros precede the first token."""
    rows_P, places_T = _plan_convolution(tuple(spans), weight_C1K.shape[-1], x_TC.device)
    padded_CP = F.pad(x_TC, (0, 0, 0, 1))[rows_P].t()
    convolved = F.conv1d(padded_CP[None], weight_C1K, groups=len(weight_C1K))[0].t()
    return convolved[places_T]


def gated_delta_rule(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,
    value_TVE: torch.Tensor,
    decay_TV: torch.Tensor,
    beta_TV: torch.Tensor,
    spans: Sequence[int],
) -> torch.Tensor:
    """Return the outputs [T, V, E] of V value heads. V / H of them share a head of queries and keys.

    Args:
        query_THD: queries, which are scaled to length 1 / sqrt(D).
        key_THD: keys, which are scaled to length 1.
        value_TVE: values.
        decay_TV: float32, logarithms of the factors of the state, at most 0.
        beta_TV: how much of a value is written, from 0 to 1.
        spans: tokens of each sequence.
    """
    plan = plan_chunks(tuple(spans), query_THD.device)
    per_head = value_TVE.shape[1] // key_THD.shape[1]

    def compute(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay_TV: torch.Tensor, beta_TV: torch.Tensor
    ) -> torch.Tensor:
        query, key = (_chunks(_unit(heads.float()).repeat_interleave(per_head, dim=1), plan) for heads in (query, key))
        value, beta, decay = (_chunks(each.float(), plan) for each in (value, beta_TV[..., None], decay_TV[..., None]))
        query, sums = query * query.shape[-1] ** -0.5, _running_sums(decay.squeeze(-1))
        output_MVCE = _by_steps(query, key, value, beta, sums, plan)
        return output_MVCE.transpose(1, 2).flatten(0, 1)[plan.places_T].to(value_TVE.dtype)

    # The chunks of a layer take ten times the memory of its inputs, so that the backward pass computes them again.
    output: torch.Tensor = checkpoint(
        compute, query_THD, key_THD, value_TVE, decay_TV, beta_TV, use_reentrant=False, preserve_rng_state=False
    )
    return output


def _running_sums(decay_MVC: torch.Tensor) -> torch.Tensor:
    """Return the sums up to each token of a chunk, without torch.cumsum: deterministic mode refuses it on GPUs."""
    return decay_MVC @ torch.ones(CHUNK, CHUNK, device=decay_MVC.device).triu()


def _unit(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _NORM_EPS)


def _chunks(x_TVD: torch.Tensor, plan: ChunkPlan) -> torch.Tensor:
    """Return [M, V, C, D], 0 on padding: it changes no state."""
    return F.pad(x_TVD, (0, 0, 0, 0, 0, 1))[plan.rows_MC].transpose(1, 2)


def _by_steps(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    sums_MVC: torch.Tensor,
    plan: ChunkPlan,
) -> torch.Tensor:
    """Return the outputs [M, V, C, E] of chunks; `sums_MVC` are the sums of the decays up to each token of a chunk."""
    is_future_CC = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    # Masked before the exponential: the sums fall, so that a future token's would overflow.
    between = (sums_MVC[..., :, None] - sums_MVC[..., None, :]).masked_fill(is_future_CC, -torch.inf).exp()
    factor, rest = sums_MVC.exp()[..., None], (sums_MVC[..., -1:] - sums_MVC).exp()[..., None]
    system = (beta * key) @ key.transpose(-1, -2) * between
    right = torch.cat((beta * value, beta * factor * key), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, of_state = solved.split((value.shape[-1], key.shape[-1]), dim=-1)
    within = query @ key.transpose(-1, -2) * between
    steps = [each.split(plan.per_step) for each in (written, of_state, within, query * factor, (rest * key).mT, factor)]
    state = key.new_zeros(plan.per_step[0], key.shape[1], key.shape[-1], value.shape[-1])
    outputs = []
    for new, of_old, inside, reader, writer, decayed in zip(*steps, strict=True):
        state = state[: len(new)]
        new = new - of_old @ state
        outputs.append(reader @ state + inside @ new)
        state = decayed[:, :, -1:] * state + writer @ new
    return torch.cat(outputs)
