"""Metrics of one mini-batch: sums on the ranks that computed a loss become the same numbers on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

_REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "sum": sum}


_EXTREMES = ("max", "min")


def reduce_metrics(kept: Sequence[dict[str, torch.Tensor]], *, counts: bool, n_trained: int) -> dict[str, float]:
    """Reduce over micro-batches and data-parallel ranks; collective over all processes.

    Names that end in /max, /min or /sum are reduced in that way; all others are sums that are divided by `n_trained`.

    Args:
        kept: the metrics of each micro-batch of this process.
        counts: whether this process contributes. Tensor- and context-parallel ranks compute the same loss, so only one
            of them does.
        n_trained: trained tokens of the whole mini-batch.
    """
    gathered: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, _local(kept) if counts else {})
    if n_trained == 0:
        # Without trained tokens there is no largest and no smallest value.
        gathered = [{name: value for name, value in rank.items() if _kind(name) not in _EXTREMES} for rank in gathered]
    totals = {name: _reduce(name, [rank[name] for rank in gathered if name in rank]) for name in _names(gathered)}
    return {name: value if _kind(name) in _REDUCTIONS else value / max(1, n_trained) for name, value in totals.items()}


def _local(kept: Sequence[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Reduce over this rank's micro-batches, with one copy from the device, because a copy waits for all its work."""
    if not kept:
        return {}
    values_MK = torch.stack([value.float() for metrics in kept for value in metrics.values()]).tolist()
    names, width = list(kept[0]), len(kept[0])
    rows = [values_MK[start : start + width] for start in range(0, len(values_MK), width)]
    return {name: _reduce(name, list(column)) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def _names(gathered: Sequence[dict[str, float]]) -> dict[str, None]:
    return dict.fromkeys(name for rank in gathered for name in rank)


def _kind(name: str) -> str:
    return name.rpartition("/")[2]


def _reduce(name: str, values: list[float]) -> float:
    return _REDUCTIONS.get(_kind(name), sum)(values)
