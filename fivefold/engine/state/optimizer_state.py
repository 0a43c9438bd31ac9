"""Adam's state on one rank, in buckets, in the precision and the memory that the recipe chooses; and its update.

    shards of parameters   |---- a ----|-- b --|-------------- c --------------|
    buckets                |-------- 0 --------|-------- 1 --------|--- 2 -----|     one tensor for each kind of state

Adam is https://arxiv.org/abs/1412.6980, with the decoupled weight decay of https://arxiv.org/abs/1711.05101 (AdamW).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from fivefold.config.schema.engine import OptimizerConfig
from fivefold.config.schema.megatron import MegatronOptimizerFields
from fivefold.config.state_buckets import BUCKET_SIZE
from fivefold.engine.state.parkable import Parkable
from fivefold.weights.pinned import host_zeros

if TYPE_CHECKING:
    from fivefold.engine.state.loss_scale import LossScale

_DECAYS: Mapping[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""From 1 to 0 as progress goes from 0 to 1."""


def learning_rate(
    step: int, config: OptimizerConfig, total_steps: int, peak: float | None = None, end: float | None = None
) -> float:
    """Return the rate of step `step` (from 0) of `total_steps`: linear warm-up, then what the schedule says.

    No step has rate 0: the first of a warm-up of n steps has rate lr / n, or the recipe's. A decay reaches its end one
    step after the last, as the schedules of torch and transformers do.

    Args:
        step: number of the step.
        config: the schedule.
        total_steps: steps of the whole run.
        peak: the largest rate; None: `config.lr`.
        end: the rate at the end of the decay; None: `config.lr` times `config.min_lr_ratio`.
    """
    peak = config.lr if peak is None else peak
    end = config.lr * config.min_lr_ratio if end is None else end
    warmup = _n_steps(config.warmup_steps, config.warmup_steps_proportion, total_steps)
    if step < warmup:
        start = config.warmup_start_ratio
        return peak * (start + (1.0 - start) * step / warmup) if start else peak * (step + 1) / warmup
    shape: str = config.lr_scheduler_type
    n_decay = total_steps - warmup
    if shape == "wsd":
        shape = config.decay_shape
        n_decay = min(n_decay, _n_steps(config.decay_steps, config.decay_steps_proportion, total_steps))
    progress = min(1.0, max(0, step - (total_steps - n_decay)) / max(1, n_decay))
    if shape == "cosine" and progress < 1.0:
        progress = progress * config.cycles % 1.0
    return end + (peak - end) * _DECAYS[shape](progress)


def _n_steps(steps: int | None, share: float, total_steps: int) -> int:
    # Rounded first, because 0.07 * 100 is a little more than 7.
    return math.ceil(round(share * total_steps, 6)) if steps is None else steps


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor that clips gradients of this global norm to `limit`; a limit of 0 clips nothing.

    Like Megatron-Core and torch, it adds 1e-6 to the norm.
    """
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


def loss_scale_of(dtype: str) -> LossScale | None:
    """Return the factor of the loss of a model in `dtype`; None: it needs none."""
    if dtype != "float16":
        return None
    from fivefold.engine.state.loss_scale import LossScale  # by models in float16

    return LossScale()


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

    @property
    def is_plain(self) -> bool:
        """Whether all state is float32 on the device, so that Adam's kernel takes it as it is stored."""
        return not self.on_host and all(dtype == torch.float32 for dtype in self.kinds.values())


@dataclass(eq=False)
class Shard:
    """The elements of one parameter whose state this rank keeps."""

    name: str
    parameter: torch.Tensor
    start: int
    """First element of the shard, in the flattened parameter."""
    weight_N: torch.Tensor
    """View of the parameter's elements. Before an update, the gradient hangs on it as `decoupled_grad`."""
    options: Mapping[str, Any]
    """The parameter group in torch's form: rate, betas, eps and weight decay."""


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
        self.stored: dict[StateKind, torch.Tensor] = {
            kind: host_zeros(self.size, dtype, pinned=device.type == "cuda")
            if form.on_host
            else torch.zeros(self.size, dtype=dtype, device=device)
            for kind, dtype in form.kinds.items()
        }
        if form.kinds.get("param") == torch.float32:
            for piece in pieces:
                piece.of(self.stored["param"]).copy_(piece.weight_N)
        self.parkable = [] if form.on_host else [Parkable(tensor) for tensor in self.stored.values()]


@dataclass(frozen=True)
class AdamStep:
    """What one step of Adam needs besides the state and the gradient."""

    update: int
    """Number of this update, from 1, for Adam's bias correction."""
    clip: float
    """Factor of the gradient; 1 without clipping."""
    decoupled: bool
    """Whether weight decay is AdamW's."""


class OptimizerState:
    """Adam's state of all shards of this rank."""

    def __init__(self, shards: list[Shard], form: StateFormat) -> None:
        self.shards, self.form = shards, form
        self.buckets = [Bucket(pieces, form) for pieces in fill_buckets(shards, BUCKET_SIZE)]
        self.is_parked = False

    @torch.no_grad()
    def update(self, step: AdamStep) -> None:
        """Update master weights, moments and the parameters' elements from the gradients, which are changed."""
        if not self.form.is_plain:
            # Imported here, because plain state needs none of it.
            from fivefold.engine.state.compact import update_compact

            update_compact(self.buckets, self.form, step)
            return
        for bucket in self.buckets:
            masters = [
                piece.of(bucket.stored["param"]) if "param" in bucket.stored else piece.weight_N
                for piece in bucket.pieces
            ]
            moments = {kind: [piece.of(bucket.stored[kind]) for piece in bucket.pieces] for kind in MOMENTS}
            adam(bucket.pieces, masters, moments, step)
            if "param" in bucket.stored:
                for piece, master_N in zip(bucket.pieces, masters, strict=True):
                    piece.weight_N.copy_(master_N)

    def park(self) -> int:
        """Move state on the device to pinned host memory. Returns the bytes that were freed."""
        self.is_parked = not self.form.on_host
        return sum(tensor.park(keep_values=True) for bucket in self.buckets for tensor in bucket.parkable)

    def fetch(self) -> int:
        """Bring back what `park` moved. Returns the bytes that were allocated."""
        self.is_parked = False
        return sum(tensor.fetch(keep_values=True) for bucket in self.buckets for tensor in bucket.parkable)


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


def adam(
    pieces: list[Piece],
    masters: list[torch.Tensor],
    moments: Mapping[StateKind, list[torch.Tensor]],
    step: AdamStep,
) -> None:
    """Make a step of Adam on float32 master weights and moments of pieces, in place, on the device of the weights.

    It is PyTorch's fused kernel whatever the format of the state, so that all formats that are exact have the same
    bits.
    """
    kernel = torch._fused_adamw_ if step.decoupled else torch._fused_adam_
    count = torch.full((), float(step.update), device=masters[0].device)
    grads = [piece.grad_N.float() for piece in pieces]
    if step.clip != 1.0:
        for grad in grads:
            grad.mul_(step.clip)
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
