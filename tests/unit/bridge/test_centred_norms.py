"""Norms that checkpoints of Megatron-Core hold as weight - 1 lose no bit on the way there and back."""

from __future__ import annotations

import pytest
import torch

from fivefold.bridge.centred_norms import centred, uncentred

NAME = "model.layers.0.linear_attn.norm.weight"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_weight_of_16_bits_comes_back_or_is_refused(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    every = every[
        every.isfinite() & ((every.double().abs() > 2.0**-40) | (every == 0)) & (every.double().abs() < 2.0**40)
    ]
    for weight, stored in zip(every.split(1), centred(NAME, every).split(1), strict=True):
        own = centred(NAME, weight)
        assert torch.equal(own.double(), weight.double() - 1)
        assert torch.equal(stored.double(), own.double())
    back = uncentred(centred(NAME, every), dtype)
    assert back.dtype is dtype
    assert torch.equal(back, every)


def test_the_narrowest_format_that_holds_them_is_taken() -> None:
    def stored(*values: float, dtype: torch.dtype = torch.bfloat16) -> torch.dtype:
        return centred(NAME, torch.tensor(values, dtype=dtype)).dtype

    assert stored(0.5, 0.75, 1.0, 1.0078125, 2.0, 3.984375) is torch.bfloat16
    assert stored(0.5, 0.298828125) is torch.float32
    assert stored(0.5, 0.1, dtype=torch.float32) is torch.float64
    assert stored(0.75, 1.1, dtype=torch.float32) is torch.float32


def test_weights_that_would_be_lost_are_refused_by_their_value() -> None:
    with pytest.raises(ValueError, match=rf"{NAME} has a weight of 1e-20, .* use the Hugging Face folder"):
        centred(NAME, torch.tensor([1.0, 1e-20]))


def test_what_megatron_core_has_trained_becomes_what_it_multiplies_by() -> None:
    stored = torch.randn(512, generator=torch.Generator().manual_seed(0)).mul(0.01).bfloat16()
    weight = uncentred(stored, torch.bfloat16)
    # 16 bits near 1 do not hold them, so they get more.
    assert weight.dtype is torch.float32
    assert torch.equal(weight, 1 + stored.float())
