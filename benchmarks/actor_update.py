"""Speed of the actor's update: forward, backward and optimizer step of a model of any shape with random weights.

    torchrun --nproc-per-node 1 benchmarks/actor_update.py --layers 8
    torchrun --nproc-per-node 4 benchmarks/actor_update.py --layers 8 --backend "megatron:(attn:d1t2c2|ffn:e4)"
    torchrun --nproc-per-node 2 benchmarks/actor_update.py --model Qwen3-8B --layers 12 --backend megatron:t2
    torchrun --nproc-per-node 2 benchmarks/actor_update.py --backend fsdp:d2
    torchrun --nproc-per-node 1 benchmarks/actor_update.py --set megatron.recompute=selective
    torchrun --nproc-per-node 1 benchmarks/actor_update.py --layers 48 --recompute full --lora 32
    torchrun --nproc-per-node 2 benchmarks/actor_update.py --recipe recipe.yaml      the actor of a recipe, as it is

Each run prints one line of JSON: tokens/s, model TFLOP/s per GPU (recomputation not counted), how many of a step's
seconds are the optimizer's, peak memory, the losses, which must agree across layouts, and a checksum of the weights
after the last step, which agrees between two runs if all bits do. With --profile, it also prints the kernels that take
the most time; it records every one of them, so a few micro-batches are enough.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from random_model import write_config

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.batch import Batch
from fivefold.config.load import load_recipe
from fivefold.config.schema.engine import EngineConfig, OptimizerConfig
from fivefold.config.schema.lora import LoraConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.config.source import apply_overrides
from fivefold.engine.contract import EngineOptions, TrainingEngine
from fivefold.engine.packing import Share
from fivefold.families.backward import training_flops
from fivefold.families.read import load_shape
from fivefold.families.shape import ModelShape
from fivefold.layout.grid import rank_grid
from fivefold.layout.parser import parse_backend
from fivefold.roles.engines import build_engine
from fivefold.roles.specs import engine_config
from fivefold.weights.device_buckets import checksum


def main() -> None:
    args = parse_arguments()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), args.model, num_hidden_layers=args.layers)
        config, optimizer = described(args, folder)
        shape = load_shape(Path(config.path))
        layout = parse_backend(config.backend)
        options = EngineOptions(seed=1, optimizer=optimizer, total_steps=args.steps)
        if args.lora:
            shape = shape.with_lora(LoraConfig(rank=args.lora))
            options = replace(options, adapters=shape.adapters)
        engine = build_engine(config, layout, options)
    batch = make_batch(args, shape.vocab)
    share = engine.planner.plan(batch.lengths).share(batch, rank_grid(layout)[dist.get_rank()].dp)
    losses, seconds, of_optimizer = [], [], []
    for _ in range(args.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(float(engine.forward_backward(share, SFTLoss())["loss"].sum))
        torch.cuda.synchronize()
        computed = time.perf_counter()
        engine.optim_step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        of_optimizer.append(time.perf_counter() - computed)
    peaks = [0.0] * dist.get_world_size()
    dist.all_gather_object(peaks, round(torch.cuda.max_memory_allocated() / 1e9, 1))
    weights = checksum(engine.export_weights())
    if dist.get_rank() == 0:
        row = described_run(args, config, dist.get_world_size()) | {
            **({"lora": shape.adapted} if args.lora else {}),
            **speed(shape, batch, seconds),
            "optimizer_seconds": [round(value, 3) for value in of_optimizer],
            "peak_memory_gb": max(peaks),
            "peak_memory_gb_by_rank": peaks,
            "losses": [round(value, 5) for value in losses],
            "weights": weights,
        }
        print(json.dumps(row), flush=True)
    if args.profile:
        profile(engine, share)
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-30B-A3B", help="one of fivefold/families/shapes/, without .json")
    parser.add_argument("--layers", type=int, default=8, help="number of layers, in place of the model's own")
    parser.add_argument("--backend", default="megatron:d1")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens in a sequence")
    parser.add_argument("--sequences", type=int, default=16, help="sequences in a step, over all ranks")
    parser.add_argument("--micro-tokens", type=int, default=8192, help="most tokens in a micro-batch")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lora", type=int, help="rank of adapters that are trained in place of the weights")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="other keys of the engine's section")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--recipe", help="recipe of which to take the actor, in place of all options of the engine")
    return parser.parse_args()


def described(args: argparse.Namespace, folder: str) -> tuple[EngineConfig, OptimizerConfig]:
    """Return the engine and its optimizer: those of the recipe, or those that the options describe."""
    if args.recipe:
        actor = load_recipe(args.recipe, [], TrainRecipe).actor
        return engine_config(actor), actor.optimizer
    config = engine_section(folder, args.backend, args.recompute, args.micro_tokens, args.set)
    return config, OptimizerConfig(lr=1e-5)


def engine_section(folder: str, backend: str, recompute: str, micro_tokens: int, overrides: list[str]) -> EngineConfig:
    """Return the engine's section of a run with these options."""
    values, problems = apply_overrides(
        {
            "path": folder,
            "backend": backend,
            "init_from_scratch": True,
            "mb_spec": {"max_tokens_per_mb": micro_tokens},
            parse_backend(backend).backend: {"recompute": recompute},
        },
        overrides,
    )
    if problems:
        raise SystemExit("\n".join(problems))
    return EngineConfig.model_validate(values)


def make_batch(args: argparse.Namespace, vocab: int) -> Batch:
    tokens = args.sequence * args.sequences
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (tokens,), generator=generator)
    return Batch((args.sequence,) * args.sequences, ids, torch.ones(tokens))


def described_run(args: argparse.Namespace, config: EngineConfig, gpus: int) -> dict[str, Any]:
    """Return what was run, on what."""
    return {
        "model": args.model,
        "backend": config.backend,
        "layers": args.layers,
        "gpus": gpus,
        "recompute": (config.fsdp if config.backend.startswith("fsdp") else config.megatron).recompute,
        "set": args.set,
        "micro_tokens": config.mb_spec.max_tokens_per_mb,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def speed(shape: ModelShape, batch: Batch, seconds: list[float]) -> dict[str, Any]:
    """Return the speed of the fastest step after the first."""
    best = min(seconds[1:])
    flops = training_flops(shape, batch.lengths, batch.n_tokens)
    return {
        "tokens_per_step": batch.n_tokens,
        "seconds": [round(value, 3) for value in seconds],
        "tokens_per_second": round(batch.n_tokens / best),
        "tflops_per_gpu": round(flops / best / dist.get_world_size() / 1e12, 1),
    }


def profile(engine: TrainingEngine, share: Share) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        engine.forward_backward(share, SFTLoss())
        engine.optim_step()
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=45, max_name_column_width=90))


if __name__ == "__main__":
    main()
