"""Gated delta nets, wide norms and norms of outputs in Megatron-Core's checkpoints, as several programs write them.

More of what Megatron-Core's own models make of them is in `test_torch_dist.py`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import megatron_oracle
import pytest
import torch
from hf_reference import load_model
from safetensors.torch import load_file, save_file
from worker_pool import Workers

from fivefold.bridge.dcp_folder import DCPFolder
from fivefold.bridge.megatron_reader import MegatronWeights
from fivefold.convert.megatron import convert_from_torch_dist, convert_to_torch_dist
from fivefold.convert.megatron_files import CheckpointFiles
from fivefold.families.read import load_shape

NAMES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "minimax_m2", "gemma3_text")
WEIGHTS = "model.safetensors"


def with_norms(source: Path, out: Path, dtype: torch.dtype | None = None) -> Path:
    """Copy a model, and draw the output norms of its gated delta nets over several orders of magnitude."""
    shutil.copytree(source, out)
    weights, generator = load_file(out / WEIGHTS), torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if name.endswith("linear_attn.norm.weight"):
            drawn = torch.randn(weight.shape, generator=generator).exp2().mul(0.3)
            weights[name] = drawn.to(dtype or weight.dtype)
    save_file(weights, out / WEIGHTS, {"format": "pt"})
    return out


def assert_same_bits(folder: Path, source: Path) -> None:
    written, wanted = load_file(folder / WEIGHTS), load_file(source / WEIGHTS)
    assert written.keys() == wanted.keys()
    assert [name for name in wanted if written[name].dtype is not wanted[name].dtype] == []
    assert [name for name in wanted if not torch.equal(written[name], wanted[name])] == []


@pytest.mark.parametrize("kind", ["", "-bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_is_bit_for_bit_the_same(models: Path, tmp_path: Path, name: str, kind: str) -> None:
    source = with_norms(models / f"{name}{kind}", tmp_path / "source")
    convert_to_torch_dist(source, tmp_path / "mcore")
    convert_from_torch_dist(tmp_path / "mcore", tmp_path / "hf", config=source)
    assert_same_bits(tmp_path / "hf", source)


def test_output_norms_of_32_bits_stay_so_in_a_model_of_16(models: Path, tmp_path: Path) -> None:
    source = with_norms(models / "qwen3_5-bf16", tmp_path / "source", torch.float32)
    convert_to_torch_dist(source, tmp_path / "mcore")
    stored = DCPFolder(tmp_path / "mcore")
    assert stored.dtype("decoder.layers.0.self_attention.out_norm.weight") is torch.float64
    assert stored.dtype("decoder.layers.0.self_attention.out_proj.weight") is torch.bfloat16
    convert_from_torch_dist(tmp_path / "mcore", tmp_path / "hf", config=source)
    assert_same_bits(tmp_path / "hf", source)
    convert_to_torch_dist(source, tmp_path / "rounded", dtype=torch.bfloat16)
    convert_from_torch_dist(tmp_path / "rounded", tmp_path / "rounded-hf", config=source)
    rounded, wanted = (load_file(folder / WEIGHTS) for folder in (tmp_path / "rounded-hf", source))
    assert all(torch.equal(tensor, wanted[name].bfloat16()) for name, tensor in rounded.items())


def test_megatron_core_rounds_output_norms_of_more_bits_than_its_own(
    workers: Workers, models: Path, tmp_path: Path
) -> None:
    source = with_norms(models / "qwen3_5", tmp_path / "source")
    convert_to_torch_dist(source, tmp_path / "mcore")
    assert DCPFolder(tmp_path / "mcore").dtype("decoder.layers.0.self_attention.out_norm.weight") is torch.float64
    (logits,) = workers(1).run(megatron_oracle.load, source, tmp_path / "mcore", {}, True, "megatron:d1")
    with torch.no_grad():
        wanted = load_model(source)(megatron_oracle.TOKENS).logits[0]
    torch.testing.assert_close(logits[:, : wanted.shape[1]], wanted, rtol=1e-4, atol=1e-4)


def rewritten(
    checkpoint: Path, out: Path, rename: Callable[[str], str | None], further: dict[str, torch.Tensor]
) -> Path:
    """Write a checkpoint again under other keys, each tensor in chunks of two rows, with further tensors.

    Tensors that `rename` calls None are left out.
    """
    stored = DCPFolder(checkpoint)
    out.mkdir()
    with CheckpointFiles(out) as files:
        for key in stored.names:
            shape, name = stored.shape(key), rename(key)
            for row in range(0, shape[0] if name else 0, 2):
                rows = slice(row, min(row + 2, shape[0]))
                chunk = stored.read(key, rows, *(slice(0, size) for size in shape[1:]))
                files.add(str(name), shape, (row, *(0 for _ in shape[1:])), chunk.clone())
        for key, tensor in further.items():
            files.add(key, tuple(tensor.shape), (0,) * tensor.ndim, tensor)
        files.finish()
    return out


def own_norms(key: str) -> str:
    """Return what a layer calls its norms where they are no parts of linear layers."""
    key = re.sub(r"self_attention\.(in_proj|linear_qkv)\.layer_norm_", "input_layernorm.", key)
    return key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def as_mbridge(key: str) -> str:
    """Return what the package mbridge calls a parameter of Gemma 3."""
    key = key.replace("self_attention.linear_proj.post_layernorm.", "post_attention_layernorm.")
    return "language_model." + key.replace("mlp.linear_fc2.post_layernorm.", "post_feedforward_layernorm.")


def as_megatron_lm(key: str) -> str:
    """Return what layers with norms on outputs have in forks of Megatron-LM."""
    key = key.replace("self_attention.linear_proj.post_layernorm.", "post_self_attn_layernorm.")
    return own_norms(key.replace("mlp.linear_fc2.post_layernorm.", "post_mlp_layernorm."))


@pytest.mark.parametrize(
    ("name", "rename", "stacked"),
    [
        ("qwen3_next", own_norms, False),
        ("minimax_m2", own_norms, False),
        ("gemma3_text", as_mbridge, True),
        ("gemma3_text", as_megatron_lm, False),
    ],
)
def test_other_names_of_norms_are_read(
    models: Path, tmp_path: Path, name: str, rename: Callable[[str], str], stacked: bool
) -> None:
    convert_to_torch_dist(models / name, tmp_path / "mcore", stacked=stacked)
    other = rewritten(tmp_path / "mcore", tmp_path / "other", rename, {})
    assert convert_from_torch_dist(other, tmp_path / "hf", config=models / name).left_out is None
    assert_same_bits(tmp_path / "hf", models / name)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "minimax_m2"])
def test_the_layers_of_slime_are_read(models: Path, tmp_path: Path, name: str) -> None:
    """Its gated delta nets are transformers' modules, and its norms over all heads have other names."""
    source = with_norms(models / name, tmp_path / "source")
    convert_to_torch_dist(source, tmp_path / "mcore", stacked=False)
    weights = {
        key.replace("model.language_model.", "model."): each for key, each in load_file(source / WEIGHTS).items()
    }
    modules = {
        key.replace("model.layers", "decoder.layers").replace("linear_attn", "self_attention.linear_attn"): each
        for key, each in weights.items()
        if ".linear_attn." in key
    }
    layers = {re.match(r"decoder\.layers\.\d+\.", key)[0] for key in modules}  # type: ignore[index]

    def rename(key: str) -> str | None:
        for layer in layers:
            if key == f"{layer}self_attention.in_proj.layer_norm_weight":
                return f"{layer}self_attention.input_layernorm.weight"
            if key.startswith(f"{layer}self_attention."):
                return None
        return re.sub("([qk])_layernorm", r"\1_norm", key) if name == "minimax_m2" else key

    other = rewritten(tmp_path / "mcore", tmp_path / "other", rename, modules)
    convert_from_torch_dist(other, tmp_path / "hf", config=source)
    assert_same_bits(tmp_path / "hf", source)


def test_the_language_model_inside_a_model_that_sees_is_read_and_the_rest_is_named(
    models: Path, tmp_path: Path
) -> None:
    model, inside = models / "qwen3_5_moe", "module.language_model."
    assert convert_to_torch_dist(model, tmp_path / "mcore").left_out == "all but the language model"
    tower, further = torch.ones(4, 4), torch.ones(8, 4)
    others = {"module.vision_model.merger.linear_fc1.weight": tower, f"{inside}mtp.layers.0.eh_proj.weight": further}
    larger = rewritten(tmp_path / "mcore", tmp_path / "larger", lambda key: inside + key, others)
    done = convert_from_torch_dist(larger, tmp_path / "hf", config=model)
    assert done.left_out == "layers for multi-token prediction and all but the language model"
    assert_same_bits(tmp_path / "hf", model)


def test_a_part_of_a_gated_delta_net_that_is_missing_is_named(models: Path, tmp_path: Path) -> None:
    convert_to_torch_dist(models / "qwen3_next", tmp_path / "mcore")
    other = rewritten(
        tmp_path / "mcore", tmp_path / "other", lambda key: key.replace("0.self_attention.in_proj.weight.z", "x"), {}
    )
    with pytest.raises(ValueError, match=r"missing \(1\):\n +decoder\.layers\.0\.self_attention\.in_proj\.weight\.z"):
        MegatronWeights(other, load_shape(models / "qwen3_next"))


def test_parts_of_tensors_are_read_as_they_lie_in_the_whole(models: Path, tmp_path: Path) -> None:
    convert_to_torch_dist(models / "qwen3_next", tmp_path / "mcore")
    wanted = load_file(models / "qwen3_next" / WEIGHTS)
    with MegatronWeights(tmp_path / "mcore", load_shape(models / "qwen3_next")) as weights:
        for name in ("in_proj_qkvz.weight", "in_proj_ba.weight", "conv1d.weight", "norm.weight"):
            key = f"model.layers.0.linear_attn.{name}"
            for rows in (slice(0, 1), slice(1, 5), slice(3, len(wanted[key]))):
                assert torch.equal(weights.read(key, rows), wanted[key][rows]), (name, rows)
        key = "model.layers.1.self_attn.q_proj.weight"
        assert torch.equal(weights.read(key, slice(13, 70), slice(4, 9)), wanted[key][13:70, 4:9])
