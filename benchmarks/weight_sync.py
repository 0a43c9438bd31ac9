"""Seconds of a weight update and of a rollout, with a real server and random weights of any shape, without a trainer.

    python benchmarks/weight_sync.py --transport ipc                       one GPU, server and sender share it
    python benchmarks/weight_sync.py --transport nccl                      two GPUs, the server on the second
    python benchmarks/weight_sync.py --transport folder
    python benchmarks/weight_sync.py --transport ipc --generate 64         then rollouts of 64 prompts x 8 samples

The update sends every tensor of the Hugging Face file from buffers that are filled while the server loads, as a run
does. Two sets of weights take turns, and the server's greedy answers must change with them and come back. Each line of
the output is JSON. `--python` names the Python that has the server, if it is another.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from random_model import write_config
from torch import Tensor

from fivefold.bridge.hf_writer import save_hf
from fivefold.config.schema.rollout import GenerationConfig
from fivefold.rollout.contract import complete
from fivefold.rollout.engines import DIALECTS
from fivefold.rollout.hf_model import build_model
from fivefold.rollout.hf_names import file_tensors
from fivefold.rollout.protocol import SamplingParams, group_requests
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers.engine import ServerEngine
from fivefold.weights.device_buckets import DeviceBucket
from fivefold.weights.folder import NodePlace
from fivefold.weights.nccl_link import NcclLink
from fivefold.weights.stream import stacked
from fivefold.weights.table import TRANSPORTS
from fivefold.weights.transport import Route

TOKENIZER = "package:tiny-moe"
PROMPT_TOKENS = 190
Weights = dict[str, Tensor]


def main() -> None:
    args = parse_arguments()
    torch.cuda.init()
    if args.transport == "nccl":
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"  # of the server; this process has all devices since init
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), args.model, num_hidden_layers=args.layers, vocab_size=args.vocabulary)
        engine = start(args, folder)
        try:
            measure(args, engine, folder)
        finally:
            engine.close()


def measure(args: argparse.Namespace, engine: ServerEngine, folder: str) -> None:
    shapes = {name: tensor.view().shape for name, tensor in file_tensors(meta_model(folder)).items()}
    sets = [random_weights(shapes, seed) for seed in range(2)]
    n_bytes = sum(tensor.nbytes for tensor in sets[0].values())
    link = connect(engine) if args.transport == "nccl" else None
    answers = []
    for version in range(args.updates):
        seconds = update(engine, sets[version % 2], version, args, link)
        answers.append(greedy(engine))
        row = {"update": version, "seconds": round(seconds, 3), "GB": round(n_bytes / 1e9, 2), "tensors": len(shapes)}
        print(json.dumps({"transport": args.transport, **row, "GB/s": round(n_bytes / 1e9 / seconds, 1)}), flush=True)
    different = answers[0] != answers[1]
    same = all(answer == answers[version % 2] for version, answer in enumerate(answers))
    print(json.dumps({"answers change with the weights": different, "and come back": same}), flush=True)
    if args.transport == "ipc":
        sleep_and_wake(engine, sets[0], args)
    for options in ({}, {"logprob_share": 0.25}, {"logprob_share": 0.0}, {"seeded": True}) if args.generate else ():
        rollout(args, engine, options)


def sleep_and_wake(engine: ServerEngine, weights: Weights, args: argparse.Namespace) -> None:
    """Measure what the server gives back, and how long the way back to answers takes."""
    before = greedy(engine)
    began = time.perf_counter()
    engine.sleep()
    slept, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
    engine.wake()
    woken = time.perf_counter()
    seconds = update(engine, weights, 99, args, None)
    row = {"sleep": slept - began, "wake": woken - slept, "update": seconds, "free GB asleep": free / 1e9}
    print(json.dumps({name: round(value, 2) for name, value in row.items()} | {"same": greedy(engine) == before}))


def rollout(args: argparse.Namespace, engine: ServerEngine, options: dict[str, Any]) -> None:
    """Measure tokens per second of prompts that the server has not seen."""
    config = GenerationConfig(max_new_tokens=args.new_tokens)
    sampling = replace(SamplingParams.from_config(config), **({"seeded": False} | options))
    generator = torch.Generator().manual_seed(hash(str(options)) % 2**31)
    prompts = torch.randint(3, args.vocabulary, (args.generate, PROMPT_TOKENS), generator=generator).tolist()
    requests = group_requests(prompts, args.samples, ("benchmark",), sampling.logprob_share)
    began = time.perf_counter()
    completions = complete(engine, requests, sampling)
    seconds = time.perf_counter() - began
    tokens = sum(len(completion.token_ids) for completion in completions)
    row = {"sequences": len(requests), "tokens": tokens, "seconds": round(seconds, 2)}
    print(json.dumps({"rollout": options, **row, "tokens/s": round(tokens / seconds)}), flush=True)


def update(engine: ServerEngine, weights: Weights, version: int, args: argparse.Namespace, link: Any) -> float:
    """Return the seconds until the server has `weights`."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    if args.transport == "folder":
        engine.update_weights(((name, tensor.cpu()) for name, tensor in weights.items()), version)
    else:
        way = route(args)
        sender = way.transport.sender(way, rank=0, timeout_s=120)
        if link is not None:
            sender.link = link
        engine.load_buckets(ahead(sender.items(stacked(weights.items()))), version)
        sender.free()
    return time.perf_counter() - began


def ahead(items: Iterator[DeviceBucket]) -> Iterator[DeviceBucket]:
    """Yield announcements; each bucket is sent, and the next is filled, while the reader hands it to the server."""
    with ThreadPoolExecutor(1) as thread:
        bucket = next(items, None)
        while bucket is not None:
            upcoming = thread.submit(next, items, None)
            yield bucket
            bucket = upcoming.result()


def connect(engine: ServerEngine) -> NcclLink:
    """Enter an NCCL group with the server's one process."""
    link = NcclLink(engine.meeting, "127.0.0.1", 2, timeout_s=120)
    with ThreadPoolExecutor(1) as thread:
        entering = thread.submit(engine.enter, link.invite(), 1)
        link.enter()
        entering.result()
    return link


def greedy(engine: ServerEngine) -> list[list[int]]:
    sampling = SamplingParams.from_config(GenerationConfig(max_new_tokens=12, greedy=True))
    requests = group_requests([[1, 20, 300, 4000, 500, 60], [7, 8, 9]], 1, ("greedy",))
    return [completion.token_ids.tolist() for completion in complete(engine, requests, sampling)]


def start(args: argparse.Namespace, folder: str) -> ServerEngine:
    spec = ReplicaSpec(
        backend=args.backend,
        path=folder,
        tokenizer_path=TOKENIZER,
        dtype="bfloat16",
        max_batch_size=args.batch,
        load_weights=False,
        run=f"benchmark{os.getpid()}",
        tp=1,
        pp=1,
        max_length=PROMPT_TOKENS + args.new_tokens + 8,
        seed=1,
        can_sleep=args.transport == "ipc",
        reserved=0,
        memory_fraction=args.memory_fraction,
        python=args.python,
        arguments=tuple(args.server_args),
        needs_text=False,
        route=route(args),
    )
    save = partial(save_hf, config_source=folder, tokenizer_source=TOKENIZER)
    return ServerEngine(DIALECTS[args.backend], spec, NodePlace(spec.run, 0, 1), save)


def route(args: argparse.Namespace) -> Route:
    transport = TRANSPORTS[args.transport]
    return Route(transport, "bfloat16", args.verify, n_receivers=int(transport.is_collective))


def meta_model(folder: str) -> Any:
    model, _ = build_model(folder, dtype=torch.bfloat16, device=torch.device("meta"), load_weights=False)
    return model


def random_weights(shapes: dict[str, torch.Size], seed: int) -> Weights:
    generator = torch.Generator("cuda").manual_seed(seed)
    new = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
    return {
        name: torch.ones(shape, device="cuda", dtype=torch.bfloat16) if len(shape) == 1 else new(shape) * 0.02
        for name, shape in shapes.items()
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=list(TRANSPORTS), default="ipc")
    parser.add_argument("--backend", choices=sorted(DIALECTS), default="vllm")
    parser.add_argument("--python", help="Python that has the server")
    parser.add_argument("--model", default="Qwen3-30B-A3B", help="a shape of fivefold/families")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--verify", action="store_true", help="compare checksums, as rollout.verify_weights does")
    parser.add_argument("--memory-fraction", type=float, default=0.6)
    parser.add_argument("--batch", type=int, default=512, help="sequences that the server decodes together")
    parser.add_argument("--generate", type=int, default=0, help="prompts of the rollouts; 0: none")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=1024)
    parser.add_argument("--server-args", nargs="*", default=[], help="further arguments, for example=--enforce-eager")
    return parser.parse_args()


if __name__ == "__main__":
    main()
