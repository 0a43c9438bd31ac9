"""Seconds that SGLang alone, without a server, needs for a share of a step's prompts. `grpo_step.py` starts it.

    python benchmarks/bare_sglang.py --model FOLDER --prompts prompts.jsonl --share 0/2 --samples 8 --new-tokens 1024

As `bare_vllm.py`. Further arguments are those of SGLang's server.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.server_args import prepare_server_args
from transformers import AutoTokenizer

DRAW_WEIGHTS = "drawn_weights.draw_weights"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--share", default="0/1", help="which of how many equal shares")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--logprobs", action="store_true", help="ask for the log-prob of every sampled token")
    parser.add_argument("--memory-fraction", type=float, default=0.85)
    args, others = parser.parse_known_args()
    number, of = map(int, args.share.split("/"))
    texts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()][number::of]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = [tokenizer.encode(text) for text in texts]
    # SGLang wants more room than the longest sequence has.
    context = max(map(len, prompts)) + args.new_tokens + 8
    words = [
        *("--model-path", args.model, "--load-format", "dummy", "--skip-tokenizer-init", "--log-level", "warning"),
        *("--max-running-requests", args.batch, "--context-length", context, "--tp-size", args.tensor_parallel),
        *("--mem-fraction-static", args.memory_fraction, "--custom-weight-loader", DRAW_WEIGHTS, *others),
    ]
    engine = Engine(server_args=prepare_server_args([str(word) for word in words]))
    drawn, message = engine.update_weights_from_tensor([], load_format=DRAW_WEIGHTS)
    if not drawn:
        raise SystemExit(f"SGLang did not take new weights: {message}")
    sampling = {"n": args.samples, "max_new_tokens": args.new_tokens, "temperature": 1.0}

    def generate(prompts: list[list[int]], **changes: int) -> list[dict[str, Any]]:
        outputs: list[dict[str, Any]] = engine.generate(
            input_ids=prompts, sampling_params={**sampling, **changes}, return_logprob=args.logprobs
        )
        return outputs

    generate(prompts[:2], n=2, max_new_tokens=16)
    seconds, tokens = [], 0
    for _ in range(2):
        engine.flush_cache()  # the second run reads the prompts again
        began = time.perf_counter()
        outputs = generate(prompts)
        seconds.append(round(time.perf_counter() - began, 2))
        tokens = sum(len(output["output_ids"]) for output in outputs)
    print(
        json.dumps({"share": args.share, "logprobs": args.logprobs, "seconds": seconds, "sampled_tokens": tokens}),
        flush=True,
    )
    engine.shutdown()


if __name__ == "__main__":
    main()
