"""The order of reading: complete, seeded, and resumed exactly."""

from __future__ import annotations

import json
import random

import pytest

from fivefold.data.sampler import EpochSampler


def sampler(
    n: int = 10, batch_size: int = 3, shuffle: bool = True, seed: int = 1, fingerprint: str = "a"
) -> EpochSampler[int]:
    return EpochSampler(range(n), batch_size=batch_size, shuffle=shuffle, seed=seed, fingerprint=fingerprint)


def test_an_epoch_reads_each_item_once_and_drops_the_rest() -> None:
    reader = sampler()
    assert (reader.batches_per_epoch, reader.n_dropped) == (3, 1)
    left_out = set()
    for epoch in range(6):
        assert reader.place == (epoch, 0)
        read = [i for _ in range(3) for i in reader.next_batch()]
        assert len(set(read)) == 9
        left_out |= set(range(10)) - set(read)
    assert len(left_out) > 1


def test_every_epoch_and_every_seed_has_its_own_order() -> None:
    reader = sampler(n=30, batch_size=30)
    orders = [tuple(reader.next_batch()) for _ in range(4)]
    orders.append(tuple(sampler(n=30, batch_size=30, seed=2).next_batch()))
    assert len(set(orders)) == 5
    again = sampler(n=30, batch_size=30)
    assert [tuple(again.next_batch()) for _ in range(4)] == orders[:4]


def test_without_shuffle_the_order_is_that_of_the_data_set() -> None:
    reader = sampler(shuffle=False)
    assert [reader.next_batch() for _ in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 2]]


def test_a_resumed_sampler_continues_exactly() -> None:
    whole = sampler()
    batches = [whole.next_batch() for _ in range(12)]
    first = sampler()
    for n_before in range(8):
        resumed = sampler()
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [resumed.next_batch() for _ in range(12 - n_before)] == batches[n_before:]
        first.next_batch()


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_sampler_of_another_batch_size_continues_at_the_same_row(ahead: int) -> None:
    """Against a walk over the rows: what is left of an epoch and does not fill a batch is left out."""
    rng = random.Random(3)
    for seed in range(100):
        n = rng.randint(7, 30)
        whole = sampler(n, n, seed=seed)
        orders = [whole.next_batch() for _ in range(40)]
        epoch = row = 0
        state = None
        for _ in range(4):
            size, n_used = rng.randint(1, 7), rng.randint(0, 9)
            reader = sampler(n, size, seed=seed)
            if state is not None:
                reader.load_state_dict(state)
            for number in range(n_used + 1):
                if row + size > n:
                    epoch, row = epoch + 1, 0
                if number < n_used:
                    assert reader.next_batch() == orders[epoch][row : row + size]
                    row += size
            for _ in range(ahead):
                reader.next_batch()
            state = json.loads(json.dumps(reader.state_dict(ahead)))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (sampler(n=11), r"n_items=11 \(now 10\)"),
        (sampler(seed=9), r"seed=9 \(now 1\)"),
        (sampler(shuffle=False), "shuffle=False"),
        (sampler(fingerprint="b"), "fingerprint='b'"),
    ],
)
def test_a_state_of_another_data_set_is_refused(other: EpochSampler[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler().load_state_dict(other.state_dict())


def test_fewer_items_than_a_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="batch_size=11 is more than the data set has usable rows, 10"):
        sampler(batch_size=11)
