"""Milliseconds of attention and of the experts' weight gradients on one GPU, by kernel.

    python benchmarks/kernel_speed.py
    python benchmarks/kernel_speed.py --attn-impl flash_attention_4

The shapes are those of Qwen3-30B-A3B. Attention runs on two sequences of 4,096 tokens, on 13 of 1,214 and on 12 of 30
to 3,000; weight gradients on micro-batches of 8,192 and 32,768 tokens, whose experts have uneven shares. Each line of
the output is JSON: the milliseconds of a call, the mean of several, and its TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch

from fivefold.engine.kernels.matmul import add_grouped_product
from fivefold.engine.kernels.varlen import plan_attention, varlen_attention

HEADS, KEY_HEADS, WIDTH = 32, 4, 128
EXPERTS, TOP_K, HIDDEN, EXPERT_WIDTH = 128, 8, 2048, 768
REPEATS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attn-impl", choices=["flash_attention_2", "flash_attention_4"], default="flash_attention_2")
    args = parser.parse_args()
    torch.manual_seed(0)
    lengths = {"2 x 4,096": [4096] * 2, "13 x 1,214": [1214] * 13, "mixed": torch.randint(30, 3000, (12,)).tolist()}
    for name, sequences in lengths.items():
        print(json.dumps({"attention": args.attn_impl, "sequences": name, **attention(sequences, args.attn_impl)}))
    for tokens in (8192, 32768):
        for n_out, n_in in ((2 * EXPERT_WIDTH, HIDDEN), (HIDDEN, EXPERT_WIDTH)):
            row = {"weight gradient": [n_out, n_in], "tokens": tokens, **weight_gradient(tokens, n_out, n_in)}
            print(json.dumps(row))


def attention(lengths: list[int], attn_impl: str) -> dict[str, float]:
    """Return the milliseconds of a forward and of a backward pass, and the TFLOP/s of causal attention."""
    device = torch.device("cuda")
    plan = plan_attention([(length, length) for length in lengths], flash=attn_impl, device=device)
    shapes = [(sum(lengths), heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    qkv = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    output = varlen_attention(*qkv, plan)
    upstream = torch.randn_like(output)
    forward = milliseconds(lambda: varlen_attention(*qkv, plan))
    backward = milliseconds(lambda: torch.autograd.grad(output, qkv, upstream, retain_graph=True))
    flops = sum(2 * length**2 for length in lengths) * HEADS * WIDTH
    return {
        "forward_ms": round(forward, 3),
        "backward_ms": round(backward, 3),
        "forward_tflops": round(flops / forward / 1e9),
        "backward_tflops": round(2.5 * flops / backward / 1e9),
    }


def weight_gradient(tokens: int, n_out: int, n_in: int) -> dict[str, float]:
    """Return the milliseconds and the TFLOP/s of adding all experts' gradients of one projection."""
    shares = torch.softmax(0.2 * torch.randn(EXPERTS), 0)
    counts = torch.distributions.Multinomial(tokens * TOP_K, shares).sample()
    ends = counts.cumsum(0).int().cuda()
    total = torch.zeros(EXPERTS, n_out, n_in, device="cuda")
    grad, rows = (torch.randn(tokens * TOP_K, n, device="cuda", dtype=torch.bfloat16) for n in (n_out, n_in))
    taken = milliseconds(lambda: add_grouped_product(total, grad, rows, ends))
    return {"ms": round(taken, 3), "tflops": round(2 * tokens * TOP_K * n_out * n_in / taken / 1e9)}


def milliseconds(work: Callable[[], object]) -> float:
    """Return the mean time of a call, after one that compiles its kernels."""
    work()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began.record()
    for _ in range(REPEATS):
        work()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / REPEATS


if __name__ == "__main__":
    main()
