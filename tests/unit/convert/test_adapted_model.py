"""Models with adapters merged into their weights, against PEFT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config
from typer.testing import CliRunner, Result

from fivefold.cli.main import app

CONFIG = Qwen2Config(
    vocab_size=41, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=False,
)  # fmt: skip
TOKENS = torch.arange(3, 23).view(2, 10)


def fivefold(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])


def loaded(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()  # type: ignore[no-any-return]


@pytest.fixture
def adapted(tmp_path: Path) -> tuple[Path, Path, torch.Tensor]:
    """A model, adapters that PEFT has written, of several ranks and scales, and PEFT's logits."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).save_pretrained(tmp_path / "model")
    config = peft.LoraConfig(
        r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj", "o_proj", "up_proj"],
        rank_pattern={"up_proj": 2, "0.self_attn.q_proj": 3}, alpha_pattern={"1.self_attn.o_proj": 9},
    )  # fmt: skip
    model = peft.get_peft_model(loaded(tmp_path / "model"), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "adapters")
    with torch.no_grad():
        return tmp_path / "model", tmp_path / "adapters", model.eval()(input_ids=TOKENS).logits


def test_the_merged_model_computes_what_peft_computes(adapted: tuple[Path, Path, torch.Tensor], tmp_path: Path) -> None:
    model, adapters, logits = adapted
    result = fivefold("convert", model, "--adapters", adapters, "-o", tmp_path / "merged")
    assert result.exit_code == 0, result.output
    assert "adapters merged" in result.output
    with torch.no_grad():
        torch.testing.assert_close(loaded(tmp_path / "merged")(input_ids=TOKENS).logits, logits, atol=1e-4, rtol=1e-4)
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "merged"))
    assert before.keys() == after.keys()
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "o_proj", "up_proj"}


def test_adapters_that_do_not_fit_are_refused(adapted: tuple[Path, Path, torch.Tensor], tmp_path: Path) -> None:
    model, adapters, _ = adapted
    file, config = adapters / "adapter_model.safetensors", adapters / "adapter_config.json"
    tensors, written = load_file(file), config.read_text()
    first = min(tensors)
    for changes, says in (
        ({first.replace("layers.0", "layers.7"): tensors[first].clone()}, "for which the model has no weight"),
        ({first: tensors[first][:, :-1].contiguous()}, "give the model that they adapt"),
    ):
        save_file({**tensors, **changes}, file)
        result = fivefold("convert", model, "--adapters", adapters, "-o", tmp_path / "merged")
        assert result.exit_code == 2, result.output
        assert says in " ".join(result.output.split())
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, file)
    assert "lacks" in fivefold("convert", model, "--adapters", adapters, "-o", tmp_path / "merged").output
    config.write_text(json.dumps(json.loads(written) | {"use_dora": True}))
    assert "use_dora" in fivefold("convert", model, "--adapters", adapters, "-o", tmp_path / "merged").output
    assert "no folder of adapters" in fivefold("convert", model, "--adapters", model, "-o", tmp_path / "merged").output
    result = fivefold("convert", model, "--adapters", adapters, "--to", "torch_dist", "-o", tmp_path / "merged")
    assert "does not go with --adapters" in result.output
    assert not (tmp_path / "merged").exists()
