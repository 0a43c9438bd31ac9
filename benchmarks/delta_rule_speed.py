"""Milliseconds of the gated delta rule and of its convolution on one GPU, in torch and by fla-core.

    python benchmarks/delta_rule_speed.py

The shape is a layer of Qwen3-Next-80B-A3B, 16 key heads and 32 value heads of 128 channels, with 16,384 tokens: four
sequences of 4,096, one, and 13 of 1,214. Each line of the output is JSON: milliseconds of a forward and of a backward
pass, the mean of several, and the GB that a forward and a backward pass need at their peak.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch
from kernel_speed import milliseconds

from fivefold.engine.kernels.delta_rule import gated_delta_rule, packed_convolution
from fivefold.engine.kernels.fla_delta_rule import computes, fla_gated_delta_rule

KEY_HEADS, VALUE_HEADS, WIDTH, KERNEL = 16, 32, 128, 4
SPANS = {"4 x 4,096": (4096,) * 4, "1 x 16,384": (16384,), "13 x 1,214": (1214,) * 13}


def main() -> None:
    torch.manual_seed(0)
    for name, spans in SPANS.items():
        n_tokens = sum(spans)
        query, key = (bfloat16(n_tokens, KEY_HEADS, WIDTH) for _ in range(2))
        value, beta = bfloat16(n_tokens, VALUE_HEADS, WIDTH), bfloat16(n_tokens, VALUE_HEADS).sigmoid()
        decay = -torch.rand(n_tokens, VALUE_HEADS, device="cuda")
        leaves = [each.detach().requires_grad_() for each in (query, key, value, decay, beta)]
        rules = {"torch": gated_delta_rule, **({"fla-core": fla_gated_delta_rule} if computes(key, value) else {})}
        for title, rule in rules.items():
            print(json.dumps({"delta rule": title, "sequences": name, **measure(rule, leaves, spans)}), flush=True)
        channels = (2 * KEY_HEADS + VALUE_HEADS) * WIDTH
        conv = [bfloat16(n_tokens, channels).requires_grad_(), bfloat16(channels, 1, KERNEL).requires_grad_()]
        print(json.dumps({"convolution": "torch", "sequences": name, **measure(packed_convolution, conv, spans)}))


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def measure(
    work: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor], spans: Sequence[int]
) -> dict[str, float]:
    """Return the milliseconds of both passes, and the peak of what they allocate."""
    output = work(*leaves, spans)
    upstream = torch.randn_like(output)
    forward = milliseconds(lambda: work(*leaves, spans))
    both = milliseconds(lambda: torch.autograd.grad(work(*leaves, spans), leaves, upstream))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(work(*leaves, spans), leaves, upstream)
    peak = torch.cuda.max_memory_allocated() - before
    return {
        "forward_ms": round(forward, 2),
        "backward_ms": round(both - forward, 2),
        "peak_gb": round(peak / 1e9, 2),
    }


if __name__ == "__main__":
    main()
