"""How the matrices of new adapters are drawn, against torch's own initialisations."""

from __future__ import annotations

import json
from math import sqrt
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.bridge.adapters import WithAdapters
from fivefold.config.schema.lora import LoraConfig
from fivefold.families.read import SHAPES, read_shape

RANK, INPUTS = 16, 4096
LAYER = "model.layers.0.self_attn.q_proj"


def drawn(matrix: str, init: str, seed: int = 1) -> Tensor:
    config: Any = {"rank": RANK, "init": init, "targets": ["q_proj"]}
    shape = read_shape(json.loads((SHAPES / "Qwen3-8B.json").read_text())).with_lora(LoraConfig.model_validate(config))
    return WithAdapters(SimpleNamespace(names=frozenset()), shape, seed).read(f"{LAYER}.{matrix}.weight")  # type: ignore[arg-type]


def of_torch(init: str) -> Tensor:
    """Return what PEFT (`kaiming`, `gaussian`) and Megatron-Bridge (`xavier`) make of A."""
    torch.manual_seed(0)
    matrix = torch.empty(RANK, INPUTS)
    if init == "kaiming":
        return nn.init.kaiming_uniform_(matrix, a=sqrt(5))
    return nn.init.xavier_normal_(matrix) if init == "xavier" else nn.init.normal_(matrix, std=1 / RANK)


@pytest.mark.parametrize("init", ["kaiming", "xavier", "gaussian"])
def test_a_has_the_distribution_that_the_recipe_asks_for_and_b_is_0(init: str) -> None:
    own, theirs = drawn("lora_A", init), of_torch(init)
    # 65,536 numbers each: the standard error of a quantile is below 1% of the standard deviation.
    points = torch.tensor([0.001, 0.05, 0.25, 0.5, 0.75, 0.95, 0.999])
    torch.testing.assert_close(own.quantile(points), theirs.quantile(points), rtol=0.1, atol=0.03 * float(theirs.std()))
    assert not torch.equal(own, drawn("lora_A", init, seed=2))
    assert not drawn("lora_B", init).any()
