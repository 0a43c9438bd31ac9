"""The shares that are assembled from a batch by reference equal those of the same batch in one place."""

from __future__ import annotations

import pickle
import random
from itertools import groupby

import numpy as np
import pytest
import torch

from fivefold.batch import Batch, Columns
from fivefold.config.schema.engine import MicroBatchConfig
from fivefold.engine.packing import BatchPlanner, Share
from fivefold.layout.parser import parse_backend
from fivefold.roles.remote_batch import Piece, RemoteBatch, Spans, assemble
from fivefold.types import UNKNOWN_EXPERT, PlacedImage

N = 23


def whole_batch(seed: int) -> Batch:
    random.seed(seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = tuple(random.randint(2, 30) for _ in range(N))
    total = sum(lengths)
    masks = [torch.arange(length) >= random.randint(1, length) for length in lengths]
    return Batch(
        lengths,
        torch.randint(0, 1000, (total,), generator=generator),
        torch.cat(masks).float(),
        {
            "rollout_logprobs": torch.randn(total, generator=generator),
            "routes": torch.randint(0, 8, (total, 2, 2), generator=generator, dtype=torch.int16),
            "old_logprobs": torch.randn(total, generator=generator),
            "turn": torch.randint(0, 3, (total,), generator=generator, dtype=torch.int32),
            "advantages": torch.cat([torch.full((length,), float(i)) for i, length in enumerate(lengths)]),
        },
    )


def columns(batch: Batch, indices: list[int], names: list[str]) -> Columns:
    own = batch.select(indices)
    values = {"tokens": own.tokens_T.int(), "mask": own.mask_T.bool(), **own.fields}
    return Columns(np.array(own.lengths, np.int32), {name: values[name].numpy() for name in names})


def remote(batch: Batch) -> RemoteBatch:
    """Return `batch` by reference: tokens in one piece per rollout replica, log-probs in other pieces, shuffled."""
    orders = [list(range(0, 9)), list(range(9, N)), random.sample(range(N), 11)]
    orders.append([i for i in range(N) if i not in orders[2]])
    names = [["tokens", "mask", "rollout_logprobs", "routes"]] * 2 + [["old_logprobs"]] * 2
    pieces = [
        # The columns themselves take the place of references to them, because nothing here dereferences any.
        Piece(columns(batch, order, wanted), np.array(order))
        for order, wanted in zip(orders, names, strict=True)
    ]
    trained = np.array([int(mask.sum()) for mask in batch.split(batch.mask_T)])
    turns = Spans(tuple(spans_of(turn_L.tolist()) for turn_L in batch.split(batch.fields["turn"])), np.int32)
    return (
        RemoteBatch(np.array(batch.lengths), trained, tuple(pieces))
        .with_scalars(advantages=np.arange(N, dtype=np.float32))
        .with_spans(turn=turns)
    )


def spans_of(values: list[int]) -> list[tuple[int, int, float]]:
    """Return (start, length, value) of each run of equal values other than 0."""
    runs, start = [], 0
    for value, run in groupby(values):
        n = len(list(run))
        if value:
            runs.append((start, n, float(value)))
        start += n
    return runs


def same(got: Share, want: Share) -> bool:
    assert (got.micro_batches, got.longest, got.totals) == (want.micro_batches, want.longest, want.totals)
    assert got.batch.lengths == want.batch.lengths
    assert got.batch.tokens_T.equal(want.batch.tokens_T)
    assert got.batch.mask_T.equal(want.batch.mask_T)
    assert got.batch.fields.keys() == want.batch.fields.keys()
    return all(got.batch.fields[name].equal(value) for name, value in want.batch.fields.items())


@pytest.mark.parametrize("layout", ["megatron:d1", "megatron:d3", "megatron:d2c2t2"])
@pytest.mark.parametrize("chosen", [list(range(N)), [20, 3, 11, 12, 0], [7]])
def test_shares_of_a_remote_batch_are_those_of_the_batch(layout: str, chosen: list[int]) -> None:
    batch = whole_batch(seed=len(chosen))
    by_reference, mini_batch = remote(batch).select(chosen), batch.select(chosen)
    planner = BatchPlanner.of(MicroBatchConfig(max_tokens_per_mb=64), parse_backend(layout), quadratic_at=100.0)
    plan = planner.plan(by_reference.lengths_N.tolist())
    seen: list[int] = []
    for replica, (order, pieces) in enumerate(by_reference.orders(plan)):
        assert same(assemble(pickle.loads(pickle.dumps(order)), pieces), plan.share(mini_batch, replica))
        seen += plan.sequences(replica)
    assert sorted(seen) == list(range(len(chosen)))
    assert by_reference.totals() == mini_batch.totals()


def test_each_sequence_keeps_its_images() -> None:
    batch = whole_batch(seed=8)
    images = tuple(
        tuple(PlacedImage(np.zeros((4, 2), np.float32), 10 * row + each, each, 1, 1) for each in range(row % 3))
        for row in range(N)
    )
    values = {"tokens": batch.tokens_T.int().numpy(), "mask": batch.mask_T.bool().numpy()}
    lengths_N, order = np.array(batch.lengths, np.int32), np.arange(N)
    scores = Columns(lengths_N, {"old_logprobs": batch.fields["old_logprobs"].numpy()})
    pieces = (Piece(Columns(lengths_N, values, images=images), order), Piece(scores, order))
    trained = np.array([int(mask.sum()) for mask in batch.split(batch.mask_T)])
    chosen = [4, 2, 0, 11, 3]
    mine = RemoteBatch(lengths_N.astype(np.int64), trained, pieces).select(chosen)
    planner = BatchPlanner.of(MicroBatchConfig(max_tokens_per_mb=40), parse_backend("megatron:d2"), quadratic_at=100.0)
    plan = planner.plan(mine.lengths_N.tolist())
    seen = {}
    for replica, (share_order, columns_of) in enumerate(mine.orders(plan)):
        share = assemble(pickle.loads(pickle.dumps(share_order)), columns_of)
        found = share.batch.images or ((),) * len(share.batch)
        for index, own in zip(plan.sequences(replica), found, strict=True):
            seen[chosen[index]] = [image.digest for image in own]
        if share.batch.images is not None:
            assert share.batch.select([0]).to(torch.device("cpu")).images == share.batch.images[:1]
    assert seen == {row: [image.digest for image in images[row]] for row in chosen}


def test_a_replica_gets_only_the_pieces_that_it_needs() -> None:
    batch = remote(whole_batch(seed=5)).select([0, 1])  # both in the first piece of tokens
    planner = BatchPlanner.of(MicroBatchConfig(), parse_backend("megatron:d2"), quadratic_at=100.0)
    for _, pieces in batch.orders(planner.plan(batch.lengths_N.tolist())):
        assert len(pieces) == 2, "each replica needs one piece with tokens and one with log-probs"


def test_a_replica_without_sequences_gets_no_pieces_beyond_the_mini_batch() -> None:
    whole = whole_batch(seed=6)
    batch = remote(whole).select([0])
    planner = BatchPlanner.of(MicroBatchConfig(), parse_backend("megatron:d2"), quadratic_at=100.0)
    orders = batch.orders(planner.plan(batch.lengths_N.tolist()))
    shares = {len(order.lengths): assemble(order, pieces) for order, pieces in orders}
    assert [len(pieces) for _, pieces in orders] == [2, 2], "one with tokens and one with log-probs"
    assert shares[0].batch.fields.keys() == shares[1].batch.fields.keys() == whole.fields.keys()


def test_batches_that_are_joined_keep_each_sequence() -> None:
    first, second = whole_batch(seed=1), whole_batch(seed=2)
    joined = RemoteBatch.joined([remote(first), remote(second)])
    chosen = [3, N + 3, N, 22]
    mine = joined.select(chosen)
    planner = BatchPlanner.of(MicroBatchConfig(), parse_backend("megatron:d1"), quadratic_at=100.0)
    ((order, pieces),) = mine.orders(planner.plan(mine.lengths_N.tolist()))
    share = assemble(order, pieces)
    for place, index in enumerate(chosen):
        want = (first if index < N else second).select([index % N])
        got = share.batch.select([place])
        assert got.tokens_T.equal(want.tokens_T)
        assert got.mask_T.equal(want.mask_T)
        assert got.fields["old_logprobs"].equal(want.fields["old_logprobs"])
    assert mine.totals().n_trained_tokens == int(share.batch.mask_T.sum())


def test_sequences_that_are_not_trained_have_no_trained_token() -> None:
    batch = whole_batch(seed=4)
    masked = remote(batch).untrained([2, 5]).select([5, 6, 2])
    planner = BatchPlanner.of(MicroBatchConfig(), parse_backend("megatron:d1"), quadratic_at=100.0)
    ((order, pieces),) = masked.orders(planner.plan(masked.lengths_N.tolist()))
    share = assemble(order, pieces)
    assert [int(mask.sum()) for mask in share.batch.split(share.batch.mask_T)] == masked.trained_N.tolist()
    assert masked.trained_N[0] == masked.trained_N[2] == 0
    assert masked.trained_N[1] == int(batch.select([6]).mask_T.sum())
    assert share.totals.n_trained_sequences == (masked.trained_N > 0).sum()
    assert "kept" not in share.batch.fields


def test_experts_of_tokens_without_routes_are_not_known() -> None:
    """A value of 0 would send all of them to the first expert."""
    batch = whole_batch(seed=3).select([0, 1])
    pieces = (
        Piece(columns(batch, [0], ["tokens", "mask", "routes"]), np.array([0])),
        Piece(columns(batch, [1], ["tokens", "mask"]), np.array([1])),
    )
    planner = BatchPlanner.of(MicroBatchConfig(max_tokens_per_mb=64), parse_backend("megatron:d1"), quadratic_at=100.0)
    by_reference = RemoteBatch(np.array(batch.lengths), np.array([1, 1]), pieces)
    [(order, own)] = by_reference.orders(planner.plan(list(batch.lengths)))
    share = assemble(order, own).batch
    known, unknown = share.split(share.fields["routes"])
    if share.lengths != batch.lengths:
        known, unknown = unknown, known
    assert known.equal(batch.split(batch.fields["routes"])[0])
    assert bool((unknown == UNKNOWN_EXPERT).all())
