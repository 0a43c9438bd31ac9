"""Time and host memory of saving a model as a Hugging Face folder from all ranks, beside the disk's own speed.

    torchrun --nproc-per-node 2 benchmarks/hf_export.py --layers 8 --backend megatron:d2e2 --folder /data
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/hf_export.py --layers 2 --backend megatron:p2

The model has random weights; without GPUs, the ranks are processes on the CPU. Each run prints one line of JSON. The
disk's speed is what as many processes reach that write the same bytes, in equal shares, to a file each. Seconds are
those of the fastest of several saves, fsync included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from random_model import write_config

from fivefold.config.schema.engine import EngineConfig
from fivefold.engine.contract import EngineOptions
from fivefold.layout.parser import parse_backend
from fivefold.mcore.engine import MegatronEngine

BLOCK = bytes(32 * 2**20)


def main() -> None:
    args = parse_arguments()
    with joined(args.folder) as folder:
        engine = build(args, folder)
        out = folder / "saved"
        engine.save_hf(out)  # makes the buffers of the collectives, and an earlier folder that each save replaces
        before = psutil.Process().memory_info().rss
        Path("/proc/self/clear_refs").write_text("5")  # the peak in the status starts anew
        seconds = min(timed(lambda: engine.save_hf(out)) for _ in range(args.saves))
        growth = largest(peak_memory() - before)
        n_bytes = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        disk = min(timed(lambda: write_plainly(folder, n_bytes)) for _ in range(args.saves))
        if dist.get_rank() == 0:
            report(args, n_bytes, len(list(out.glob("*.safetensors"))), seconds, disk, growth)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-30B-A3B", help="one of fivefold/families/shapes/, without .json")
    parser.add_argument("--layers", type=int, default=8, help="number of layers, in place of the model's own")
    parser.add_argument("--backend", default="megatron:d1")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--folder", help="where to write; default: the temporary folder")
    return parser.parse_args()


@contextmanager
def joined(parent: str | None) -> Iterator[Path]:
    """Join the other ranks for the block; yield a new folder, the same on every rank, which is removed at the end."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    else:
        dist.init_process_group("gloo")
    made = [tempfile.mkdtemp(prefix="hf-export-", dir=parent) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    try:
        yield Path(made[0])
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(made[0])
    dist.destroy_process_group()


def build(args: argparse.Namespace, folder: Path) -> MegatronEngine:
    if dist.get_rank() == 0:
        write_config(folder, args.model, num_hidden_layers=args.layers)
    dist.barrier()
    config = EngineConfig(path=str(folder), backend=args.backend, init_from_scratch=True)
    return MegatronEngine(config, parse_backend(args.backend), EngineOptions(seed=1))


def timed(action: Callable[[], None]) -> float:
    """Return the seconds until all ranks have done it."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def peak_memory() -> int:
    """Return the most bytes of memory that this process had since its peak was reset."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def largest(value: int) -> int:
    """Return the largest value of all ranks."""
    values = [0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)


def write_plainly(folder: Path, n_bytes: int) -> None:
    """Write this rank's share of `n_bytes` zeros to a file, and remove it when it is on the disk."""
    path = folder / f"plain-{dist.get_rank()}"
    left = n_bytes // dist.get_world_size()
    with path.open("wb", buffering=0) as file:
        while left > 0:
            left -= file.write(BLOCK[:left])
        os.fsync(file.fileno())
    path.unlink()


def report(args: argparse.Namespace, n_bytes: int, n_files: int, seconds: float, disk: float, growth: int) -> None:
    row = {
        "model": args.model,
        "layers": args.layers,
        "backend": args.backend,
        "ranks": dist.get_world_size(),
        "gb": round(n_bytes / 1e9, 2),
        "files": n_files,
        "seconds": round(seconds, 2),
        "gb_per_second": round(n_bytes / seconds / 1e9, 2),
        "disk_gb_per_second": round(n_bytes / disk / 1e9, 2),
        "host_memory_mb": round(growth / 1e6, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
