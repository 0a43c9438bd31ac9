"""Weights are loaded from Hugging Face's files and exported again without losing a bit, on every layout."""

from __future__ import annotations

import json
from pathlib import Path

import hf_reference
import megatron_cases
import pytest
import torch
import torch.distributed as dist
from cases import AnyCase, case_of
from megatron_cases import Case
from ragged import uneven_batch
from safetensors.torch import load_file
from tiny_models import DENSE, MOE
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.config.schema.engine import OptimizerConfig
from tests.rows import long

LAYOUTS = {
    DENSE: ("megatron:t2", "megatron:p2v2"),
    MOE: ("megatron:(attn:d2t2|ffn:t2e2)", "fsdp:d3"),
}
FURTHER_LAYOUTS = {
    DENSE: ("megatron:d1", "megatron:d2t2", "fsdp:d2t2", "fsdp:d3"),
    MOE: (
        *(
            "megatron:d1",
            "megatron:p2v2",
            "megatron:(attn:t2|ffn:t2)",
            "megatron:(attn:t2p2v2|ffn:e2)",
            "megatron:(attn:c4|ffn:e4)",
        ),
        "fsdp:t2c2",
    ),
}
FILES = {"float32": "", "bfloat16": "-bf16"}
EIGHT_RANKS = {
    "megatron:p4t2": ("qwen2",),
    "megatron:(attn:p2t2c2|ffn:e4)": ("qwen3_moe_mixed", "qwen2_moe"),
    "megatron:(attn:d2t4|ffn:t2e2)": ("mixtral", "qwen3_moe_sparse_step"),
}
CASES = [
    *((layout, names, "float32") for names, layouts in LAYOUTS.items() for layout in layouts),
    ("megatron:(attn:t2p2v2|ffn:e2)", ("qwen2_moe",), "bfloat16"),
    ("fsdp:d2t2", ("mixtral", "deepseek_v3", "gpt_oss"), "bfloat16"),
]
FURTHER = [
    *((layout, names, "float32") for names, layouts in FURTHER_LAYOUTS.items() for layout in layouts),
    *((layout, names, "float32") for layout, names in EIGHT_RANKS.items()),
    ("megatron:p2v2", DENSE, "bfloat16"),
]
"""Layout, models and dtype. The dtype of a tensor has no say in how it is split."""
OPTIMIZER = OptimizerConfig()


def language_model(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's file, without those that see images."""
    files = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in files.items() if not name.startswith("model.visual.")}


def names_that_differ(case: AnyCase, folder: Path) -> list[str]:
    """In a worker: return the names of tensors that the engine exports differently from the file, in its own dtype."""
    dtype = getattr(torch, case.dtype)
    files = language_model(folder)
    # The offsets of routers are float32 in any case.
    wanted = {name: tensor if name.endswith("correction_bias") else tensor.to(dtype) for name, tensor in files.items()}
    # With an optimizer, DDP moves the parameters into buffers of its own.
    engine = case.engine(folder, OPTIMIZER)
    differ = []
    for name, tensor in engine.export_weights():
        want = wanted.pop(name)
        if tensor.dtype != want.dtype or not torch.equal(tensor, want):
            differ.append(name)
    return differ + sorted(wanted)


@pytest.mark.parametrize(
    ("layout", "names", "dtype"),
    [*CASES, *long(*FURTHER)],
    ids=[f"{layout} {names[0]} {dtype}" for layout, names, dtype in (*CASES, *FURTHER)],
)
def test_exported_tensors_are_the_files_tensors_bit_for_bit(
    workers: Workers, models: Path, layout: str, names: tuple[str, ...], dtype: str
) -> None:
    case = case_of(layout, dtype=dtype)
    for name in names:
        differ = workers(case.world_size).run(names_that_differ, case, models / f"{name}{FILES[dtype]}")
        assert differ == [[]] * case.world_size, name


def exported_to(case: AnyCase, folder: Path, readers: frozenset[int]) -> list[str]:
    """In a worker: return the names of tensors that differ from the file, or on other ranks are no outlines of it."""
    wanted = language_model(folder)
    differ = []
    for name, tensor in case.engine(folder, OPTIMIZER).export_weights(readers):
        want = wanted.pop(name)
        is_right = torch.equal(tensor, want) if dist.get_rank() in readers else tensor.is_meta
        if not is_right or tensor.shape != want.shape:
            differ.append(name)
    return differ + sorted(wanted)


@pytest.mark.parametrize(
    "layout", ["megatron:(attn:d2t2|ffn:t2e2)", "fsdp:d2t2", *long("megatron:(attn:d4|ffn:e2)", "megatron:p2t2")]
)
def test_only_readers_get_the_weights(workers: Workers, models: Path, layout: str) -> None:
    for readers in (frozenset({0}), frozenset({1, 3})):
        for name in (MOE[0], "gpt_oss"):
            assert workers(4).run(exported_to, case_of(layout), models / name, readers) == [[]] * 4


@pytest.mark.parametrize(("dtype", "files"), [("float32", "-bf16"), ("bfloat16", "")])
def test_tensors_of_another_dtype_are_converted_once(workers: Workers, models: Path, dtype: str, files: str) -> None:
    case = Case("megatron:(attn:d2t2|ffn:t2e2)", dtype=dtype)
    assert workers(4).run(names_that_differ, case, models / f"qwen2_moe{files}") == [[]] * 4


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("megatron:p2v2", "qwen2_moe"),
        ("megatron:(attn:d2t2|ffn:t2e2)", "qwen3_moe_mixed"),
        ("fsdp:t2", "mixtral"),
        *long(*(("megatron:d1", model) for model in ("qwen3_moe_mixed", "mixtral", "qwen2_moe"))),
        *long(("megatron:(attn:d2t2|ffn:t2e2)", "mixtral")),
    ],
)
def test_transformers_loads_the_trained_model_from_a_saved_folder(
    workers: Workers, models: Path, tmp_path: Path, layout: str, model: str
) -> None:
    case, batch, saved = case_of(layout), uneven_batch(), tmp_path / "saved"
    results = workers(case.world_size).run(
        megatron_cases.train_and_save, case, models / model, batch, SFTLoss(), OptimizerConfig(lr=0.01), saved
    )
    ((logprobs, entropies),) = workers(1).run(hf_reference.logprobs_and_entropies, saved, batch, 1.0)
    ((untrained, _),) = workers(1).run(hf_reference.logprobs_and_entropies, models / model, batch, 1.0)
    for mine, my_entropies in results:
        torch.testing.assert_close(mine, logprobs * batch.mask_T, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(my_entropies, entropies * batch.mask_T, rtol=1e-4, atol=1e-4)
        assert (mine - untrained * batch.mask_T).abs().max() > 0.1, "the model was not trained before it was saved"
    assert json.loads((saved / "config.json").read_text())["dtype"] == "float32"
