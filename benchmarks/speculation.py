"""Tokens per second of a server with speculative decoding, and the share of drafted tokens that it accepts.

    python benchmarks/speculation.py --draft 0 1 3 --batch 1 16 128
    python benchmarks/speculation.py --write FOLDER        write the model alone, for a run of `fivefold train`

Random layers for multi-token prediction guess nothing. So the weights are made such that these layers are right: every
token has one likely successor, of probability `--acceptance`, in the model (its attention and its MLPs add nothing to
the embedding, from which the output layer reads the successor) and in the layers that draft (which pass the embedding
of the last token on). Layers compute as many products as with any weights. The rest of the probability is spread over
the vocabulary, so that drafts are refused as often as they should be.

The server starts without weights, gets them by CUDA IPC, sleeps, and gets those of another chain of successors. The
accepted share must be `--acceptance` with both, and the tokens must follow the chain: then the layers that draft have
their own weights, which no update brings, and the embedding and output layer of the policy. Each line of the output is
JSON. `--python` names the Python that has the server, if it is another.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from random_model import write_config, write_tokenizer
from torch import Tensor

from fivefold.bridge.decoder import expected_tensors
from fivefold.bridge.hf_reader import HFWeights
from fivefold.bridge.hf_writer import save_hf
from fivefold.bridge.shard_plan import TensorSpec
from fivefold.config.schema.rollout import GenerationConfig, SpeculativeConfig
from fivefold.families.read import load_shape
from fivefold.families.registry import find_family
from fivefold.rollout.contract import complete
from fivefold.rollout.engines import DIALECTS
from fivefold.rollout.protocol import SamplingParams, group_requests
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers.engine import ServerEngine
from fivefold.types import Completion
from fivefold.weights.folder import NodePlace
from fivefold.weights.stream import stacked
from fivefold.weights.table import TRANSPORTS
from fivefold.weights.transport import Route

PROMPT_TOKENS = 190
STEPS = (5, 7)
"""How far the successor of a token is from it, in both chains."""
SILENT = re.compile(r".*\.(o_proj|out_proj|down_proj)\.weight")
"""Matrices whose outputs are added to the stream of a token."""


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="speculation-") as name:
        folder = Path(args.write or name)
        write_model(args, folder)
        for n_tokens in [] if args.write else args.draft:
            engine = start(args, str(folder), n_tokens)
            try:
                measure(args, engine, folder, n_tokens)
            finally:
                engine.close()


def write_model(args: argparse.Namespace, folder: Path) -> None:
    """Write a model folder with layers for multi-token prediction, whose tokens follow the first chain."""
    folder.mkdir(parents=True, exist_ok=True)
    changes = {key: json.loads(value) for key, _, value in (item.partition("=") for item in args.shape)}
    changes |= {"num_hidden_layers": args.layers, "initializer_range": 0.02}
    model_type = write_config(folder, args.model, **changes)["model_type"]
    count = "mtp_num_hidden_layers" if model_type.startswith("qwen3_5") else "num_nextn_predict_layers"
    config = write_config(folder, args.model, **changes, **{count: 1})
    write_tokenizer(folder, config["vocab_size"])
    shapes = expected_tensors(load_shape(folder))
    further = further_shapes(shapes, args.layers, config["hidden_size"], find_family(model_type).predicts_further)
    made = {name: TensorSpec(dtype_of(name), shape) for name, shape in {**shapes, **further}.items()}
    save_all(folder, made, chain_weights(args, {**shapes, **further}, STEPS[0]))


def save_all(folder: Path, tensors: dict[str, TensorSpec], weights: Iterator[tuple[str, Tensor]]) -> None:
    """Write weights of the folder's model to it."""
    source = Path(tempfile.mkdtemp())
    for file in folder.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    config = (folder / "config.json").read_text()
    save_hf(folder, weights, source, tensors=tensors)
    (folder / "config.json").write_text(config)


def further_shapes(
    shapes: dict[str, tuple[int, ...]], n_layers: int, hidden: int, is_behind: bool
) -> dict[str, tuple[int, ...]]:
    """Return the tensors of one layer for multi-token prediction: the last layer's, and what joins its two inputs."""
    own, last = (f"model.layers.{n_layers}.", f"model.layers.{n_layers - 1}.")
    if not is_behind:
        own, last = "mtp.layers.0.", next(k for k in shapes if f"layers.{n_layers - 1}." in k).partition("input")[0]
    layer = {own + name.removeprefix(last): shape for name, shape in shapes.items() if name.startswith(last)}
    if is_behind:
        norms, joint = ("enorm", "hnorm", "shared_head.norm"), f"{own}eh_proj.weight"
        return layer | {f"{own}{norm}.weight": (hidden,) for norm in norms} | {joint: (hidden, 2 * hidden)}
    norms, joint = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "mtp.fc.weight"
    return layer | {f"mtp.{norm}.weight": (hidden,) for norm in norms} | {joint: (hidden, 2 * hidden)}


def chain_weights(
    args: argparse.Namespace, shapes: dict[str, tuple[int, ...]], step: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights with which a token `t` is followed by `t + step` with the probability `--acceptance`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    centered = "Qwen3-Next" in args.model or "Qwen3.5" in args.model
    embedding: Tensor | None = None
    for name, shape in shapes.items():
        weight = torch.empty(shape, device=device, dtype=torch.float32)
        if name.endswith("embed_tokens.weight"):
            embedding = torch.nn.functional.normalize(weight.normal_(generator=generator), dim=1)
            weight = embedding
        elif name == "lm_head.weight":
            assert embedding is not None
            weight = embedding.roll(step, 0) * sharpness(args.acceptance, *shape)
        elif name.endswith(("eh_proj.weight", "mtp.fc.weight")):
            weight.copy_(torch.eye(*shape))
        elif SILENT.fullmatch(name):
            weight.zero_()
        elif len(shape) == 1:
            weight.fill_(0.0 if centered or name.endswith("bias") else 1.0)
        else:
            weight.normal_(std=0.02, generator=generator)
        yield name, weight.to(dtype_of(name))


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16


def sharpness(probability: float, vocabulary: int, hidden: int) -> float:
    """Return the length of the output layer's rows with which the successor of a token has a probability.

    The norm makes the embedding `hidden ** 0.5` long. The successor's logit is x = length * hidden ** 0.5, and those of
    other tokens are normal with the deviation x / hidden ** 0.5.
    """
    wanted, low, high = math.log(probability / (1 - probability)), 0.0, 100.0
    for _ in range(60):
        x = (low + high) / 2
        odds = x - math.log(vocabulary) - x * x / hidden / 2
        low, high = (x, high) if odds < wanted else (low, x)
    return low / hidden**0.5


def start(args: argparse.Namespace, folder: str, n_tokens: int) -> ServerEngine:
    spec = ReplicaSpec(
        backend=args.backend,
        path=folder,
        tokenizer_path=folder,
        dtype="bfloat16",
        max_batch_size=max(args.batch),
        load_weights=False,
        run=f"benchmark{os.getpid()}",
        tp=1,
        pp=1,
        max_length=PROMPT_TOKENS + args.new_tokens + 8,
        seed=1,
        can_sleep=True,
        reserved=0,
        memory_fraction=args.memory_fraction,
        python=args.python,
        arguments=tuple(args.server_args),
        needs_text=False,
        speculative=SpeculativeConfig(method=args.method, n_tokens=n_tokens) if n_tokens else None,
        route=Route(TRANSPORTS["ipc"], "bfloat16", checksum=False),
    )
    save = partial(save_hf, config_source=folder, tokenizer_source=folder)
    return ServerEngine(DIALECTS[args.backend], spec, NodePlace(spec.run, 0, 1), save)


def measure(args: argparse.Namespace, engine: ServerEngine, folder: Path, n_tokens: int) -> None:
    for version, step in enumerate(STEPS):
        if version:
            engine.sleep()
            engine.wake_weights()
        update(args, engine, folder, version)
        engine.wake()
        for batch in args.batch:
            row = rollout(args, engine, batch, n_tokens, step)
            print(json.dumps({"backend": args.backend, "version": version, **row}), flush=True)


def update(args: argparse.Namespace, engine: ServerEngine, folder: Path, version: int) -> None:
    sender = TRANSPORTS["ipc"].sender(Route(TRANSPORTS["ipc"], "bfloat16", checksum=False), rank=0, timeout_s=120)
    engine.load_buckets(sender.items(stacked(weights_of(args, folder, STEPS[version]))), version)
    sender.free()


def weights_of(args: argparse.Namespace, folder: Path, step: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the folder's weights with another chain's output layer, one after the other, because the server needs the
    GPU's memory."""
    embedding = torch.empty(0)
    with HFWeights(folder) as stored:
        for name in expected_tensors(load_shape(folder)):
            weight = stored.read(name).cuda()
            if name.endswith("embed_tokens.weight"):
                embedding = weight
            elif name == "lm_head.weight":
                weight = (embedding.float().roll(step, 0) * sharpness(args.acceptance, *embedding.shape)).bfloat16()
            yield name, weight


def rollout(args: argparse.Namespace, engine: ServerEngine, batch: int, n_tokens: int, step: int) -> dict[str, Any]:
    """Return tokens per second of `batch` sequences at a time, and what became of the drafts."""
    vocabulary = engine._config.vocab_size
    generator = torch.Generator().manual_seed(step)
    prompts = torch.randint(2, vocabulary, (batch, PROMPT_TOKENS), generator=generator).tolist()
    sampling = SamplingParams.from_config(GenerationConfig(max_new_tokens=args.new_tokens, temperature=1.0))
    engine.take_counts()
    began = time.perf_counter()
    completions = complete(engine, group_requests(prompts, 1, ("speculation",)), sampling)
    seconds = time.perf_counter() - began
    counts = engine.take_counts()
    n_sampled = sum(len(completion.token_ids) for completion in completions)
    row: dict[str, Any] = {"draft": n_tokens, "sequences": batch, "tokens": n_sampled, "seconds": round(seconds, 2)}
    row |= {"tokens/s": round(n_sampled / seconds), "on the chain": on_chain(completions, prompts, step, vocabulary)}
    row["log-prob"] = round(sum(float(c.logprobs.mean()) for c in completions) / batch, 4)
    if counts.drafted:
        row["accepted"] = round(counts.accepted / counts.drafted, 4)
    return row


def on_chain(completions: list[Completion], prompts: list[list[int]], step: int, vocabulary: int) -> float:
    """Return the share of the sampled tokens that are the likely successor of the token before."""
    hits = total = 0
    for completion, prompt in zip(completions, prompts, strict=True):
        tokens = [prompt[-1], *completion.token_ids.tolist()]
        hits += sum((before + step) % vocabulary == token for before, token in pairwise(tokens))
        total += len(tokens) - 1
    return round(hits / total, 4)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=sorted(DIALECTS), default="vllm")
    parser.add_argument("--python", help="Python that has the server")
    parser.add_argument("--model", default="GLM-4.5-Air", help="a shape of fivefold/families")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--shape", nargs="*", default=["n_routed_experts=32"], metavar="KEY=JSON")
    parser.add_argument("--method", choices=["mtp", "ngram"], default="mtp")
    parser.add_argument("--draft", type=int, nargs="+", default=[0, 1, 3], help="drafted tokens; 0: no speculation")
    parser.add_argument("--acceptance", type=float, default=0.8, help="probability of the likely successor")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 128], help="sequences at one time")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--memory-fraction", type=float, default=0.6)
    parser.add_argument("--write", type=Path, help="write the model to this folder, and do nothing else")
    parser.add_argument("--server-args", nargs="*", default=[], help="further arguments, for example=--enforce-eager")
    return parser.parse_args()


if __name__ == "__main__":
    main()
