"""Seconds that SGLang alone, without a server, needs for a share of a step's prompts. `grpo_step.py` starts it.

    python benchmarks/bare_sglang.py --model FOLDER --prompts prompts.jsonl --share 0/2 --samples 8 --new-tokens 1024

As `bare_vllm.py`. Further arguments are those of SGLang's server.
"""

from __future__ import annotations

from typing import Any

from bare_engine import measure, parser, prompts_of
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.server_args import prepare_server_args
from transformers import AutoTokenizer

DRAW_WEIGHTS = "drawn_weights.draw_weights"


def main() -> None:
    args, others = parser(__doc__).parse_known_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = [tokenizer.encode(text) for text in prompts_of(args)]
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

    def answers(prompts: list[list[int]], **changes: int) -> list[dict[str, Any]]:
        outputs: list[dict[str, Any]] = engine.generate(
            input_ids=prompts, sampling_params={**sampling, **changes}, return_logprob=args.logprobs
        )
        return outputs

    def generate() -> int:
        return sum(len(output["output_ids"]) for output in answers(prompts))

    answers(prompts[:2], n=2, max_new_tokens=16)
    measure(args, generate, before=engine.flush_cache)  # the second run reads the prompts again
    engine.shutdown()


if __name__ == "__main__":
    main()
