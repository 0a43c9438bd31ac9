"""CPU time in which a rank reads what `all_gather_object` has brought: for losses over a mini-batch, and metrics.

    python benchmarks/gathered_objects.py

In one process: what is unpickled is the rank's own object, as often as there are ranks. The transfer is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.distributed_c10d import _object_to_tensor, _tensor_to_object

from fivefold.algorithms.metrics import Metric, merge_metrics
from fivefold.engine.metrics import Part, join_parts

REPEATS = 5
METRICS = {f"policy/metric_{number}": Metric(number / 7, 3.0) for number in range(60)}
"""As many as an update of GRPO has."""


def milliseconds(value: object, n: int, read: Callable[[list[Any]], object] = len) -> float:
    """Return the milliseconds in which `n` objects are unpickled and read, the best of some attempts."""
    bytes_N, size = _object_to_tensor(value, torch.device("cpu"), None)
    best = float("inf")
    for _ in range(REPEATS):
        began = time.process_time()
        read([_tensor_to_object(bytes_N, size, None) for _ in range(n)])
        best = min(best, time.process_time() - began)
    return 1e3 * best


if __name__ == "__main__":
    print("| numbers | 1,024 tensors | 128 tensors | 128 arrays |\n|---|---|---|---|")
    for n_numbers in (3, 800, 8000):
        own = torch.rand(n_numbers, dtype=torch.float64)
        cells = (milliseconds(own, 1024), milliseconds(own, 128), milliseconds(own.numpy(), 128))
        print(f"| {n_numbers:,} | {' | '.join(f'{cell:.1f} ms' for cell in cells)} |")
    print("\n| replicas | a metric at a time | as arrays |\n|---|---|---|")
    for n_replicas in (8, 128, 1024):
        one_by_one = milliseconds(METRICS, n_replicas, merge_metrics)
        together = milliseconds(Part.of(METRICS), n_replicas, join_parts)
        print(f"| {n_replicas:,} | {one_by_one:.1f} ms | {together:.1f} ms |")
