"""How fast pinned host memory is handed out, PyTorch's and Fivefold's, and how fast a GPU reads it.

    python benchmarks/pinned_memory.py --gib 8
    python benchmarks/pinned_memory.py --gib 8 --processes 2      two processes at once, as two ranks of a node

Each way runs in processes of its own, which print a line of JSON: GB/s of handing out and of a copy to the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

import torch

from fivefold.weights.pinned import host_zeros

WAYS = {
    "torch": "",
    "torch, cudaHostRegister, 8 threads": "pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
    "fivefold": "",
}
"""PyTorch's allocator settings of each way."""
CHUNK = 2**26
"""Bytes that are asked for at a time, as a bucket of optimizer state in bfloat16 has."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=8, help="GiB of each process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--way", choices=WAYS, help="measure this way alone, in this process")
    args = parser.parse_args()
    if args.way is not None:
        print(json.dumps(measure(args.way, args.gib)), flush=True)
        return
    for way, settings in WAYS.items():
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings}
        command = [sys.executable, __file__, "--gib", str(args.gib), "--way", way]
        running = [subprocess.Popen(command, env=environment) for _ in range(args.processes)]
        codes = [process.wait() for process in running]
        if any(codes):
            raise SystemExit(f"{way}: a process failed, see above")


def measure(way: str, gib: int) -> dict[str, object]:
    """Return the speeds in GB/s."""
    target = torch.empty(CHUNK, dtype=torch.uint8, device="cuda")
    began = time.perf_counter()
    chunks = [
        host_zeros(CHUNK, torch.uint8, pinned=True)
        if way == "fivefold"
        else torch.zeros(CHUNK, dtype=torch.uint8, pin_memory=True)
        for _ in range(gib * 2**30 // CHUNK)
    ]
    seconds = time.perf_counter() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    for chunk in chunks:
        target.copy_(chunk, non_blocking=True)
    torch.cuda.synchronize()
    n_bytes = CHUNK * len(chunks)
    return {
        "way": way,
        "handed out": round(n_bytes / seconds / 1e9, 2),
        "copied": round(n_bytes / (time.perf_counter() - began) / 1e9, 1),
    }


if __name__ == "__main__":
    main()
