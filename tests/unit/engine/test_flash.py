"""Which flash attention a model has, and what FlashAttention 4 is asked for."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.config.load import load_recipe
from fivefold.config.schema.engine import EngineConfig, FlashAttention
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.kernels import flash
from fivefold.engine.kernels.flash import flash_kernels
from fivefold.engine.kernels.varlen import plan_attention, varlen_attention
from fivefold.families.read import load_shape
from fivefold.rules.engines import attention_problems
from fivefold.rules.recipe import check_recipe

QUICKSTART = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package flash-attn-4, and a Hopper GPU."""
    monkeypatch.setattr(flash, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize(
    ("dtype", "device", "wanted"),
    [("bfloat16", GPU, "flash_attention_2"), ("bfloat16", CPU, None), ("float32", GPU, None)],
)
def test_flash_attention_is_for_bfloat16_on_gpus(
    dtype: str, device: torch.device, wanted: FlashAttention | None
) -> None:
    assert flash_kernels("flash_attention_2", dtype, device) == wanted


@pytest.mark.usefixtures("package")
def test_flash_attention_4_is_used_where_it_runs() -> None:
    assert flash_kernels("flash_attention_4", "bfloat16", GPU) == "flash_attention_4"


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("dtype", "device"), [("bfloat16", CPU), ("float32", GPU)])
def test_flash_attention_4_is_refused_elsewhere(dtype: str, device: torch.device) -> None:
    with pytest.raises(ValueError, match=f"got {dtype} on {device.type}: set dtype to bfloat16 on GPUs, or set attn"):
        flash_kernels("flash_attention_4", dtype, device)


@pytest.mark.usefixtures("package")
def test_a_gpu_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(ValueError, match=r"Hopper and Blackwell GPUs, got compute capability 8\.9"):
        flash_kernels("flash_attention_4", "bfloat16", GPU)


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "fivefold\[flash-attention-4\]"'):
        flash_kernels("flash_attention_4", "bfloat16", GPU)


@pytest.mark.parametrize(("head_dim", "problems"), [(64, 0), (128, 0), (80, 1), (256, 1)])
def test_widths_of_heads_that_are_not_proven_are_refused(head_dim: int, problems: int) -> None:
    config = EngineConfig(path="x", backend="megatron:d1", dtype="bfloat16", attn_impl="flash_attention_4")
    shape = replace(load_shape(resolve_model_folder("package:tiny-moe")), head_dim=head_dim)
    found = list(attention_problems("actor", config, shape))
    assert len(found) == problems
    assert all(f"got {head_dim}/{head_dim}: set it to flash_attention_2" in line for line in found)
    assert not list(attention_problems("actor", config.model_copy(update={"attn_impl": "flash_attention_2"}), shape))


def stand_in(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float, causal: bool, **options: Any
) -> tuple[torch.Tensor, None]:
    """flash-attn-4's documented result: the last query of an entry sees all of its keys, the one before it one less."""
    assert causal
    queries, keys = options["cu_seqlens_q"].tolist(), options["cu_seqlens_k"].tolist()
    outputs = []
    for entry in range(len(queries) - 1):
        of_queries, of_keys = (slice(ends[entry], ends[entry + 1]) for ends in (queries, keys))
        query, key, value = q[of_queries], k[of_keys], v[of_keys]
        assert len(query) <= options["max_seqlen_q"]
        assert len(key) <= options["max_seqlen_k"]
        shared = query.shape[1] // key.shape[1]
        scores_HQK = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(shared, 1)) * softmax_scale
        hidden_QK = torch.ones(len(query), len(key), dtype=torch.bool).triu(len(key) - len(query) + 1)
        weights_HQK = scores_HQK.masked_fill(hidden_QK, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights_HQK, value.repeat_interleave(shared, 1)))
    return torch.cat(outputs), None


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("value_width", [4, 6])
def test_flash_attention_4_attends_as_the_other_kernels(
    monkeypatch: pytest.MonkeyPatch, scale: float | None, value_width: int
) -> None:
    module = ModuleType("flash_attn.cute")
    module.flash_attn_varlen_func = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    entries = [(3, 3), (2, 5), (1, 1), (1, 4)]
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(7, 4, 6, generator=generator)
    key, value = (torch.randn(13, 2, width, generator=generator) for width in (6, value_width))
    kernels: tuple[FlashAttention | None, ...] = ("flash_attention_4", None)
    result, wanted = (
        varlen_attention(query, key, value, plan_attention(entries, flash=one, device=CPU), scale) for one in kernels
    )
    torch.testing.assert_close(result, wanted)


def test_a_recipe_without_gpus_is_refused_before_anything_starts() -> None:
    keys = ["actor.attn_impl=flash_attention_4", "actor.dtype=bfloat16"]
    recipe = load_recipe(QUICKSTART, keys, TrainRecipe)
    shape = load_shape(resolve_model_folder(recipe.actor.path))
    with pytest.raises(ValueError, match=r"flash_attention_4 runs on GPUs, and cluster\.n_gpus_per_node is 0"):
        check_recipe(recipe, shape)
    with pytest.raises(ValueError, match=r"for bfloat16 models on GPUs, got actor\.dtype=float32"):
        load_recipe(QUICKSTART, keys[:1], TrainRecipe)
