"""Seconds that vLLM alone, without a server, needs for a share of a step's prompts. `grpo_step.py` starts it.

    python benchmarks/bare_vllm.py --model FOLDER --prompts prompts.jsonl --share 0/2 --samples 8 --new-tokens 1024

The model has random weights of the distribution that the trainer's have, because the routing of tokens decides how many
experts a step reads. Prompts are texts, one `{"prompt": ...}` a line. After a short warm-up, two runs are measured, and
one line of JSON has the seconds of both.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # before vLLM reads it: `draw_weights` travels as a pickle

from drawn_weights import draw_weights
from vllm import LLM, SamplingParams


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
    args = parser.parse_args()
    number, of = map(int, args.share.split("/"))
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()][number::of]
    engine = LLM(
        args.model,
        load_format="dummy",
        max_num_seqs=args.batch,
        max_model_len=max(len(prompt.split()) for prompt in prompts) + args.new_tokens,
        tensor_parallel_size=args.tensor_parallel,
        gpu_memory_utilization=args.memory_fraction,
        disable_log_stats=True,
        enable_prefix_caching=False,
    )
    engine.apply_model(draw_weights)
    sampling = SamplingParams(
        n=args.samples,
        max_tokens=args.new_tokens,
        temperature=1.0,
        detokenize=False,
        logprobs=0 if args.logprobs else None,
        flat_logprobs=args.logprobs,
    )
    engine.generate(prompts[:2], SamplingParams(n=2, max_tokens=16, detokenize=False), use_tqdm=False)
    seconds, tokens = [], 0
    for _ in range(2):
        began = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds.append(round(time.perf_counter() - began, 2))
        tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    print(
        json.dumps({"share": args.share, "logprobs": args.logprobs, "seconds": seconds, "sampled_tokens": tokens}),
        flush=True,
    )


if __name__ == "__main__":
    main()
