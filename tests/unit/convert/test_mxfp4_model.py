"""Experts in MXFP4 become ordinary ones, value by value as their codes and exponents say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig
from typer.testing import CliRunner, Result

from fivefold.bridge.audit import check_weights
from fivefold.cli.main import app
from fivefold.families.read import load_shape

DOWN = "model.layers.1.mlp.experts.down_proj"


def fivefold(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, [str(argument) for argument in arguments])


def e2m1(code: int) -> float:
    """Return the value of a sign, two bits of an exponent with the bias 1, and a bit of a mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def quantized(n_experts: int, n_out: int, n_in: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, exponents and the weight [experts, in, out] that they stand for, one element at a time."""
    n_blocks = n_in // 32
    codes = torch.randint(0, 256, (n_experts, n_out, n_blocks, 16), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(120, 130, (n_experts, n_out, n_blocks), dtype=torch.uint8, generator=generator)
    weight = torch.empty(n_experts, n_in, n_out)
    for expert in range(n_experts):
        for row in range(n_out):
            for column in range(n_in):
                block, place = divmod(column, 32)
                byte = int(codes[expert, row, block, place // 2])
                value = e2m1(byte >> 4 if place % 2 else byte & 15)
                weight[expert, column, row] = value * 2.0 ** (int(exponents[expert, row, block]) - 127)
    return codes, exponents, weight


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A model as OpenAI publishes its own; and its weights."""
    folder = tmp_path_factory.mktemp("mxfp4") / "model"
    config = GptOssConfig(
        vocab_size=41,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(0)
    wanted = load_file(file)
    stored = {name: tensor for name, tensor in wanted.items() if not name.endswith(("gate_up_proj", "down_proj"))}
    for name in sorted(wanted.keys() - stored.keys()):
        n_experts, n_in, n_out = wanted[name].shape
        codes, exponents, weight = quantized(n_experts, n_out, n_in, generator)
        stored |= {f"{name}_blocks": codes, f"{name}_scales": exponents}
        wanted[name] = weight.bfloat16()
    save_file(stored, file, {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder, wanted


def test_engines_refuse_experts_in_mxfp4_and_say_what_to_do(model: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = model
    with pytest.raises(ValueError, match=r"down_proj_blocks in model\.safetensors: U8, expected one of BF16") as error:
        check_weights(folder, load_shape(folder))
    assert "`fivefold convert`" in str(error.value)


def test_every_weight_is_its_code_times_the_power_of_its_block(
    model: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    folder, wanted = model
    result = fivefold("convert", folder, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == wanted.keys()
    assert all(tensor.equal(wanted[name]) for name, tensor in written.items())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    check_weights(tmp_path / "out", load_shape(tmp_path / "out"))
    of_transformers = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert of_transformers.keys() == written.keys()
    assert all(tensor.equal(of_transformers[name]) for name, tensor in written.items())


@pytest.mark.parametrize(("scales", "expected"), [(None, "missing"), ((3, 64, 2), "[3, 64, 2]")])
def test_blocks_whose_scales_do_not_fit_are_an_error(
    model: tuple[Path, dict[str, Tensor]], tmp_path: Path, scales: tuple[int, ...] | None, expected: str
) -> None:
    folder, _ = model
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    del stored[f"{DOWN}_scales"]
    if scales is not None:
        stored[f"{DOWN}_scales"] = torch.zeros(scales, dtype=torch.uint8)
    save_file(stored, broken / "model.safetensors")
    result = fivefold("convert", broken, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert f"its scales {DOWN}_scales must have the first three, but are {expected}" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()
