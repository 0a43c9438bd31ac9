"""Metrics of one mini-batch that an engine computes: from the parts that ranks hold, the same ones on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from fivefold.algorithms.metrics import Metric, Metrics, Number, Reduction, merge_metrics
from fivefold.families.shape import ModelShape

UPDATE = "max"
"""Phase of an update, whose peak of memory is usually the largest."""
_RETRIES = "num_alloc_retries"
"""PyTorch's name for how often its allocator found no room, and returned what it kept for later to the device."""


def reduce_metrics(kept: Sequence[Metrics], *, counts: bool) -> Metrics:
    """Merge metrics of micro-batches and data-parallel ranks; collective over all processes.

    Args:
        kept: the metrics of each micro-batch of this process.
        counts: whether this process contributes. Tensor- and context-parallel ranks compute the same loss, so only one
            of them does.
    """
    own = merge_metrics(_on_host(kept)) if counts else {}  # only a pipeline's last stage has any
    gathered: list[Part | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, Part.of(own) if own else None)
    return join_parts([part for part in gathered if part is not None])


def join_parts(parts: Sequence[Part]) -> Metrics:
    """Return what `merge_metrics` makes of all parts, with the same bits.

    Parts of the same names, which nearly all ranks have, are added as arrays: a thousand ranks with a metric at a time
    would take a third of a second.
    """
    if len({(part.names, part.reductions) for part in parts}) != 1:
        return merge_metrics(part.metrics for part in parts)
    values_PN3 = np.stack([part.values_N3 for part in parts])
    total_N3 = values_PN3.cumsum(axis=0)[-1]  # one part after the other, unlike `sum`
    reductions = parts[0].reductions.split(_BETWEEN)
    for number, reduction in enumerate(reductions):
        if reduction in _CHOOSING:
            total_N3[number, 0] = _CHOOSING[reduction](values_PN3[:, number, 0].tolist())
    return Part(parts[0].names, parts[0].reductions, total_N3).metrics


_BETWEEN = "\n"
_CHOOSING: Mapping[str, Callable[[list[float]], float]] = {"max": max, "min": min, "last": lambda values: values[-1]}
"""What the reductions that do not add up make of the `sum` of all parts."""


@dataclass(frozen=True)
class Part:
    """The metrics of a rank, as few objects: each of another rank's takes some microseconds to unpickle."""

    names: str
    """The names of N metrics, with `_BETWEEN` between them."""
    reductions: str
    """Their reductions."""
    values_N3: npt.NDArray[np.float64]
    """Sum, weight and square of each."""

    @staticmethod
    def of(metrics: Metrics) -> Part:
        """Return the metrics, at least one, whose numbers are on the host."""
        rows = [(each.sum, each.weight, each.square) for each in metrics.values()]
        reductions = _BETWEEN.join(each.reduce for each in metrics.values())
        return Part(_BETWEEN.join(metrics), reductions, np.array(rows, np.float64))

    @property
    def metrics(self) -> Metrics:
        """The metrics, one by one."""
        rows = zip(self.names.split(_BETWEEN), self.reductions.split(_BETWEEN), self.values_N3.tolist(), strict=True)
        return {
            name: Metric(total, weight, cast(Reduction, how), square) for name, how, (total, weight, square) in rows
        }


def _on_host(kept: Sequence[Metrics]) -> Iterable[Metrics]:
    """Return the metrics in floats, with one copy from the device, because a copy waits for all its work."""
    numbers: list[Number] = [
        number for metrics in kept for each in metrics.values() for number in (each.sum, each.weight, each.square)
    ]
    tensors = [number.float() for number in numbers if isinstance(number, torch.Tensor)]
    copied = iter(torch.stack(tensors).tolist() if tensors else ())
    floats = iter([next(copied) if isinstance(number, torch.Tensor) else number for number in numbers])
    return [
        {name: Metric(next(floats), next(floats), each.reduce, next(floats)) for name, each in metrics.items()}
        for metrics in kept
    ]


def load_metrics(load_LE: torch.Tensor, moe_layers: Sequence[bool]) -> Metrics:
    """Return how uneven the loads of experts are; nothing if no token was routed.

    Over all layers they are `experts/imbalance` and the like, of layer n `experts/imbalance/layer_<n>`.

    Args:
        load_LE: tokens that each expert of each layer got, [layers, experts].
        moe_layers: which layers have experts.
    """
    layers = [layer for layer, is_moe in enumerate(moe_layers) if is_moe]
    loads_LE = load_LE[layers].double().cpu()
    if not layers or not bool(loads_LE.sum(1).all()):
        return {}
    imbalance_L = (loads_LE.amax(1) / loads_LE.mean(1)).tolist()
    width = len(str(len(moe_layers) - 1))
    return {
        "experts/imbalance": Metric(sum(imbalance_L) / len(layers)),
        "experts/imbalance/max": Metric(max(imbalance_L), reduce="max"),
        "experts/dead": Metric(float((loads_LE == 0).sum())),
        **{
            f"experts/imbalance/layer_{layer:0{width}}": Metric(value)
            for layer, value in zip(layers, imbalance_L, strict=True)
        },
    }


def auxiliary_losses(
    names: Sequence[str], losses_LK: torch.Tensor, load_LE: torch.Tensor, shape: ModelShape
) -> Metrics:
    """Return the mean over tokens and layers of each auxiliary loss that is trained, without its weight.

    Args:
        names: their names.
        losses_LK: sums over the tokens of each layer, [layers, names].
        load_LE: tokens that each expert of each layer got, [layers, experts].
        shape: shape of the model.
    """
    layers = [layer for layer, is_moe in enumerate(shape.moe_layers) if is_moe]
    tokens_L = load_LE[layers].double().sum(1) / shape.top_k
    if not layers or not bool(tokens_L.all()):
        return {}
    means_K = (losses_LK[layers].double() / tokens_L[:, None]).mean(0).tolist()
    return {name: Metric(mean) for name, mean in zip(names, means_K, strict=True) if mean}


class PeakMemory:
    """The most device memory of this process's tensors, by phase. Processes without a GPU have none."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._retries_before = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block, which belongs to phase `name`."""
        if not torch.cuda.is_available():
            yield
            return
        torch.cuda.reset_peak_memory_stats()
        yield
        self._bytes[name] = max(self._bytes.get(name, 0), torch.cuda.max_memory_allocated())

    def take(self, device: torch.device | str = "cuda") -> Metrics:
        """Return metrics of what was measured since the last call, and forget it.

        They are `peak_memory_gb/<phase>`, the largest peak of any rank in GB (1e9 bytes), and `allocator_retries/max`,
        the most times that a rank's allocator had to make room. All ranks call it together, after the same phases.

        Args:
            device: device of the tensor that the ranks exchange.
        """
        if not self._bytes:
            return {}
        retries = torch.cuda.memory_stats().get(_RETRIES, 0)
        most = torch.tensor([*self._bytes.values(), retries - self._retries_before], dtype=torch.float64, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        *peaks, most_retries = most.tolist()
        taken = {
            f"peak_memory_gb/{phase}": Metric(peak / 1e9, reduce="max" if phase == UPDATE else "mean")
            for phase, peak in zip(self._bytes, peaks, strict=True)
        }
        self._bytes, self._retries_before = {}, retries
        return taken | {"allocator_retries/max": Metric(most_retries, reduce="max")}
