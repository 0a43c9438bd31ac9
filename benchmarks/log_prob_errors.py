"""How far log-probs in bfloat16 are from transformers' in float32, engine by engine, of a model with random weights.

    python benchmarks/log_prob_errors.py --model gpt-oss-20b --layers 4 --shape num_local_experts=8
    python benchmarks/log_prob_errors.py --model Qwen3-Next-80B-A3B --layers 4 --shape num_experts=32 \\
        --vllm gdn_prefill_backend=triton
    python benchmarks/log_prob_errors.py --layers 2 --shape hidden_size=64 --engines transformers trainer

A mismatch between rollout and trainer is the sum of two errors. This table has both, with transformers in bfloat16 for
comparison: an engine whose error is a multiple of the others' computes something else. Each engine reads the same files
and scores the same random tokens, in a process of its own. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import yaml
from random_model import write_config, write_tokenizer
from rich.console import Console
from rich.table import Table

REFERENCE = "transformers in float32"
ENGINES = ("transformers", "trainer", "vllm")


def main() -> None:
    args = parse_arguments()
    if args.engine:
        tokens_SL = torch.load(args.folder / "tokens.pt")
        torch.save(SCORES[args.engine](args, tokens_SL), args.folder / f"{args.engine}.pt")
        return
    with tempfile.TemporaryDirectory(prefix="log-prob-errors-") as name:
        args.folder = Path(name)
        write_model(args)
        scores = {engine: scored(args, engine) for engine in (REFERENCE, *args.engines)}
    report(args, scores)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-30B-A3B", help="a shape of fivefold/families")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--shape", nargs="*", default=[], metavar="KEY=JSON", help="other keys of its config.json")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of a sequence")
    parser.add_argument("--vllm", nargs="*", default=[], metavar="KEY=VALUE", help="further arguments of vLLM's LLM")
    parser.add_argument("--trainer", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of the actor")
    parser.add_argument("--engine", choices=(REFERENCE, *ENGINES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def write_model(args: argparse.Namespace) -> None:
    """Write a model whose weights are bfloat16's numbers, its tokenizer and the tokens to score."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {key: json.loads(value) for key, _, value in (item.partition("=") for item in args.shape)}
    config = write_config(args.folder, args.model, num_hidden_layers=args.layers, **shape)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.folder), dtype=torch.bfloat16)
    model.save_pretrained(args.folder)
    (args.folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(args.folder, config["vocab_size"])
    torch.save(torch.randint(2, config["vocab_size"], (args.sequences, args.tokens)), args.folder / "tokens.pt")


def scored(args: argparse.Namespace, engine: str) -> torch.Tensor:
    """Return an engine's log-probs [S, L - 1] of the tokens after the first."""
    own = ["--engine", engine, "--folder", str(args.folder)]
    command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], *own]
    subprocess.run(command, check=True, stdout=sys.stderr)
    scores: torch.Tensor = torch.load(args.folder / f"{engine}.pt")
    return scores


def by_transformers(args: argparse.Namespace, tokens_SL: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    rows = []
    with torch.inference_mode(), torch.device(DEVICE):
        model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype)
        for tokens_L in tokens_SL.to(DEVICE):
            logits_LV = model(tokens_L[None], use_cache=False).logits[0, :-1].float()
            rows.append(logits_LV.log_softmax(-1).gather(-1, tokens_L[1:, None])[:, 0].cpu())
    return torch.stack(rows)


def by_trainer(args: argparse.Namespace, tokens_SL: torch.Tensor) -> torch.Tensor:
    import torch.distributed as dist
    from actor_update import engine_section

    from fivefold.batch import Batch
    from fivefold.engine.contract import EngineOptions
    from fivefold.engine.scores import Logprobs
    from fivefold.layout.parser import parse_backend
    from fivefold.roles.engines import build_engine

    count, length = tokens_SL.shape
    overrides = ["init_from_scratch=false", "dtype=bfloat16", *args.trainer]
    config = engine_section(str(args.folder), "megatron:d1", "none", count * length, overrides)
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    meeting = f"file://{args.folder}/meeting"
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", init_method=meeting, rank=0, world_size=1)
    engine = build_engine(config, parse_backend(config.backend), EngineOptions(seed=1))
    mask_SL = torch.ones(count, length)
    mask_SL[:, 0] = 0
    batch = Batch((length,) * count, tokens_SL.flatten(), mask_SL.flatten())
    scores = engine.score(engine.planner.plan(batch.lengths).share(batch, 0), Logprobs())["logprobs"]
    return scores.view(count, length)[:, 1:]


def by_vllm(args: argparse.Namespace, tokens_SL: torch.Tensor) -> torch.Tensor:
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a look at the device forbids forks
    from vllm import LLM, SamplingParams, TokensPrompt

    further: dict[str, Any] = {key: yaml.safe_load(value) for key, value in (item.split("=", 1) for item in args.vllm)}
    engine = LLM(
        str(args.folder),
        dtype="bfloat16",
        max_model_len=tokens_SL.shape[1] + 1,
        gpu_memory_utilization=0.2,
        enforce_eager=True,
        enable_prefix_caching=False,
        **further,
    )
    prompts = [TokensPrompt(prompt_token_ids=tokens_L) for tokens_L in tokens_SL.tolist()]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False))
    return torch.tensor(
        [
            [place[token].logprob for token, place in zip(tokens_L[1:], output.prompt_logprobs[1:], strict=True)]
            for tokens_L, output in zip(tokens_SL.tolist(), outputs, strict=True)
        ]
    )


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCORES = {
    REFERENCE: lambda args, tokens_SL: by_transformers(args, tokens_SL, torch.float32),
    "transformers": lambda args, tokens_SL: by_transformers(args, tokens_SL, torch.bfloat16),
    "trainer": by_trainer,
    "vllm": by_vllm,
}


def report(args: argparse.Namespace, scores: dict[str, torch.Tensor]) -> None:
    """Print the mean distance of each two engines, in nats a token."""
    table = Table("", *scores, title=f"{args.model}, {args.layers} layers: mean distance of log-probs, nats a token")
    apart = {
        frozenset(pair): float((scores[pair[0]] - scores[pair[1]]).abs().mean()) for pair in combinations(scores, 2)
    }
    for one in scores:
        table.add_row(one, *("" if one == other else f"{apart[frozenset((one, other))]:.4f}" for other in scores))
    Console(stderr=True).print(table)
    rows = {" - ".join(sorted(pair)): round(value, 5) for pair, value in apart.items()}
    print(json.dumps({"model": args.model, "layers": args.layers, "shape": args.shape, "device": DEVICE, **rows}))


if __name__ == "__main__":
    main()
