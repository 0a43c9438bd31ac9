"""Attention on packed sequences, and on their context-parallel shares, equals a masked softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from ragged import LENGTHS, uneven_batch
from worker_pool import Workers

from fivefold.batch import Batch
from fivefold.config.schema.engine import FlashAttention
from fivefold.engine.kernels.flash import FlashPlan
from fivefold.engine.kernels.varlen import plan_attention, varlen_attention
from fivefold.engine.packing import padded_tokens
from fivefold.engine.sequences import LocalSequences, localize, packed_attention

CPU = torch.device("cpu")
HEAD_DIM = 6
ENTRIES = {
    "one sequence": [(9, 9)],
    "one token": [(1, 1)],
    "sequences of very different lengths": [(3, 3), (40, 40), (1, 1), (17, 17), (16, 16), (2, 2)],
    "chunks that see more keys than they have queries": [(4, 12), (1, 3), (8, 8), (5, 30), (2, 2), (7, 9)],
    "equal lengths among unequal ones": [(6, 6), (6, 7), (6, 6), (4, 7)],
}


def by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed_TK: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute softmax(q k / sqrt(d)) v over the allowed keys, head by head; query heads in a row share a key head.

    A sink is one more score, whose weight is dropped.
    """
    sharing = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores_TK = query[:, head] @ key[:, head // sharing].T / math.sqrt(query.shape[-1])
        scores_TK = scores_TK.masked_fill(~allowed_TK, -torch.inf)
        if sinks is not None:
            scores_TK = torch.cat((scores_TK, sinks[head].expand(len(scores_TK), 1)), dim=1)
        weights_TK = scores_TK.softmax(-1)[:, : len(key)]
        heads.append(weights_TK @ value[:, head // sharing])
    return torch.stack(heads, dim=1)


def allowed_pairs(entries: list[tuple[int, int]], window: int | None = None) -> torch.Tensor:
    """Return bool [queries, keys]: query i of n sees keys 0 .. n_keys - n + i of its own entry, the last of them."""
    allowed = torch.zeros(sum(q for q, _ in entries), sum(k for _, k in entries), dtype=torch.bool)
    row, column = 0, 0
    for n_queries, n_keys in entries:
        for i in range(n_queries):
            end = n_keys - n_queries + i + 1
            begin = 0 if window is None else max(0, end - window)
            allowed[row + i, column + begin : column + end] = True
        row, column = row + n_queries, column + n_keys
    return allowed


def random_qkv(n_queries: int, n_keys: int, n_kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n_queries)
    shapes = [(n_queries, 4, HEAD_DIM), (n_keys, n_kv_heads, HEAD_DIM), (n_keys, n_kv_heads, HEAD_DIM)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 16])
@pytest.mark.parametrize("name", ENTRIES)
def test_packed_attention_is_a_masked_softmax(name: str, window: int | None, has_sinks: bool, n_kv_heads: int) -> None:
    entries = ENTRIES[name]
    inputs = random_qkv(sum(q for q, _ in entries), sum(k for _, k in entries), n_kv_heads)
    qkv, sinks = tuple(inputs), None
    if has_sinks:
        sinks = torch.tensor([-1.0, 0.5, 2.0, 30.0], dtype=torch.float64).requires_grad_()
        inputs.append(sinks)
    plan = plan_attention(entries, flash=None, device=CPU)
    output = varlen_attention(*qkv, plan, window=window, sinks=sinks)
    wanted = by_hand(*qkv, allowed_pairs(entries, window), sinks)
    torch.testing.assert_close(output, wanted)
    upstream = torch.randn_like(wanted)
    for mine, theirs in zip(
        torch.autograd.grad(output, inputs, upstream), torch.autograd.grad(wanted, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    _max_queries: int,
    _max_keys: int,
    *_dropout_and_mask: object,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[torch.Tensor, ...]:
    """What PyTorch's operator returns: the output, and the log-sum-exp of each head's scores [heads, queries]."""
    scores_HTK = flash_scores(query, key, cu_queries, cu_keys, scale, window_size_left)
    assert window_size_right == 0
    output = torch.einsum("htk,khd->thd", scores_HTK.softmax(-1), shared(value, query))
    return output, scores_HTK.logsumexp(-1), torch.zeros(2)


def flash_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse_HT: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    *_unused: object,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[torch.Tensor, ...]:
    """FlashAttention 2, algorithm 2: weights again from the log-sum-exp, and D = sum of do o over a head's channels."""
    weights_HTK = (flash_scores(query, key, cu_queries, cu_keys, scale, window_size_left) - lse_HT[:, :, None]).exp()
    grad_weights_HTK = torch.einsum("thd,khd->htk", grad, shared(value, query))
    grad_scores_HTK = weights_HTK * (grad_weights_HTK - (grad * output).sum(-1).t()[:, :, None])
    n_groups = key.shape[1]
    grad_query = torch.einsum("htk,khd->thd", grad_scores_HTK, shared(key, query)) * scale
    grad_key = torch.einsum("htk,thd->khd", grad_scores_HTK, query) * scale
    grad_value = torch.einsum("htk,thd->khd", weights_HTK, grad)
    return grad_query, *(each.unflatten(1, (n_groups, -1)).sum(2) for each in (grad_key, grad_value))


def shared(key: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return key.repeat_interleave(query.shape[1] // key.shape[1], 1)


def flash_scores(
    query: torch.Tensor, key: torch.Tensor, cu_queries: torch.Tensor, cu_keys: torch.Tensor, scale: float, left: int
) -> torch.Tensor:
    entries = list(zip(cu_queries.diff().tolist(), cu_keys.diff().tolist(), strict=True))
    allowed_TK = allowed_pairs(entries, None if left < 0 else left + 1)
    scores_HTK = torch.einsum("thd,khd->htk", query, shared(key, query)) * scale
    return scores_HTK.masked_fill(~allowed_TK, -torch.inf)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", ENTRIES)
def test_sinks_need_no_more_than_the_operators_of_flash_attention(
    name: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    entries = ENTRIES[name]
    query, key, value = random_qkv(sum(q for q, _ in entries), sum(k for _, k in entries), 2)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 8.0], dtype=torch.float64).requires_grad_()
    plan = plan_attention(entries, flash="flash_attention_2", device=CPU)
    output = varlen_attention(query, key, value, plan, window=window, sinks=sinks)
    wanted = by_hand(query, key, value, allowed_pairs(entries, window), sinks)
    torch.testing.assert_close(output, wanted)
    upstream, inputs = torch.randn_like(wanted), (query, key, value, sinks)
    for mine, theirs in zip(
        torch.autograd.grad(output, inputs, upstream), torch.autograd.grad(wanted, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)  # some sums are float32


def flash_pairs(plan: FlashPlan) -> torch.Tensor:
    """Return the pairs that flash attention's documented mask allows: causal, aligned to each entry's bottom right."""
    queries, keys = plan.cu_queries.tolist(), plan.cu_keys.tolist()
    allowed = torch.zeros(queries[-1], keys[-1], dtype=torch.bool)
    for entry in range(len(queries) - 1):
        n_queries, n_keys = queries[entry + 1] - queries[entry], keys[entry + 1] - keys[entry]
        assert n_queries <= plan.max_queries
        assert n_keys <= plan.max_keys
        triangle = torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)
        allowed[queries[entry] : queries[entry + 1], keys[entry] : keys[entry + 1]] = triangle
    return allowed


@pytest.mark.parametrize("name", ENTRIES)
def test_the_flash_plan_masks_the_same_pairs(name: str) -> None:
    plan = plan_attention(ENTRIES[name], flash="flash_attention_2", device=CPU)
    assert isinstance(plan, FlashPlan)
    assert plan.cu_queries.dtype == plan.cu_keys.dtype == torch.int32
    assert plan.max_queries == max(q for q, _ in ENTRIES[name])
    assert plan.max_keys == max(k for _, k in ENTRIES[name])
    assert flash_pairs(plan).equal(allowed_pairs(ENTRIES[name]))


def shares(cp_size: int, *, flash: FlashAttention | None = None) -> list[LocalSequences]:
    batch = uneven_batch()
    total = padded_tokens(batch.lengths, cp_size=cp_size, tp_size=2)
    return [
        localize(batch, cp_rank=rank, cp_size=cp_size, total=total, flash=flash, device=CPU) for rank in range(cp_size)
    ]


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_the_shares_hold_every_token_once_at_its_position(cp_size: int) -> None:
    batch = uneven_batch()
    wanted = sorted(
        (position, int(token)) for tokens in batch.split(batch.tokens_T) for position, token in enumerate(tokens)
    )
    found = []
    for share in shares(cp_size):
        real = ~share.padding_T
        found += list(zip(share.positions_T[real].tolist(), share.tokens_T[real].tolist(), strict=True))
        assert share.tokens_T.numel() == padded_tokens(batch.lengths, cp_size=cp_size, tp_size=2) // cp_size
        assert not share.tokens_T[share.padding_T].any(), "filler is token 0"
    assert sorted(found) == wanted


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_the_shares_predict_every_trained_token_once_from_the_token_before_it(cp_size: int) -> None:
    batch = uneven_batch()
    places = torch.cat([share.places_N for share in shares(cp_size)])
    assert sorted(places.tolist()) == batch.mask_T.nonzero().flatten().tolist()
    for share in shares(cp_size):
        assert share.targets_N.equal(batch.tokens_T[share.places_N])
        assert share.tokens_T[share.rows_N].equal(batch.tokens_T[share.places_N - 1])
        positions = torch.cat([torch.arange(length) for length in batch.lengths])
        assert share.positions_T[share.rows_N].equal(positions[share.places_N] - 1)


@pytest.mark.parametrize("cp_size", [2, 4])
def test_causal_attention_costs_every_rank_the_same(cp_size: int) -> None:
    costs = set()
    for share in shares(cp_size, flash="flash_attention_2"):
        assert isinstance(share.attention.plan, FlashPlan)
        costs.add(int(flash_pairs(share.attention.plan).sum()))
    assert len(costs) == 1


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(), (1,), (5,), LENGTHS])
def test_every_rank_can_split_the_padded_length(lengths: tuple[int, ...], cp_size: int, tp_size: int) -> None:
    total = padded_tokens(lengths, cp_size=cp_size, tp_size=tp_size)
    chunks = 2 * cp_size if cp_size > 1 else 1
    assert total > 0
    assert total % (cp_size * tp_size) == 0
    assert total % chunks == 0
    assert total >= sum(-(-length // chunks) * chunks for length in lengths)


@dataclass(frozen=True)
class LocalAttention:
    sequence_T: torch.Tensor
    """Number of the sequence of each local token, -1 for filler."""
    positions_T: torch.Tensor
    output_THD: torch.Tensor
    gradients: list[torch.Tensor]
    """Gradients of the local queries, keys and values."""


def attend_in_shares(lengths: tuple[int, ...], n_kv_heads: int, window: int | None) -> LocalAttention:
    """In a worker: compute context-parallel attention of this rank's share of sequences with known q, k, v."""
    group = dist.group.WORLD
    # A token's id is the number of its sequence, from 1; filler is 0.
    numbers = torch.arange(1, len(lengths) + 1).repeat_interleave(torch.tensor(lengths))
    batch = Batch(lengths, numbers, torch.ones(numbers.numel()))
    total = padded_tokens(lengths, cp_size=group.size(), tp_size=1)
    share = localize(batch, cp_rank=group.rank(), cp_size=group.size(), total=total, flash=None, device=CPU)
    tensors = whole_qkv(lengths, n_kv_heads)
    upstream = whole_upstream(lengths)
    start_of = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.where(share.padding_T, 0, start_of[(share.tokens_T - 1).clamp(min=0)] + share.positions_T)
    local = [tensor[rows].detach().requires_grad_() for tensor in tensors]
    output = packed_attention(*local, share.attention, group, window=window)
    gradient = torch.where(share.padding_T[:, None, None], 0.0, upstream[rows])
    output.backward(gradient)
    sequence = torch.where(share.padding_T, -1, share.tokens_T - 1)
    return LocalAttention(sequence, share.positions_T, output.detach(), [tensor.grad for tensor in local])


def whole_qkv(lengths: tuple[int, ...], n_kv_heads: int) -> list[torch.Tensor]:
    return random_qkv(sum(lengths), sum(lengths), n_kv_heads)


def whole_upstream(lengths: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(lengths), 4, HEAD_DIM, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("n_kv_heads", [1, 4])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("lengths", [(16,), (1, 1), LENGTHS], ids=str)
@pytest.mark.parametrize("cp_size", [2, 4])
def test_attention_in_shares_is_attention_over_whole_sequences(
    workers: Workers, cp_size: int, lengths: tuple[int, ...], window: int | None, n_kv_heads: int
) -> None:
    qkv, upstream = whole_qkv(lengths, n_kv_heads), whole_upstream(lengths)
    wanted = by_hand(*qkv, allowed_pairs([(length, length) for length in lengths], window))
    wanted_gradients = torch.autograd.grad(wanted, qkv, upstream)
    start_of = torch.tensor([0, *lengths]).cumsum(0)
    n_seen = 0
    for local in workers(cp_size).run(attend_in_shares, lengths, n_kv_heads, window):
        real = local.sequence_T >= 0
        rows = start_of[local.sequence_T[real]] + local.positions_T[real]
        n_seen += rows.numel()
        torch.testing.assert_close(local.output_THD[real], wanted[rows])
        for mine, theirs in zip(local.gradients, wanted_gradients, strict=True):
            torch.testing.assert_close(mine[real], theirs[rows])
            assert not mine[~real].any(), "filler took part"
    assert n_seen == sum(lengths)
