"""The parts of parameters whose training state this rank keeps, as checkpoints and loading see them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from fivefold.engine.state.optimizer_state import Bucket, OptimizerState, Piece, Shard, StateKind
from fivefold.engine.state.precision import join_master, split_master


def state_slices(state: OptimizerState) -> Iterator[StateSlice]:
    """Yield this rank's slice of every parameter whose optimizer state it holds."""
    places: dict[Shard, list[tuple[Bucket, Piece]]] = {shard: [] for shard in state.shards}
    for bucket in state.buckets:
        for piece in bucket.pieces:
            places[piece.shard].append((bucket, piece))
    for shard in state.shards:
        yield StateSlice(shard, state, places[shard])


@dataclass(frozen=True, eq=False)
class StateSlice:
    """This rank's part of one parameter's optimizer state."""

    _shard: Shard
    _state: OptimizerState
    _places: list[tuple[Bucket, Piece]]

    is_stored: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Name of the parameter in the engine."""
        return self._shard.name

    @property
    def parameter(self) -> torch.Tensor:
        """The whole parameter of this rank."""
        return self._shard.parameter

    @property
    def start(self) -> int:
        """First element of the slice, in the flattened parameter."""
        return self._shard.start

    @property
    def end(self) -> int:
        """Element after the slice."""
        return self._shard.start + self._shard.weight_N.numel()

    def get(self, kind: StateKind) -> torch.Tensor:
        """Return the state as float32 [end - start] on the parameter's device; it must not be changed in place.

        Raises:
            ValueError: the state is parked.
        """
        if self._state.is_parked:
            raise ValueError("the optimizer's state was offloaded: call onload first")
        weight_N = self._shard.weight_N.detach()
        if kind not in self._state.form.kinds:
            return weight_N
        values_N = torch.empty_like(weight_N, dtype=torch.float32)
        for bucket, piece in self._places:
            stored_N = piece.of(bucket.stored[kind]).to(weight_N.device, non_blocking=True)
            if stored_N.dtype == torch.int16:
                stored_N = join_master(piece.weight_N, stored_N)
            values_N[piece.start : piece.start + piece.size].copy_(stored_N)
        return values_N

    @torch.no_grad()
    def set(self, kind: StateKind, values: torch.Tensor) -> None:
        """Replace the state by `values`, floating [end - start], on any device; master weights set the parameter."""
        for bucket, piece in self._places:
            part_N = values[piece.start : piece.start + piece.size].to(piece.weight_N.device, torch.float32)
            if kind == "param" and self._state.form.kinds.get(kind) == torch.int16:
                remainder_N = torch.empty(piece.size, dtype=torch.int16, device=part_N.device)
                split_master(part_N, piece.weight_N, remainder_N)
                part_N = remainder_N
            elif kind == "param":
                piece.weight_N.copy_(part_N)
            if kind in bucket.stored:
                piece.of(bucket.stored[kind]).copy_(part_N)


@dataclass(frozen=True, eq=False)
class FixedSlice:
    """A tensor in the place of a slice: it is saved and loaded with the state, and the optimizer does not change it."""

    name: str
    values_N: torch.Tensor
    """Its elements, float32, flat."""
    is_stored: bool
    """Whether this rank stores it; of replicas, one does."""
    start: int = 0

    @property
    def end(self) -> int:
        """Element after the slice."""
        return self.values_N.numel()

    def get(self, kind: StateKind) -> torch.Tensor:
        """Return the values, or moments of 0."""
        return self.values_N if kind == "param" else torch.zeros_like(self.values_N)

    def set(self, kind: StateKind, values: torch.Tensor) -> None:
        """Replace the values; moments are dropped."""
        if kind == "param":
            self.values_N.copy_(values)
