"""Adam's state on one rank, in buckets: in the precision and in the memory that the recipe chooses, and its update.

    shards of parameters   |---- a ----|-- b --|-------------- c --------------|
    buckets                |-------- 0 --------|-------- 1 --------|--- 2 -----|     one tensor for each kind of state

State on the host is updated on the device, bucket after bucket: while one is updated, the next arrives and the one
before it leaves, each on a stream of its own.

    inward   | fetch 0 | fetch 1 | fetch 2 |
    main               | step 0  | step 1  | step 2 |
    outward                      | store 0 | store 1 | store 2 |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from fivefold.config.schema.megatron import MegatronOptimizerFields
from fivefold.config.state_buckets import BUCKET_SIZE, SLOTS
from fivefold.engine.state.host_copy import Parkable
from fivefold.engine.state.precision import join_master, noise, round_stochastically, split_master

StateKind = Literal["param", "exp_avg", "exp_avg_sq"]
STATE_KINDS: tuple[StateKind, ...] = ("param", "exp_avg", "exp_avg_sq")
"""Kinds of optimizer state: master weights, and Adam's first and second moments."""
MOMENTS: tuple[StateKind, ...] = ("exp_avg", "exp_avg_sq")

_ALIGNMENT = 64
"""Elements. A piece of a bucket starts at a multiple of it, as Megatron-Core aligns parameters."""


@dataclass(frozen=True)
class StateFormat:
    """The number format of each kind of state, and where it is kept."""

    kinds: Mapping[StateKind, torch.dtype]
    """Dtypes of what is stored; int16 for the remainders of master weights. Without `param`, float32 weights are their
    own master weights."""
    on_host: bool

    @classmethod
    def of(cls, fields: MegatronOptimizerFields, weights: torch.dtype) -> StateFormat:
        """Return the format that the recipe chooses for a model whose weights have dtype `weights`."""
        kinds: dict[StateKind, torch.dtype] = {
            "exp_avg": getattr(torch, fields.exp_avg_dtype),
            "exp_avg_sq": getattr(torch, fields.exp_avg_sq_dtype),
        }
        if weights != torch.float32:
            kinds["param"] = torch.int16 if fields.store_param_remainders else torch.float32
        return cls(kinds, on_host=fields.state_on == "host")


@dataclass(eq=False)
class Shard:
    """The elements of one parameter whose state this rank keeps."""

    name: str
    parameter: torch.nn.Parameter
    start: int
    """First element of the shard, in the flattened parameter."""
    weight_N: torch.Tensor
    """View of the parameter's elements. Before an update, the gradient hangs on it as `decoupled_grad`."""
    options: Mapping[str, Any]
    """The parameter group in torch's form: rate, betas, eps and weight decay."""

    @property
    def noise_name(self) -> str:
        """Name of the parameter for rounding; copies of the embedding on two pipeline stages must be rounded alike."""
        return "shared embedding" if vars(self.parameter).get("shared_embedding", False) else self.name


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a shard, and its place in a bucket."""

    shard: Shard
    start: int
    """First element in the shard."""
    size: int
    offset: int
    """First element in the bucket."""

    @property
    def weight_N(self) -> torch.Tensor:
        """The weights, a view of the parameter."""
        return self.shard.weight_N.detach()[self.start : self.start + self.size]

    @property
    def grad_N(self) -> torch.Tensor:
        """The gradient, a view of what the engine has hung on the weights."""
        grad: torch.Tensor = vars(self.shard.weight_N)["decoupled_grad"]
        return grad[self.start : self.start + self.size]

    def of(self, bucket_N: torch.Tensor) -> torch.Tensor:
        """Return this piece's elements of a bucket's tensor."""
        return bucket_N[self.offset : self.offset + self.size]


class Bucket:
    """Pieces that are updated together, and the tensors of their state, flat [size] for each kind that is stored."""

    def __init__(self, pieces: list[Piece], form: StateFormat) -> None:
        self.pieces = pieces
        self.size = pieces[-1].offset + pieces[-1].size
        device = pieces[0].weight_N.device
        place = {"device": "cpu", "pin_memory": device.type == "cuda"} if form.on_host else {"device": device}
        self.stored: dict[StateKind, torch.Tensor] = {
            kind: torch.zeros(self.size, dtype=dtype, **place) for kind, dtype in form.kinds.items()
        }
        if form.kinds.get("param") == torch.float32:
            for piece in pieces:
                piece.of(self.stored["param"]).copy_(piece.weight_N)
        self.parkable = [] if form.on_host else [Parkable(tensor) for tensor in self.stored.values()]


@dataclass(frozen=True)
class AdamStep:
    """What one step of Adam needs beside the state and the gradient."""

    update: int
    """Number of this update, from 1, for Adam's bias correction."""
    clip: float
    """Factor of the gradient; 1 without clipping."""
    decoupled: bool
    """Whether weight decay is AdamW's."""


class OptimizerState:
    """Adam's state of all of this rank's shards, and its update."""

    def __init__(self, shards: list[Shard], form: StateFormat) -> None:
        self._shards = shards
        self._form = form
        self._buckets = [Bucket(pieces, form) for pieces in fill_buckets(shards, BUCKET_SIZE)]
        self._places: dict[Shard, list[tuple[Bucket, Piece]]] = {shard: [] for shard in shards}
        for bucket in self._buckets:
            for piece in bucket.pieces:
                self._places[piece.shard].append((bucket, piece))
        self._is_parked = False
        if form.on_host:
            self._inward, self._outward = torch.cuda.Stream(), torch.cuda.Stream()

    @torch.no_grad()
    def update(self, step: AdamStep) -> None:
        """Update master weights, moments and the parameters' elements from the gradients, which are changed."""
        if not self._form.on_host:
            for bucket in self._buckets:
                update_bucket(bucket.pieces, bucket.stored, step)
        elif self._buckets:
            self._update_streaming(step)

    def _update_streaming(self, step: AdamStep) -> None:
        """Update state that is on the host. The main stream has all of it done; the host waits for nothing."""
        main, inward, outward = torch.cuda.current_stream(), self._inward, self._outward
        device, size = self._shards[0].weight_N.device, max(bucket.size for bucket in self._buckets)
        slots = [
            {kind: torch.empty(size, dtype=dtype, device=device) for kind, dtype in self._form.kinds.items()}
            for _ in range(min(SLOTS, len(self._buckets)))
        ]
        arrived, updated, left = ([torch.cuda.Event() for _ in self._buckets] for _ in range(3))
        # The slots' memory may still be in use by what the main stream did before.
        inward.wait_stream(main)

        def fetch(index: int) -> None:
            with torch.cuda.stream(inward):
                if index >= len(slots):
                    inward.wait_event(left[index - len(slots)])
                for kind, host in self._buckets[index].stored.items():
                    slots[index % len(slots)][kind][: host.numel()].copy_(host, non_blocking=True)
                arrived[index].record(inward)

        fetch(0)
        for index, bucket in enumerate(self._buckets):
            if index + 1 < len(self._buckets):
                fetch(index + 1)
            slot = {kind: tensor[: bucket.size] for kind, tensor in slots[index % len(slots)].items()}
            main.wait_event(arrived[index])
            update_bucket(bucket.pieces, slot, step)
            updated[index].record(main)
            with torch.cuda.stream(outward):
                outward.wait_event(updated[index])
                for kind, tensor in slot.items():
                    bucket.stored[kind].copy_(tensor, non_blocking=True)
                left[index].record(outward)
        main.wait_stream(outward)

    def get(self, shard: Shard, kind: StateKind) -> torch.Tensor:
        """Return a shard's state as float32 [N] on the parameter's device.

        Raises:
            ValueError: the state is parked.
        """
        if self._is_parked:
            raise ValueError("the optimizer's state was offloaded: call onload first")
        weight_N = shard.weight_N.detach()
        if kind not in self._form.kinds:
            return weight_N
        values_N = torch.empty_like(weight_N, dtype=torch.float32)
        for bucket, piece in self._places[shard]:
            stored_N = piece.of(bucket.stored[kind]).to(weight_N.device, non_blocking=True)
            if stored_N.dtype == torch.int16:
                stored_N = join_master(piece.weight_N, stored_N)
            values_N[piece.start : piece.start + piece.size].copy_(stored_N)
        return values_N

    @torch.no_grad()
    def set(self, shard: Shard, kind: StateKind, values_N: torch.Tensor) -> None:
        """Replace a shard's state by floating values [N]. Master weights replace the parameter's elements, too."""
        for bucket, piece in self._places[shard]:
            part_N = values_N[piece.start : piece.start + piece.size].to(piece.weight_N.device, torch.float32)
            if kind == "param" and self._form.kinds.get(kind) == torch.int16:
                remainder_N = torch.empty(piece.size, dtype=torch.int16, device=part_N.device)
                split_master(part_N, piece.weight_N, remainder_N)
                part_N = remainder_N
            elif kind == "param":
                piece.weight_N.copy_(part_N)
            if kind in bucket.stored:
                piece.of(bucket.stored[kind]).copy_(part_N)

    def slices(self) -> Iterator[StateSlice]:
        """Yield this rank's slice of every parameter of which it holds state."""
        for shard in self._shards:
            end = shard.start + shard.weight_N.numel()
            yield StateSlice(shard.name, shard.parameter, shard.start, end, shard, self)

    def park(self) -> int:
        """Move state on the device to pinned host memory. Returns the bytes that were freed."""
        self._is_parked = not self._form.on_host
        return sum(tensor.park(keep_values=True) for bucket in self._buckets for tensor in bucket.parkable)

    def fetch(self) -> int:
        """Bring back what `park` moved. Returns the bytes that were allocated."""
        self._is_parked = False
        return sum(tensor.fetch(keep_values=True) for bucket in self._buckets for tensor in bucket.parkable)


@dataclass(frozen=True)
class StateSlice:
    """This rank's part of one parameter's optimizer state: elements `start` to `end` of the flattened parameter."""

    name: str
    """Name of the parameter, as the engine names it."""
    parameter: torch.nn.Parameter
    """The whole parameter of this rank."""
    start: int
    """First element of the slice, in the flattened parameter."""
    end: int
    """Element behind the slice."""
    _shard: Shard
    _state: OptimizerState

    is_stored: ClassVar[bool] = True

    def get(self, kind: StateKind) -> torch.Tensor:
        """Return the state as float32 [end - start] on the parameter's device; it must not be changed in place."""
        return self._state.get(self._shard, kind)

    def set(self, kind: StateKind, values: torch.Tensor) -> None:
        """Replace the state by `values`, floating [end - start], on any device."""
        self._state.set(self._shard, kind, values)


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
        """Element behind the slice."""
        return self.values_N.numel()

    def get(self, kind: StateKind) -> torch.Tensor:
        """Return the values, or moments of 0."""
        return self.values_N if kind == "param" else torch.zeros_like(self.values_N)

    def set(self, kind: StateKind, values: torch.Tensor) -> None:
        """Replace the values; moments are dropped."""
        if kind == "param":
            self.values_N.copy_(values)


def fill_buckets(shards: Iterable[Shard], bucket_size: int) -> Iterator[list[Piece]]:
    """Yield the pieces of each bucket of at most `bucket_size` elements, which is a multiple of 64."""
    pieces: list[Piece] = []
    offset = 0
    for shard in shards:
        start = 0
        while start < shard.weight_N.numel():
            if offset >= bucket_size:
                yield pieces
                pieces, offset = [], 0
            size = min(shard.weight_N.numel() - start, bucket_size - offset)
            pieces.append(Piece(shard, start, size, offset))
            start += size
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    if pieces:
        yield pieces


def update_bucket(pieces: list[Piece], stored: Mapping[StateKind, torch.Tensor], step: AdamStep) -> None:
    """Make a step of Adam on the state of a bucket, which is on the device of the weights, and on the weights.

    Every format is updated by PyTorch's fused kernel on float32 values, so that all formats that are exact have the
    same bits.
    """
    masters = [_master(piece, stored) for piece in pieces]
    moments = {kind: [piece.of(stored[kind]).float() for piece in pieces] for kind in MOMENTS}
    grads = [piece.grad_N.float() for piece in pieces]
    if step.clip != 1.0:
        for grad in grads:
            grad.mul_(step.clip)
    _fused_step(pieces, masters, grads, moments, step)
    for index, piece in enumerate(pieces):
        _store_master(piece, stored, masters[index])
        _store_moments(piece, stored, {kind: moments[kind][index] for kind in MOMENTS}, step.update)


def _fused_step(
    pieces: list[Piece],
    masters: list[torch.Tensor],
    grads: list[torch.Tensor],
    moments: Mapping[StateKind, list[torch.Tensor]],
    step: AdamStep,
) -> None:
    """Call PyTorch's kernel once for each parameter group."""
    kernel = torch._fused_adamw_ if step.decoupled else torch._fused_adam_
    count = torch.full((), float(step.update), device=masters[0].device)
    groups: dict[int, list[int]] = {}
    for index, piece in enumerate(pieces):
        groups.setdefault(id(piece.shard.options), []).append(index)
    for indices in groups.values():
        options = pieces[indices[0]].shard.options
        kernel(
            [masters[index] for index in indices],
            [grads[index] for index in indices],
            [moments["exp_avg"][index] for index in indices],
            [moments["exp_avg_sq"][index] for index in indices],
            [],
            [count] * len(indices),
            amsgrad=False,
            lr=options["lr"],
            beta1=options["betas"][0],
            beta2=options["betas"][1],
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )


def _master(piece: Piece, stored: Mapping[StateKind, torch.Tensor]) -> torch.Tensor:
    """Return the float32 master weights of a piece, which are the stored ones where those are float32."""
    if "param" not in stored:
        return piece.weight_N
    values_N = piece.of(stored["param"])
    return join_master(piece.weight_N, values_N) if values_N.dtype == torch.int16 else values_N


def _store_master(piece: Piece, stored: Mapping[StateKind, torch.Tensor], master_N: torch.Tensor) -> None:
    if "param" not in stored:
        return
    values_N = piece.of(stored["param"])
    if values_N.dtype == torch.int16:
        split_master(master_N, piece.weight_N, values_N)
    else:
        piece.weight_N.copy_(master_N)


def _store_moments(
    piece: Piece, stored: Mapping[StateKind, torch.Tensor], moments: Mapping[StateKind, torch.Tensor], update: int
) -> None:
    rounded = [kind for kind in MOMENTS if stored[kind].dtype == torch.bfloat16]
    if not rounded:
        return
    shard = piece.shard
    drawn = noise(f"{shard.noise_name}/{update}", shard.start + piece.start, piece.size, piece.weight_N.device)
    for kind, noise_N in zip(MOMENTS, drawn, strict=True):
        if kind in rounded:
            round_stochastically(moments[kind], noise_N, piece.of(stored[kind]))
