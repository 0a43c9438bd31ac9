"""Float8 weights in blocks become ordinary ones, block by block as their scales say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig
from typer.testing import CliRunner, Result

from fivefold.bridge.audit import check_weights
from fivefold.cli.main import app
from fivefold.families.read import load_shape

BLOCK = (8, 16)
PRECISE = ("indexer.k_norm.weight", "indexer.k_norm.bias", "indexer.weights_proj.weight")
"""What DeepSeek publishes in float32."""
QUERIES = "model.layers.0.self_attn.q_b_proj.weight"
OFFSETS = "model.layers.1.mlp.gate.e_score_correction_bias"


def fivefold(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, [str(argument) for argument in arguments])


def quantized(weight: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return float8 values, the scales of their blocks, and their products, one element at a time."""
    values = weight.to(torch.float8_e4m3fn)
    blocks = [-(-size // block) for size, block in zip(weight.shape, BLOCK, strict=True)]
    scales = torch.rand(blocks, generator=generator) + 0.5
    products = torch.empty(weight.shape)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            scale = scales[row // BLOCK[0], column // BLOCK[1]]
            products[row, column] = values[row, column].float() * scale
    return values, scales, products


INDEXER = {"index_n_heads": 2, "index_head_dim": 6, "index_topk": 16}


@pytest.fixture(scope="module", params=["DeepseekV3Config", "DeepseekV32Config"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A model as DeepSeek publishes its own, with a layer for multi-token prediction; and its weights in float32."""
    import transformers

    folder = tmp_path_factory.mktemp("fp8") / "model"
    config = getattr(transformers, request.param)(
        **(INDEXER if request.param == "DeepseekV32Config" else {}),
        vocab_size=41,
        hidden_size=20,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=12,
        q_lora_rank=20,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(0)
    stored = load_file(file)
    for name in stored:
        if name.endswith(PRECISE):
            stored[name] = torch.rand(stored[name].shape, generator=generator)
    wanted = {name: tensor.float() for name, tensor in stored.items()}
    for name, tensor in sorted(stored.items()):
        if tensor.ndim == 2 and ("self_attn" in name or "_proj" in name) and not name.endswith(PRECISE):
            stored[name], stored[f"{name}_scale_inv"], wanted[name] = quantized(tensor, generator)
    stored["model.layers.2.eh_proj.weight"] = torch.zeros(20, 40).to(torch.float8_e4m3fn)
    save_file(stored, file, {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder, wanted


def test_engines_refuse_float8_weights_and_say_what_to_do(model: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = model
    with pytest.raises(ValueError, match="F8_E4M3, expected one of BF16") as error:
        check_weights(folder, load_shape(folder))
    assert "`fivefold convert`" in str(error.value)
    assert "scale_inv" not in str(error.value)


def test_every_weight_is_its_value_times_the_scale_of_its_block(
    model: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, wanted = model
    result = fivefold("convert", folder, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == wanted.keys()
    for name, tensor in written.items():
        assert tensor.dtype == (torch.float32 if name.endswith((OFFSETS, *PRECISE)) else torch.bfloat16), name
        assert tensor.equal(wanted[name].to(tensor.dtype)), name
    assert "Not converted: layers for multi-token prediction" in result.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert not getattr(AutoConfig.from_pretrained(tmp_path / "out"), "num_mtp_layers", 0)
    check_weights(tmp_path / "out", load_shape(tmp_path / "out"))


def test_what_cannot_be_converted_is_an_error(model: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    folder, _ = model
    broken = tmp_path / "broken"
    broken.mkdir()
    stored = load_file(folder / "model.safetensors")
    del stored[f"{QUERIES}_scale_inv"]
    save_file(stored, broken / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config))
    assert f"its scales {QUERIES}_scale_inv must have the shape [3, 2], but are missing" in " ".join(
        fivefold("convert", broken, "-o", tmp_path / "out").output.split()
    )
    for other, expected in (
        ({"quant_method": "gptq"}, "quant_method='gptq'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 0]}, "weight_block_size=[0, 0]"),
        ("fp8", "quant_method=None"),
    ):
        config["quantization_config"] = other
        (broken / "config.json").write_text(json.dumps(config))
        assert expected in fivefold("convert", broken, "-o", tmp_path / "out").output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, f"{QUERIES}_scale_inv in model.safetensors"), (torch.int8, f"{QUERIES} in model.safetensors is")],
    ids=["scales of a weight that is not quantized", "integers"],
)
def test_numbers_that_float8_in_blocks_does_not_explain_are_an_error(
    model: tuple[Path, dict[str, Tensor]], tmp_path: Path, dtype: torch.dtype, expected: str
) -> None:
    folder, _ = model
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    stored = load_file(broken / "model.safetensors")
    stored[QUERIES] = stored[QUERIES].to(dtype)
    save_file(stored, broken / "model.safetensors")
    result = fivefold("convert", broken, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert expected in " ".join(result.output.split())


def test_a_config_that_says_null_of_quantization_is_not_quantized(
    model: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    config = json.loads((model[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    result = fivefold("convert", tmp_path, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "it is a Hugging Face folder" in result.output
