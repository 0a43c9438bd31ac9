"""Speed of the actor's update: forward, backward and optimizer step of a model of any shape with random weights.

    torchrun --nproc-per-node 1 benchmarks/actor_update.py --layers 8
    torchrun --nproc-per-node 4 benchmarks/actor_update.py --layers 8 --backend "megatron:(attn:d1t2c2|ffn:e4)"
    torchrun --nproc-per-node 2 benchmarks/actor_update.py --model Qwen3-8B --layers 12 --backend megatron:t2
    torchrun --nproc-per-node 2 benchmarks/actor_update.py --recipe recipe.yaml      the actor of a recipe, as it is

Each run prints one line of JSON: tokens/s, model TFLOP/s per GPU (recomputation not counted), peak memory, and the
losses, which must agree across layouts. With --profile, it also prints the kernels that take the most time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from random_model import write_config

from fivefold.algorithms.loss import SFTLoss
from fivefold.config.load import load_recipe
from fivefold.config.schema.engine import EngineConfig, MicroBatchConfig, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.sharing import Share
from fivefold.families.flops import training_flops
from fivefold.layout.parser import parse_backend
from fivefold.mcore.engine import MegatronEngine
from fivefold.roles.launch import engine_config
from fivefold.types import Batch


def main() -> None:
    args = parse_arguments()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), args.model, num_hidden_layers=args.layers)
        engine = build(args, folder)
    batch = make_batch(args, engine.shape.vocab)
    share = engine.planner.plan(batch.lengths).share(batch, engine.groups.dp.rank())
    losses, seconds = [], []
    for _ in range(args.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(engine.forward_backward(share, SFTLoss())["loss"])
        engine.optim_step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        report(args, engine, batch, losses, seconds)
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
    parser.add_argument("--chunk", type=int, default=1024, help="tokens whose logits exist at one time")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--recipe", help="recipe of which to take the actor, in place of all options of the engine")
    return parser.parse_args()


def build(args: argparse.Namespace, folder: str) -> MegatronEngine:
    if args.recipe:
        actor = load_recipe(args.recipe, [], TrainRecipe).actor
        config, optimizer = engine_config(actor, actor.path), actor.optimizer
    else:
        config, optimizer = described(args, folder), OptimizerConfig(lr=1e-5)
    return MegatronEngine(config, parse_backend(config.backend), seed=1, optimizer=optimizer, total_steps=args.steps)


def described(args: argparse.Namespace, folder: str) -> EngineConfig:
    return EngineConfig(
        path=folder,
        backend=args.backend,
        init_from_scratch=True,
        mb_spec=MicroBatchConfig(max_tokens_per_mb=args.micro_tokens),
        megatron=MegatronConfig(logprob_chunk_size=args.chunk, recompute=args.recompute),
    )


def make_batch(args: argparse.Namespace, vocab: int) -> Batch:
    tokens = args.sequence * args.sequences
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (tokens,), generator=generator)
    return Batch((args.sequence,) * args.sequences, ids, torch.ones(tokens))


def report(
    args: argparse.Namespace, engine: MegatronEngine, batch: Batch, losses: list[float], seconds: list[float]
) -> None:
    best = min(seconds[1:])
    gpus = dist.get_world_size()
    flops = training_flops(engine.shape, batch.lengths, batch.n_tokens)
    row = {
        "model": args.model,
        "backend": engine.config.backend,
        "layers": args.layers,
        "gpus": gpus,
        "recompute": engine.config.megatron.recompute,
        "micro_tokens": engine.config.mb_spec.max_tokens_per_mb,
        "tokens_per_step": batch.n_tokens,
        "seconds": [round(value, 3) for value in seconds],
        "tokens_per_second": round(batch.n_tokens / best),
        "tflops_per_gpu": round(flops / best / gpus / 1e12, 1),
        "peak_memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "losses": [round(value, 5) for value in losses],
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    print(json.dumps(row), flush=True)


def profile(engine: MegatronEngine, share: Share) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        engine.forward_backward(share, SFTLoss())
        engine.optim_step()
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=45, max_name_column_width=90))


if __name__ == "__main__":
    main()
