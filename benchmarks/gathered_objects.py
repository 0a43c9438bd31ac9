"""CPU time in which a rank unpickles what `all_gather_object` has brought it, as losses over a whole mini-batch ask.

    python benchmarks/gathered_objects.py

In one process: what is unpickled is the rank's own object, as often as there are ranks. The transfer is not timed.
"""

from __future__ import annotations

import time

import torch
from torch.distributed.distributed_c10d import _object_to_tensor, _tensor_to_object

REPEATS = 5


def milliseconds(value: object, n: int) -> float:
    """Return the milliseconds that `n` objects take, the best of some attempts."""
    bytes_N, size = _object_to_tensor(value, torch.device("cpu"), None)
    best = float("inf")
    for _ in range(REPEATS):
        began = time.process_time()
        for _ in range(n):
            _tensor_to_object(bytes_N, size, None)
        best = min(best, time.process_time() - began)
    return 1e3 * best


if __name__ == "__main__":
    print("| numbers | 1,024 tensors | 128 tensors | 128 arrays |\n|---|---|---|---|")
    for n_numbers in (3, 800, 8000):
        own = torch.rand(n_numbers, dtype=torch.float64)
        cells = (milliseconds(own, 1024), milliseconds(own, 128), milliseconds(own.numpy(), 128))
        print(f"| {n_numbers:,} | {' | '.join(f'{cell:.1f} ms' for cell in cells)} |")
