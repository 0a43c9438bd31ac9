"""Seconds that vLLM alone, without a server, needs for a share of a step's prompts. `grpo_step.py` starts it.

    python benchmarks/bare_vllm.py --model FOLDER --prompts prompts.jsonl --share 0/2 --samples 8 --new-tokens 1024

The model has random weights of the distribution that the trainer's have, because the routing of tokens decides how many
experts a step reads. Prompts are texts, one `{"prompt": ...}` a line. After a short warm-up, two runs are measured, and
one line of JSON has the seconds of both.
"""

from __future__ import annotations

import os

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # before vLLM reads it: `draw_weights` travels as a pickle

from bare_engine import measure, parser, prompts_of
from drawn_weights import draw_weights
from vllm import LLM, SamplingParams


def main() -> None:
    args = parser(__doc__).parse_args()
    prompts = prompts_of(args)
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

    def generate() -> int:
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

    measure(args, generate)


if __name__ == "__main__":
    main()
