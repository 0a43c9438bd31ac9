"""Metrics of one mini-batch, from sums on the ranks that computed a loss to the same numbers everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

_REDUCTIONS: dict[str, Callable[[float, float], float]] = {"max": max, "min": min, "sum": lambda a, b: a + b}


def reduce_metrics(
    kept: Sequence[dict[str, torch.Tensor]], groups: ProcessGroupCollection, *, n_trained: float
) -> dict[str, float]:
    """Reduce over micro-batches and data-parallel ranks; collective over all processes.

    Names that end in /max, /min or /sum are reduced so; all others are sums that are divided by `n_trained`, the
    trained tokens of the whole mini-batch. Tensor- and context-parallel ranks compute the same loss and count once.
    """
    counts = groups.tp.rank() == 0 and groups.cp.rank() == 0
    local = [{name: float(value) for name, value in metrics.items()} for metrics in kept] if counts else []
    gathered: list[list[dict[str, float]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, local)
    totals: dict[str, float] = {}
    for metrics in (metrics for rank in gathered for metrics in rank):
        for name, value in metrics.items():
            totals[name] = _reduction(name)(totals[name], value) if name in totals else value
    return {
        name: value if _kind(name) in _REDUCTIONS else value / max(1.0, n_trained) for name, value in totals.items()
    }


def _kind(name: str) -> str:
    return name.rpartition("/")[2]


def _reduction(name: str) -> Callable[[float, float], float]:
    return _REDUCTIONS.get(_kind(name), _REDUCTIONS["sum"])
