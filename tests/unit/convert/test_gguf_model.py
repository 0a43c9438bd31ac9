"""A converted model is the model that was written to the GGUF file, or there is an error and no folder."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import CHAT_TEMPLATE, CONFIGS, GGUFFile, TinyModel, logits, save_tiny_model, tiny_config
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fivefold.convert.gguf_model import convert_gguf

MakeModel = Callable[[str], TinyModel]
TINY_TOKENS = torch.tensor([[5, 17, 203, 8, 44, 90, 3]])


@pytest.mark.parametrize("family", CONFIGS)
def test_weights_and_logits_are_those_of_the_original(family: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model(family)
    source = GGUFFile(model).write(tmp_path / "model.gguf")
    told: list[tuple[str, int, int]] = []
    shape = convert_gguf(source, tmp_path / "out", dtype="float32", progress=lambda *news: told.append(news))
    assert told[-1] == ("writing", shape.n_parameters, shape.n_parameters)
    converted = load_file(tmp_path / "out" / "model.safetensors")
    assert converted.keys() == model.weights.keys()
    assert all(torch.equal(converted[name], weight) for name, weight in model.weights.items())
    assert torch.equal(logits(tmp_path / "out", TINY_TOKENS), model.logits(TINY_TOKENS))
    assert shape.family == family


def test_the_config_has_decimal_numbers_as_they_were_meant(tiny_model: MakeModel, tmp_path: Path) -> None:
    convert_gguf(GGUFFile(tiny_model("llama")).write(tmp_path / "model.gguf"), tmp_path / "out")
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert config.dtype == torch.bfloat16


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tied", tiny_config("llama", tied=True))
    convert_gguf(GGUFFile(model).write(tmp_path / "model.gguf"), tmp_path / "out", dtype="float32")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(logits(tmp_path / "out", TINY_TOKENS), model.logits(TINY_TOKENS))


def test_factors_of_frequencies_become_llama_3s_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = tiny_config("llama", rope_parameters=scaling, max_position_embeddings=131072)
    model = save_tiny_model(tmp_path / "scaled", config)
    file = GGUFFile(model)
    plain = LlamaRotaryEmbedding.compute_default_rope_parameters(config)[0]
    file.tensors["rope_freqs.weight"] = (plain / LlamaRotaryEmbedding(config).inv_freq).numpy()
    convert_gguf(file.write(tmp_path / "model.gguf"), tmp_path / "out", dtype="float32")
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == scaling
    assert torch.equal(logits(tmp_path / "out", TINY_TOKENS), model.logits(TINY_TOKENS))


def test_quantized_blocks_are_off_by_half_a_level_at_most(tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    file = GGUFFile(model)
    name, hf_name = "blk.1.ffn_up_exps.weight", "model.layers.1.mlp.experts.2.up_proj.weight"
    file.quantization = {name: gguf.GGMLQuantizationType.Q8_0}
    convert_gguf(file.write(tmp_path / "model.gguf"), tmp_path / "out", dtype="float32")
    converted = load_file(tmp_path / "out" / "model.safetensors")[hf_name].reshape(-1, 32)
    original = model.weights[hf_name].reshape(-1, 32)
    level = original.abs().amax(dim=1, keepdim=True) / 127
    # Levels are stored as float16, which moves the outermost of 127 levels by 127 * 2^-11 of one.
    assert ((converted - original).abs() <= (0.5 + 127 / 2**11) * level).all()
    assert not torch.equal(converted, original)


def test_end_tokens_and_chat_template_are_kept(tiny_model: MakeModel, tmp_path: Path) -> None:
    file = GGUFFile(tiny_model("qwen3"))
    file.metadata[gguf.Keys.Tokenizer.EOT_ID] = 1
    convert_gguf(file.write(tmp_path / "model.gguf"), tmp_path / "out")
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, [2, 1], 2)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == CHAT_TEMPLATE


def test_an_earlier_folder_is_replaced_only_with_overwrite(tiny_model: MakeModel, tmp_path: Path) -> None:
    source = GGUFFile(tiny_model("llama")).write(tmp_path / "model.gguf")
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(source, out)
    (out / "stale.txt").write_text("")
    with pytest.raises(ValueError, match="--overwrite"):
        convert_gguf(source, out)
    convert_gguf(source, out, overwrite=True)
    assert not (out / "stale.txt").exists()


def test_a_folder_that_is_no_model_is_never_replaced(tiny_model: MakeModel, tmp_path: Path) -> None:
    source = GGUFFile(tiny_model("llama")).write(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="not a model folder"):
        convert_gguf(source, tmp_path, overwrite=True)
    assert source.exists()


def stray_key(file: GGUFFile) -> None:
    file.metadata[file.key("rope.scaling.factor")] = 4.0


def missing_key(file: GGUFFile) -> None:
    del file.metadata[file.key("block_count")]


def uneven_heads(file: GGUFFile) -> None:
    file.metadata[file.key("attention.value_length")] = 16
    file.metadata[file.key("attention.key_length")] = 32


def stray_tensor(file: GGUFFile) -> None:
    file.tensors["blk.0.attn_sinks.weight"] = file.tensors["output_norm.weight"]


def other_factors(file: GGUFFile) -> None:
    file.tensors["rope_freqs.weight"] = file.tensors["output_norm.weight"][:8]


def missing_tensor(file: GGUFFile) -> None:
    del file.tensors["blk.1.ffn_down.weight"]


def wrong_shape(file: GGUFFile) -> None:
    file.tensors["blk.0.attn_k.weight"] = file.tensors["blk.0.attn_q.weight"]


def other_architecture(file: GGUFFile) -> None:
    file.architecture = "gemma"


def sentencepiece(file: GGUFFile) -> None:
    file.metadata[gguf.Keys.Tokenizer.MODEL] = "llama"


def other_splitting(file: GGUFFile) -> None:
    file.metadata[gguf.Keys.Tokenizer.PRE] = "default"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (stray_key, r"llama\.rope\.scaling\.factor=4\.0"),
        (missing_key, r"lack llama\.block_count"),
        (uneven_heads, r"llama\.attention\.value_length=16"),
        (stray_tensor, r"blk\.0\.attn_sinks\.weight has no place"),
        (other_factors, r"rope_freqs\.weight does not hold the factors of Llama 3\.1 to 3\.3"),
        (missing_tensor, r"blk\.1\.ffn_down\.weight is missing"),
        (wrong_shape, r"blk\.0\.attn_k\.weight has shape \(64, 64\)"),
        (other_architecture, r"'gemma'; the convertible ones are llama, qwen2"),
        (sentencepiece, r"tokenizer\.ggml\.model is 'llama'"),
        (other_splitting, r"tokenizer\.ggml\.pre is 'default'"),
    ],
)
def test_what_cannot_be_converted_faithfully_is_an_error(
    spoil: Callable[[GGUFFile], None], message: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    file = GGUFFile(tiny_model("llama"))
    spoil(file)
    source = file.write(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=message):
        convert_gguf(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("share", [0.02, 0.5, 0.99])
def test_a_truncated_file_is_an_error(share: float, tiny_model: MakeModel, tmp_path: Path) -> None:
    source = GGUFFile(tiny_model("llama")).write(tmp_path / "model.gguf")
    content = source.read_bytes()
    source.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match="not a whole GGUF file"):
        convert_gguf(source, tmp_path / "out")


def test_a_file_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    key = b"general.architecture"
    entry = struct.pack("<Q", len(key)) + key + struct.pack("<II", gguf.GGUFValueType.UINT32, 7)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry + entry)
    with pytest.raises(ValueError, match="not a whole GGUF file"):
        convert_gguf(file, tmp_path / "out")


def test_without_the_gguf_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"pip install 'fivefold\[gguf\]'"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
