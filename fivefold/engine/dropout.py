"""Dropout on the inputs of low-rank adapters, in training alone: y = W x + scale * B A dropout(x).

Ranks that see the same inputs drop the same ones, and all others draw by themselves: each rank has streams of random
numbers, and shares some of them.

    stream     shared by                                    inputs
    rank       nobody                                       of this rank's tokens, or this rank's columns
    tensor     the ranks of tensor parallelism              of dense layers, the same on all of them
    expert     the ranks that have slices of the experts    of experts, likewise

A state store keeps the streams. What computes a layer again in the backward pass first sets the streams in it back.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Stream = Literal["rank", "tensor", "expert"]

_PREFIX = "adapters/"


class StateStore(Protocol):
    """Keeps the states of random-number generators by name."""

    def get_states(self) -> dict[str, Tensor]:
        """Return all states in a new dictionary."""

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace all states."""


class Dropout:
    """Sets a share of an adapter's inputs to 0, and scales the others so that the mean stays."""

    def __init__(
        self, rate: float, seed: int, sharers: Mapping[Stream, dist.ProcessGroup | None], store: StateStore
    ) -> None:
        """Begin the streams, in place of those that an earlier model has left in the store.

        Args:
            rate: probability of a 0, at least 0 and below 1.
            seed: seed of the streams.
            sharers: the ranks that share each stream; None: this rank alone.
            store: where their states are.
        """
        self._rate, self._store = rate, store
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        self._generator = torch.Generator(device=device)
        begun = store.get_states()
        for stream, group in sharers.items():
            first = dist.get_rank() if group is None else dist.get_process_group_ranks(group)[0]
            # Generators of the CPU take 32 bits of a seed, so that sums of seeds and ranks would meet.
            self._generator.manual_seed(zlib.crc32(f"{seed} {stream} {first}".encode()))
            begun[_PREFIX + stream] = self._generator.get_state()
        store.set_states(begun)

    def __call__(self, x: Tensor, stream: Stream) -> Tensor:
        """Return x, of any shape, with zeros that the next random numbers of a stream choose."""
        states = self._store.get_states()
        self._generator.set_state(states[_PREFIX + stream])
        kept = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(
            1 - self._rate, generator=self._generator
        )
        self._store.set_states({**states, _PREFIX + stream: self._generator.get_state()})
        return x * kept * (1 / (1 - self._rate))
