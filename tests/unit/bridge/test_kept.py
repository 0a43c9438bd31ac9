"""Indexers of sparse attention: computed without where they choose every token, and written again unchanged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from fivefold.bridge.audit import check_weights
from fivefold.bridge.hf_writer import HFFolder
from fivefold.bridge.kept import check_kept, kept_specs
from fivefold.bridge.shard_plan import TensorSpec
from fivefold.bridge.text_config import text_config
from fivefold.families.read import load_shape

SPARSE = ("deepseek_v32", "glm_moe_dsa")


@pytest.mark.parametrize("family", SPARSE)
def test_a_model_without_indexers_predicts_the_same_up_to_the_tokens_that_they_choose(
    hf_models: dict[str, Path], family: str
) -> None:
    folder = hf_models[family]
    shape, config = load_shape(folder), text_config(folder)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    dense: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    assert not any(".indexer." in name for name, _ in dense.named_parameters())
    assert config.max_position_embeddings == shape.most_tokens == 16
    tokens = torch.randint(0, 41, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(dense(tokens[:, :16]).logits, own(tokens[:, :16]).logits)
        beyond = (dense(tokens).logits - own(tokens).logits).abs().amax((0, 2))
    assert beyond[:16].max() < 1e-3 < 1e-2 < beyond[16:].max()


@pytest.mark.parametrize("family", SPARSE)
def test_a_folder_without_indexers_is_refused(hf_models: dict[str, Path], family: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(hf_models[family], tmp_path / "model"))
    shape, name = load_shape(folder), "model.layers.2.self_attn.indexer.wk.weight"
    check_weights(folder, shape)
    check_kept(folder, shape)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, name: weights[name][:2].clone()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"layers\.2\.self_attn\.indexer\.wk\.weight in .*: \[2, 16\], expected \[4, 16\]"
    ):
        check_weights(folder, shape)
    with pytest.raises(
        ValueError, match=r"lacks model\.layers\.2\.self_attn\.indexer\.wk\.weight of the model's shape"
    ):
        check_kept(folder, shape)
    del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"tensors that are missing \(1\):\n +model\.layers\.2\.self_attn\.indexer\.wk"
    ):
        check_weights(folder, shape)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="name a folder with weights that are not quantized"):
        check_kept(folder, shape)
    # A critic, which may have been saved before, has none.
    check_kept(folder, shape.as_critic())


def test_a_folder_with_indexers_alone_promises_no_layers_for_multi_token_prediction(
    hf_models: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(hf_models["deepseek_v32"], tmp_path / "model"))
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", '{"num_nextn_predict_layers": 1,', 1))

    def written_layers(out: Path) -> bool:
        """Return whether the config of a written folder has layers for multi-token prediction."""
        own = {"model.norm.weight": TensorSpec(torch.float32, (16,))}
        new = HFFolder(out, own, folder, None, max_shard_bytes=2**30, scores=None)
        new.finish(new.begin())
        return '"num_nextn_predict_layers": 1' in (out / "config.json").read_text()

    assert not written_layers(tmp_path / "without")
    weights = load_file(folder / "model.safetensors")
    further = {
        "model.layers.3.self_attn.indexer.wk.weight": torch.ones(4, 16),
        "model.layers.3.enorm.weight": torch.ones(16),
    }
    save_file(weights | further, folder / "model.safetensors", {"format": "pt"})
    assert further.keys() <= kept_specs(folder).keys()
    assert written_layers(tmp_path / "with")
