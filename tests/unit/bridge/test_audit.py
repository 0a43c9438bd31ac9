"""A tensor or a parameter that is left over is an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from fivefold.bridge.audit import WeightMismatchError
from fivefold.bridge.bridge import Bridge
from fivefold.bridge.decoder import mappings
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.hf_reader import HFWeights
from fivefold.bridge.mapping import padded_vocab
from fivefold.families.read import load_shape

EMBEDDING = "model.embed_tokens.weight"
ALONE = ShardGroups()


class Case:
    """A model's files and parameters, to be changed before they are loaded."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.shape = load_shape(folder)
        self.scratch = scratch
        self.files: dict[str, Tensor] = load_file(folder / "model.safetensors")
        self.parameters = {
            m.parameter: torch.zeros(m.local_shape(ALONE)) for m in mappings(self.shape) if m.exists(ALONE)
        }

    def load(self) -> None:
        save_file(self.files, self.scratch / "model.safetensors")
        with HFWeights(self.scratch) as source:
            Bridge(self.shape).load(self.parameters, source, ALONE)


@pytest.fixture
def dense(hf_models: dict[str, Path], tmp_path: Path) -> Case:
    return Case(hf_models["qwen3"], tmp_path)


@pytest.fixture
def moe(hf_models: dict[str, Path], tmp_path: Path) -> Case:
    return Case(hf_models["qwen3_moe"], tmp_path)


@pytest.fixture
def tied(hf_models: dict[str, Path], tmp_path: Path) -> Case:
    return Case(hf_models["llama"], tmp_path)


def renamed(tensors: Mapping[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


def test_a_renamed_tensor_is_named_with_its_nearest_on_both_sides(dense: Case) -> None:
    dense.files = renamed(dense.files, "model.norm.weight", "model.norm.scale")
    with pytest.raises(WeightMismatchError) as raised:
        dense.load()
    message = str(raised.value)
    unused = "    model.norm.scale in model.safetensors (nearest: model.norm.weight)"
    assert f"Hugging Face tensors that no parameter uses (1):\n{unused}" in message
    assert "Hugging Face tensors that are missing (1):\n    model.norm.weight (nearest: model.norm.scale)" in message


def test_many_strays_are_counted_and_a_few_named(dense: Case) -> None:
    dense.files |= {f"extra.{i:02d}": torch.zeros(1) for i in range(20)}
    with pytest.raises(
        WeightMismatchError, match=r"(?s)Hugging Face .* \(20\):.*extra\.07 in .*\n    \.\.\. and 12 more\n"
    ):
        dense.load()


def test_a_tensor_of_another_shape_is_an_error(dense: Case) -> None:
    dense.files["model.norm.weight"] = torch.zeros(17)
    with pytest.raises(
        WeightMismatchError, match=r"model\.norm\.weight in model\.safetensors: \[17\], expected \[16\]"
    ):
        dense.load()


def test_a_parameter_of_another_shape_is_an_error(dense: Case) -> None:
    dense.parameters["decoder.final_layernorm.weight"] = torch.zeros(17)
    with pytest.raises(WeightMismatchError, match=r"on pipeline stage 0: \[17\], expected \[16\]"):
        dense.load()


def test_a_parameter_without_a_mapping_is_an_error(dense: Case) -> None:
    dense.parameters["decoder.layers.0.self_attention.sink"] = torch.zeros(4)
    with pytest.raises(
        WeightMismatchError, match=r"no mapping knows \(1\):\n    decoder\.layers\.0\.self_attention\.sink"
    ):
        dense.load()


def test_an_export_without_a_parameter_is_an_error(dense: Case) -> None:
    del dense.parameters["output_layer.weight"]
    with pytest.raises(WeightMismatchError, match=r"no pipeline stage has \(1\):\n    output_layer\.weight"):
        next(iter(Bridge(dense.shape).export(dense.parameters, ALONE)))


def test_a_failed_audit_writes_nothing(dense: Case) -> None:
    del dense.files["model.norm.weight"]
    with pytest.raises(WeightMismatchError):
        dense.load()
    assert not any(parameter.any() for parameter in dense.parameters.values())


def test_values_that_are_not_finite_are_an_error_with_their_tensors(moe: Case) -> None:
    up = "model.layers.2.mlp.experts.5.up_proj.weight"
    moe.files[up][3, 1] = torch.nan
    moe.files["model.norm.weight"][0] = -torch.inf
    with pytest.raises(ValueError, match="NaN or infinite") as raised:
        moe.load()
    named = [line for line in str(raised.value).splitlines() if line.startswith("  ")]
    assert named == [f"  {name} in model.safetensors, read as torch.float32" for name in (up, "model.norm.weight")]


def test_values_too_large_for_the_dtype_of_the_parameters_are_an_error(dense: Case) -> None:
    dense.files["model.norm.weight"] = torch.full((16,), 1e39, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"  model\.norm\.weight in model\.safetensors, read as torch\.float32"):
        dense.load()


def test_stored_rotary_frequencies_go_unused(tied: Case) -> None:
    tied.files["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    tied.load()
    assert tied.parameters["decoder.final_layernorm.weight"].equal(tied.files["model.norm.weight"])


def test_a_tied_output_weight_may_be_stored_again(tied: Case) -> None:
    tied.files["lm_head.weight"] = tied.files[EMBEDDING].clone()
    tied.load()
    assert tied.parameters["embedding.word_embeddings.weight"].equal(tied.files[EMBEDDING])


def test_a_tied_output_weight_that_differs_is_an_error(tied: Case) -> None:
    tied.files["lm_head.weight"] = tied.files[EMBEDDING] + 1
    with pytest.raises(WeightMismatchError, match="tie_word_embeddings"):
        tied.load()


def test_a_tied_model_on_one_stage_has_no_output_weight(tied: Case) -> None:
    tied.parameters["output_layer.weight"] = torch.zeros(tied.shape.vocab, tied.shape.hidden)
    with pytest.raises(WeightMismatchError, match=r"no mapping knows \(1\):\n    output_layer\.weight"):
        tied.load()


def test_a_family_that_is_not_known_is_an_error(dense: Case) -> None:
    with pytest.raises(ValueError, match=r"'gpt9'; the families that are known are llama, qwen2"):
        Bridge(replace(dense.shape, family="gpt9"))


def test_groups_refuse_impossible_positions() -> None:
    with pytest.raises(ValueError, match="ep_rank=2 is outside ep_size=2"):
        ShardGroups(ep_rank=2, ep_size=2)
    with pytest.raises(ValueError, match="tp_size=2 needs a process group"):
        ShardGroups(tp_size=2)


def test_heads_that_tensor_parallelism_cannot_divide_are_an_error(dense: Case) -> None:
    attention = next(m for m in mappings(dense.shape) if m.parameter.endswith("linear_qkv.weight"))
    with pytest.raises(ValueError, match=r"layers\.0\..*key/value heads: 8 does not divide into 3"):
        attention.local_shape(ShardGroups(tp_size=3, tp_group=dist.ProcessGroup(0, 3)))


@pytest.mark.parametrize(("vocab", "tp", "padded"), [(41, 1, 41), (41, 2, 42), (48, 8, 48), (41, 8, 48)])
def test_the_vocabulary_is_padded_to_a_multiple_of_tp(vocab: int, tp: int, padded: int) -> None:
    assert padded_vocab(vocab, tp) == padded
