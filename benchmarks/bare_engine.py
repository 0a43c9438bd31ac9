"""What the programs that measure an inference engine alone share: options, prompts and the two runs."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that `grpo_step.py` gives."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", required=True)
    made.add_argument("--prompts", type=Path, required=True)
    made.add_argument("--share", default="0/1", help="which of how many equal shares")
    made.add_argument("--samples", type=int, default=8)
    made.add_argument("--new-tokens", type=int, default=1024)
    made.add_argument("--batch", type=int, default=512)
    made.add_argument("--tensor-parallel", type=int, default=1)
    made.add_argument("--logprobs", action="store_true", help="ask for the log-prob of every sampled token")
    made.add_argument("--memory-fraction", type=float, default=0.85)
    return made


def prompts_of(args: argparse.Namespace) -> list[str]:
    """Return the texts of this program's share of the prompts."""
    number, of = map(int, args.share.split("/"))
    return [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()][number::of]


def measure(args: argparse.Namespace, generate: Callable[[], int], before: Callable[[], object] = lambda: None) -> None:
    """Print the seconds of two calls of `generate`, which returns the number of tokens that it has sampled.

    Args:
        args: the options of the program.
        generate: generates all answers.
        before: called before each of them, which does not count.
    """
    seconds, tokens = [], 0
    for _ in range(2):
        before()
        began = time.perf_counter()
        tokens = generate()
        seconds.append(round(time.perf_counter() - began, 2))
    print(
        json.dumps({"share": args.share, "logprobs": args.logprobs, "seconds": seconds, "sampled_tokens": tokens}),
        flush=True,
    )
