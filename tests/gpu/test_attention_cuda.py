"""Flash attention of both versions against a softmax in double precision, forward and backward."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from fivefold.config.schema.engine import FlashAttention
from fivefold.engine.kernels.varlen import plan_attention, varlen_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
HAS_4 = find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None
KERNELS = [
    "flash_attention_2",
    pytest.param("flash_attention_4", marks=pytest.mark.skipif(not HAS_4, reason="needs the package flash-attn-4")),
]
ENTRIES = {
    "sequences of odd lengths": [(1, 1), (129, 129), (77, 77), (640, 640), (704, 704), (5, 5)],
    "more keys than queries": [(100, 300), (333, 1000), (64, 64), (1, 700)],
}


def inputs(
    entries: list[tuple[int, int]],
    heads: int,
    key_heads: int,
    width: int,
    value_width: int,
    dtype: torch.dtype = torch.bfloat16,
) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    n_queries, n_keys = (sum(counts) for counts in zip(*entries, strict=True))
    shapes = [(n_queries, heads, width), (n_keys, key_heads, width), (n_keys, key_heads, value_width)]
    options = {"generator": generator, "device": "cuda", "dtype": dtype}
    return [torch.randn(shape, **options).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "value_width"), [(8, 2, 128, 128), (4, 4, 192, 128), (4, 2, 64, 64)]
)
def test_attention_is_a_masked_softmax(
    kernels: FlashAttention, name: str, heads: int, key_heads: int, width: int, value_width: int
) -> None:
    compare(kernels, name, heads, key_heads, width, value_width)


@pytest.mark.parametrize("name", ENTRIES)
def test_heads_of_other_widths_attend_with_flash_attention_2(name: str) -> None:
    compare("flash_attention_2", name, 2, 1, 80, 80)


@pytest.mark.parametrize("name", ENTRIES)
def test_float16_attends_with_flash_attention_2_more_exactly(name: str) -> None:
    compare("flash_attention_2", name, 8, 2, 128, 128, dtype=torch.float16, most=0.002)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("name", ENTRIES)
def test_windows_and_sinks_are_those_of_a_masked_softmax(name: str, has_sinks: bool, window: int | None) -> None:
    compare("flash_attention_2", name, 8, 2, 64, 64, window=window, has_sinks=has_sinks)


def compare(
    kernels: FlashAttention,
    name: str,
    heads: int,
    key_heads: int,
    width: int,
    value_width: int,
    *,
    window: int | None = None,
    has_sinks: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    most: float = 0.01,
) -> None:
    """Compare outputs and gradients with those of a masked softmax in double precision."""
    entries = ENTRIES[name]
    qkv = inputs(entries, heads, key_heads, width, value_width, dtype)
    if has_sinks:
        qkv.append(torch.linspace(-2, 4, heads, device="cuda", dtype=torch.bfloat16).requires_grad_())
    device = torch.device("cuda")

    def attend(tensors: list[torch.Tensor], flash: FlashAttention | None) -> torch.Tensor:
        query, key, value, *sinks = tensors
        plan = plan_attention(entries, flash=flash, device=device)
        return varlen_attention(query, key, value, plan, window=window, sinks=sinks[0] if sinks else None)

    output = attend(qkv, kernels)
    exact = [tensor.detach().double().requires_grad_() for tensor in qkv]
    wanted = attend(exact, None)
    upstream = torch.randn_like(output)
    grads = torch.autograd.grad(output, qkv, upstream)
    wanted_grads = torch.autograd.grad(wanted, exact, upstream.double())
    for got, correct in zip([output, *grads], [wanted, *wanted_grads], strict=True):
        assert float((got.double() - correct).abs().max() / correct.abs().max()) < most


@pytest.mark.parametrize("kernels", KERNELS)
def test_deterministic_attention_gives_the_same_bits(kernels: FlashAttention) -> None:
    entries = [(4096, 4096), (700, 700)]
    qkv = inputs(entries, 32, 4, 128, 128)
    plan = plan_attention(entries, flash=kernels, device=torch.device("cuda"))
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(2):
            output = varlen_attention(*qkv, plan)
            results.append([output, *torch.autograd.grad(output, qkv, torch.ones_like(output))])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
