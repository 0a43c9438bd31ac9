"""Each family against the files that transformers writes and reads."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from fivefold.bridge.audit import check_weights
from fivefold.bridge.bridge import Bridge
from fivefold.bridge.decoder import mappings
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.hf_reader import HFWeights
from fivefold.bridge.hf_writer import save_hf, tensor_specs
from fivefold.bridge.kept import fuses_experts
from fivefold.bridge.shard_plan import fused
from fivefold.families.latent_attention import loaded_together
from fivefold.families.read import load_shape
from fivefold.families.registry import FAMILIES
from fivefold.families.tensors import kept_tensors
from fivefold.observe.progress import current_progress
from fivefold.weights.stream import unstacked

NAMES = sorted(FAMILIES)


def megatron_parameters(folder: Path) -> dict[str, torch.Tensor]:
    """The whole model on one process, by Megatron-Core's names, its values not yet set."""
    shape, alone = load_shape(folder), ShardGroups()
    return {m.parameter: torch.full(m.local_shape(alone), torch.nan) for m in mappings(shape) if m.exists(alone)}


@pytest.mark.parametrize("family", NAMES)
def test_names_and_shapes_are_those_that_transformers_writes(hf_models: dict[str, Path], family: str) -> None:
    with HFWeights(hf_models[family]) as saved:
        written = {name: saved.shape(name) for name in saved.names if not FAMILIES[family].keeps(name, 3)}
    shape = load_shape(hf_models[family])
    assert Bridge(shape).expected_names() == written
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(hf_models[family] / "model.safetensors").items()}
    kept = {name: full for name, full in stored.items() if FAMILIES[family].keeps(name, 3)}
    specs = tensor_specs(shape, torch.float32)
    specs = fused(specs) if fuses_experts(hf_models[family]) else specs
    assert specs.keys() == stored.keys() - kept.keys()
    assert kept_tensors(shape).items() <= kept.items()
    assert kept_tensors(shape) == kept or FAMILIES[family].sees


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_projections_that_servers_fuse_are_neighbours(hf_models: dict[str, Path], family: str) -> None:
    shape = load_shape(hf_models[family])
    groups = [loaded_together(name) for name in Bridge(shape).expected_names()]
    found = [group for group, behind in pairwise(groups) if group is not None and group == behind]
    assert len(set(found)) == len(found) == shape.n_layers


@pytest.mark.parametrize("family", NAMES)
def test_hf_to_megatron_to_hf_is_bit_exact(hf_models: dict[str, Path], tmp_path: Path, family: str) -> None:
    bridge, parameters = Bridge(load_shape(hf_models[family])), megatron_parameters(hf_models[family])
    with HFWeights(hf_models[family]) as saved:
        bridge.load(parameters, saved, ShardGroups())
        exported = unstacked(bridge.export(parameters, ShardGroups()))
        save_hf(tmp_path / "model", exported, hf_models[family], max_shard_bytes=8000)
        with HFWeights(tmp_path / "model") as again:
            assert again.names == saved.names
            assert all(again.read(name).equal(saved.read(name)) for name in saved.names)
    auto: Any = AutoModelForImageTextToText if FAMILIES[family].sees else AutoModelForCausalLM
    original, reloaded = (
        auto.from_pretrained(folder).state_dict() for folder in (hf_models[family], tmp_path / "model")
    )
    assert original.keys() == reloaded.keys()
    assert all(reloaded[name].equal(tensor) for name, tensor in original.items())


def test_experts_that_a_file_has_in_one_tensor_are_read_one_by_one(hf_models: dict[str, Path], tmp_path: Path) -> None:
    """As the published folders of Qwen3.5 have them; transformers writes a tensor for each expert."""
    folder = Path(shutil.copytree(hf_models["qwen3_5_moe"], tmp_path / "fused"))
    written = load_file(folder / "model.safetensors")
    fused = {name: tensor for name, tensor in written.items() if ".experts." not in name}
    for layer in range(3):
        experts = f"model.language_model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([written[f"{experts}.{expert}.{kind}_proj.weight"] for expert in range(8)])
            for kind in ("gate", "up", "down")
        )
        fused |= {f"{experts}.gate_up_proj": torch.cat((gate, up), dim=1), f"{experts}.down_proj": down}
    save_file(fused, folder / "model.safetensors", {"format": "pt"})
    check_weights(folder, load_shape(folder))
    with HFWeights(folder) as read:
        assert read.names == written.keys()
        for name, tensor in written.items():
            assert read.shape(name) == tuple(tensor.shape)
            assert read.read(name).equal(tensor)
            assert read.read(name, slice(1, 3)).equal(tensor[1:3])
        column = read.read("model.language_model.layers.1.mlp.experts.5.up_proj.weight", slice(2, 7), slice(1, 3))
    assert column.equal(written["model.language_model.layers.1.mlp.experts.5.up_proj.weight"][2:7, 1:3])


def test_experts_that_published_files_have_turned_are_written_as_they_were(
    hf_models: dict[str, Path], tmp_path: Path
) -> None:
    """As the published folders of Qwen3-VL have them; this transformers writes [E, out, in] and reads both."""
    folder = Path(shutil.copytree(hf_models["qwen3_vl_moe"], tmp_path / "published"))
    unturned = load_file(folder / "model.safetensors")
    published = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in unturned.items()
    }
    save_file(published, folder / "model.safetensors", {"format": "pt"})
    shape = load_shape(folder)
    check_weights(folder, shape)
    name = "model.language_model.layers.2.mlp.experts.5.up_proj.weight"
    whole = unturned["model.language_model.layers.2.mlp.experts.gate_up_proj"]
    for source in (folder, hf_models["qwen3_vl_moe"]):
        parameters = megatron_parameters(source)
        with HFWeights(source) as read:
            assert read.read(name).equal(whole[5, 24:])
            assert read.read(name, slice(3, 9), slice(1, 4)).equal(whole[5, 27:33, 1:4])
            Bridge(shape).load(parameters, read, ShardGroups())
        save_hf(tmp_path / "again", unstacked(Bridge(shape).export(parameters, ShardGroups())), source)
        again = load_file(tmp_path / "again" / "model.safetensors")
        assert again.keys() == published.keys()
        assert all(again[name].equal(tensor) for name, tensor in published.items())


def test_tensors_for_multi_token_prediction_are_written_again(hf_models: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(hf_models["qwen3_next"], tmp_path / "mtp"))
    weights = load_file(folder / "model.safetensors")
    further = {"mtp.fc.weight": torch.randn(4, 8, dtype=torch.bfloat16), "mtp.norm.weight": torch.randn(4)}
    save_file({**weights, **further}, folder / "model.safetensors", {"format": "pt"})
    check_weights(folder, load_shape(folder))
    save_hf(tmp_path / "again", weights.items(), folder)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == weights.keys() | further.keys()
    assert all(again[name].equal(tensor) and again[name].dtype == tensor.dtype for name, tensor in further.items())


def test_loading_tells_how_far_it_is(hf_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    read = HFWeights.read

    def watched(weights: HFWeights, name: str, *index: slice) -> torch.Tensor:
        if (progress := current_progress()) is not None and progress.share is not None:
            shares.append(progress.share)
        return read(weights, name, *index)

    monkeypatch.setattr(HFWeights, "read", watched)
    folder = hf_models["qwen3_moe"]
    with HFWeights(folder) as saved:
        Bridge(load_shape(folder)).load(megatron_parameters(folder), saved, ShardGroups())
    assert shares == sorted(shares)
    assert shares[0] == 0 < shares[-1] < 1
    assert current_progress() is None


def test_layers_without_experts_keep_a_dense_mlp(hf_models: dict[str, Path]) -> None:
    names = megatron_parameters(hf_models["qwen3_moe"])
    assert "decoder.layers.0.mlp.experts.weight1" in names
    assert "decoder.layers.1.mlp.linear_fc1.weight" in names
    assert "decoder.layers.1.mlp.experts.weight1" not in names
