"""Seconds and memory of the optimizer's step and of offloading, for each precision and place of its state.

    torchrun --nproc-per-node 1 benchmarks/optimizer_step.py
    torchrun --nproc-per-node 1 benchmarks/optimizer_step.py --formats small-device small-host --layers 8
    torchrun --nproc-per-node 2 benchmarks/optimizer_step.py --backend megatron:d2e2 --formats small-host --layers 48

Each format is an engine of its own over random weights with random gradients, no forward pass. It prints one line of
JSON: seconds of the fastest step, GB on the device and on the host, the share of the host link's speed that the step
reaches, the largest memory during a step beside what stays, and the seconds of offloading and bringing back.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from random_model import write_config

from fivefold.config.schema.engine import EngineConfig, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.engine.contract import OFFLOADABLE, EngineOptions
from fivefold.layout.parser import parse_backend
from fivefold.mcore.engine import MegatronEngine

SMALL = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16", "store_param_remainders": True}
FORMATS: dict[str, dict[str, Any]] = {
    "float32-device": {},
    "remainders-device": {"store_param_remainders": True},
    "small-device": SMALL,
    "float32-host": {"state_on": "host"},
    "remainders-host": {"store_param_remainders": True, "state_on": "host"},
    "small-host": {**SMALL, "state_on": "host"},
}


def main() -> None:
    args = parse_arguments()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    link = link_speed() if dist.get_rank() == 0 else {}
    if dist.get_rank() == 0:
        print(json.dumps({"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "link_gb_s": link}))
    for name in args.formats:
        row = measure(args, name)
        if dist.get_rank() == 0:
            shares = {way: row["link_gb"] / row["step_s"] / speed for way, speed in link.items()}
            row["link_share"] = {way: round(share, 3) for way, share in shares.items()}
            print(json.dumps(row), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        dist.barrier()
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-30B-A3B", help="one of fivefold/families/shapes/, without .json")
    parser.add_argument("--layers", type=int, default=8, help="number of layers, in place of the model's own")
    parser.add_argument("--backend", default="megatron:d1")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--bf16-gradients", action="store_true")
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args()


def link_speed(n_bytes: int = 2**30) -> dict[str, float]:
    """Return GB/s between pinned host memory and the device, each way alone."""
    host = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    ways: dict[str, Callable[[], Any]] = {
        "in": lambda: device.copy_(host, non_blocking=True),
        "out": lambda: host.copy_(device, non_blocking=True),
    }
    return {way: round(n_bytes / 1e9 / min(seconds(copy) for _ in range(3)), 1) for way, copy in ways.items()}


def seconds(action: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the measurements of one format, those of rank 0."""
    built = time.perf_counter()
    engine = build(args, name)
    built = time.perf_counter() - built
    optimizer = engine.optimizer
    assert optimizer is not None
    times, before, peak = [], torch.cuda.memory_allocated(), 0
    for _ in range(args.steps):
        for parameter in engine.parameters.with_gradient:
            vars(parameter.tensor)["main_grad"].normal_(std=1e-3)
        torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        times.append(seconds(optimizer.step))
        peak = max(peak, torch.cuda.max_memory_allocated())
    state = [tensor for bucket in optimizer.state.buckets for tensor in bucket.stored.values()]
    state_gb = sum(tensor.nbytes for tensor in state) / 1e9
    on_host = bool(state) and not state[0].is_cuda
    row = {
        "format": name,
        "backend": args.backend,
        "layers": args.layers,
        "parameters_of_rank": sum(parameter.tensor.numel() for parameter in engine.parameters.with_gradient),
        "build_s": round(built, 1),
        "step_s": round(min(times[1:]), 4),
        "state_gb": round(state_gb, 2),
        "on_host": on_host,
        "link_gb": round(state_gb, 2) if on_host else 0.0,
        "allocated_gb": round(before / 1e9, 2),
        "peak_beside_gb": round((peak - before) / 1e9, 2),
    }
    return {**row, **offloading(engine)}


def offloading(engine: MegatronEngine) -> dict[str, Any]:
    """Return seconds and freed GB of each kind; the second time, because the first one allocates pinned memory."""
    found: dict[str, Any] = {}
    for kind in OFFLOADABLE:
        engine.offload([kind])
        engine.onload([kind])
        before = torch.cuda.memory_allocated()
        freed: list[int] = []
        out = seconds(lambda kind=kind, freed=freed: freed.append(engine.offload([kind])))
        measured = before - torch.cuda.memory_allocated()
        back = seconds(lambda kind=kind: engine.onload([kind]))
        found[f"offload_{kind}"] = {
            "freed_gb": round(freed[-1] / 1e9, 2),
            "measured_gb": round(measured / 1e9, 2),
            "out_s": round(out, 3),
            "back_s": round(back, 3),
        }
    return found


def build(args: argparse.Namespace, name: str) -> MegatronEngine:
    megatron = MegatronConfig(optimizer=FORMATS[name], ddp={"grad_reduce_in_fp32": not args.bf16_gradients})
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), args.model, num_hidden_layers=args.layers)
        engine = EngineConfig(path=folder, backend=args.backend, init_from_scratch=True, megatron=megatron)
        return MegatronEngine(
            engine, parse_backend(args.backend), EngineOptions(seed=1, optimizer=OptimizerConfig(lr=1e-5))
        )


if __name__ == "__main__":
    main()
