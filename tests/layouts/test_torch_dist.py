"""Converted checkpoints are those of Megatron-Core: its own models load ours, and we read what its own models save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_oracle
import pytest
import torch
from hf_reference import Tensors, load_model
from megatron_cases import Case, whole
from ragged import uneven_batch
from safetensors.torch import load_file
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.config.schema.engine import OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.convert.megatron import convert_from_torch_dist, convert_to_torch_dist
from tests.rows import long

LAYERS_APART = {"non_homogeneous_layers": True}
EXPERTS_APART = {"singleton_local_shards": True}
OPTIMIZER = OptimizerConfig(lr=1e-3)


def assert_same_predictions(megatron_logits: torch.Tensor, folder: Path) -> None:
    """Compare logits of a model with a padded vocabulary with those of a Hugging Face folder."""
    with torch.no_grad():
        logits: torch.Tensor = load_model(folder)(megatron_oracle.TOKENS).logits[0]
    torch.testing.assert_close(megatron_logits[:, : logits.shape[1]], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "te_names", "metadata"),
    [
        ("qwen2", False, {}),
        ("qwen3", False, LAYERS_APART),
        ("qwen3_moe", False, {}),
        ("qwen3_moe", True, {}),
        ("qwen3_moe", True, LAYERS_APART),
        ("qwen3_moe_mixed", False, {}),
        ("qwen2_moe", False, {}),
        ("qwen2_moe", False, LAYERS_APART),
        ("deepseek_v3", False, {}),
        ("deepseek_v3", True, {}),
        ("gpt_oss", False, {}),
        ("gpt_oss", True, {}),
        ("gpt_oss", False, LAYERS_APART),
        ("qwen3_next", True, {}),
        ("qwen3_5_moe", True, {}),
        ("minimax_m2", True, {}),
        ("gemma3_text", True, {}),
        *long(("qwen3_5", True, {})),
    ],
)
def test_megatron_core_loads_a_converted_model_and_predicts_as_hugging_face(
    workers: Workers, models: Path, tmp_path: Path, name: str, te_names: bool, metadata: dict[str, Any]
) -> None:
    out = tmp_path / "mcore"
    convert_to_torch_dist(models / name, out, spec="te" if te_names else "local", stacked=metadata != LAYERS_APART)
    (logits,) = workers(1).run(megatron_oracle.load, models / name, out, metadata, te_names, "megatron:d1")
    assert_same_predictions(logits, models / name)


def test_megatron_core_loads_a_converted_model_on_several_ranks(workers: Workers, models: Path, tmp_path: Path) -> None:
    convert_to_torch_dist(models / "qwen3", tmp_path / "mcore", spec="local")
    logits, _ = workers(2).run(megatron_oracle.load, models / "qwen3", tmp_path / "mcore", {}, False, "megatron:t2")
    assert_same_predictions(logits, models / "qwen3")


@pytest.mark.parametrize(
    ("name", "te_names", "metadata", "layout", "prefix"),
    [
        ("qwen2", False, {}, "megatron:d1", ""),
        ("qwen3_moe", True, {}, "megatron:d1", "module."),
        ("qwen3_moe", False, EXPERTS_APART, "megatron:d2e2", ""),
        ("qwen3_moe_mixed", False, {}, "megatron:d2e2", ""),
        ("qwen3", False, LAYERS_APART, "megatron:t2", ""),
        ("qwen2_moe", True, EXPERTS_APART, "megatron:d1", ""),
        ("deepseek_v3", True, {}, "megatron:d1", ""),
        ("gpt_oss", False, {}, "megatron:d1", ""),
        ("gpt_oss", True, EXPERTS_APART, "megatron:d2e2", ""),
        ("qwen3_next", True, EXPERTS_APART, "megatron:t2", ""),
        ("qwen3_5_moe", True, {}, "megatron:d2e2", "module.language_model."),
        ("minimax_m2", True, {}, "megatron:t2", ""),
        ("gemma3_text", True, LAYERS_APART, "megatron:t2", ""),
        *long(("qwen3_5", True, {}, "megatron:t2", "language_model.")),
    ],
)
def test_what_megatron_core_has_saved_becomes_a_hugging_face_model_that_predicts_the_same(
    workers: Workers,
    models: Path,
    tmp_path: Path,
    name: str,
    te_names: bool,
    metadata: dict[str, Any],
    layout: str,
    prefix: str,
) -> None:
    checkpoint = tmp_path / "iter_0000012"
    checkpoint.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    logits, *_ = workers(Case(layout).world_size).run(
        megatron_oracle.save, models / name, checkpoint, metadata, te_names, layout, prefix
    )
    converted = convert_from_torch_dist(tmp_path, tmp_path / "hf", config=models / name)
    assert converted.left_out == "the optimizer's state"
    assert_same_predictions(logits, tmp_path / "hf")


@pytest.mark.parametrize(
    ("name", "layout", "metadata"),
    [
        ("qwen3_next", "megatron:(attn:p2t2|ffn:p2e2)", {}),
        ("minimax_m2", "megatron:(attn:p2t2|ffn:p2e2)", EXPERTS_APART),
        ("gemma3_text-bf16", "megatron:p2t2", {}),
        *long(("qwen3_5_moe-bf16", "megatron:(attn:p2t2|ffn:p2e2)", EXPERTS_APART), ("qwen3_5", "megatron:p2t2", {})),
    ],
)
def test_what_megatron_core_loads_and_saves_on_another_layout_comes_back_bit_for_bit(
    workers: Workers, models: Path, tmp_path: Path, name: str, layout: str, metadata: dict[str, Any]
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    convert_to_torch_dist(models / name, tmp_path / "mcore")
    workers(Case(layout).world_size).run(
        megatron_oracle.save_again, models / name, tmp_path / "mcore", saved, metadata, layout
    )
    convert_from_torch_dist(saved, tmp_path / "hf", config=models / name)
    written, source = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", models / name))
    assert written.keys() == source.keys()
    assert [key for key, tensor in source.items() if not torch.equal(tensor.float(), written[key].float())] == []


def train(case: Case, model: Path) -> tuple[Tensors, Tensors]:
    """In a worker: return the weights as they were loaded, and after a step."""
    engine = case.engine(model, OPTIMIZER)
    loaded = whole(engine.export_weights())
    engine.forward_backward_of(uneven_batch(), SFTLoss())
    engine.optim_step()
    return loaded, whole(engine.export_weights())


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_moe", "megatron:d1"),
        ("qwen3_moe_mixed", "megatron:(attn:t2|ffn:e2)"),
        ("qwen2-bf16", "megatron:p2"),
        ("gpt_oss-bf16", "megatron:(attn:d2|ffn:e2)"),
        ("qwen3_next", "megatron:(attn:t2|ffn:e2)"),
        *long(
            ("qwen3_moe_mixed", "megatron:(attn:p2t2|ffn:p2e2)"),
            ("qwen2_moe", "megatron:(attn:t2|ffn:t2e1)"),
            ("gpt_oss", "megatron:(attn:p2t2|ffn:t2)"),
            ("minimax_m2", "megatron:(attn:p2t2|ffn:p2e2)"),
            ("gemma3_text-bf16", "megatron:p2t2"),
        ),
    ],
)
def test_training_from_a_converted_checkpoint_is_training_from_the_hugging_face_folder(
    workers: Workers, models: Path, tmp_path: Path, name: str, layout: str
) -> None:
    out = tmp_path / "mcore"
    convert_to_torch_dist(models / name, out)
    checkpoint = MegatronConfig(use_dist_checkpointing=True, dist_checkpointing_path=str(out))
    # The checkpoint's folder has the config too, and no other weights.
    (loaded, trained), *_ = workers(Case(layout).world_size).run(train, Case(layout, checkpoint), out)
    (expected, expected_trained), *_ = workers(Case(layout).world_size).run(train, Case(layout), models / name)
    assert loaded.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(loaded[name], expected[name])] == []
    assert [name for name in expected if not torch.equal(trained[name], expected_trained[name])] == []
