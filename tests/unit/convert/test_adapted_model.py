"""Models with adapters merged into their weights, against PEFT."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel, Qwen2Config
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


def test_a_merged_model_is_taken_apart_into_what_was_merged(
    adapted: tuple[Path, Path, torch.Tensor], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    model, adapters, logits = adapted
    fivefold("convert", model, "--adapters", adapters, "-o", tmp_path / "merged")
    result = fivefold("convert", tmp_path / "merged", "--base", model, "--rank", "4", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "6 adapters of rank 4. They lack 0.00%" in result.output
    assert "Left out" not in result.output
    with torch.no_grad():
        loaded_again = peft.PeftModel.from_pretrained(loaded(model), tmp_path / "out").eval()
        torch.testing.assert_close(loaded_again(input_ids=TOKENS).logits, logits, atol=1e-4, rtol=1e-4)
    again = fivefold("convert", model, "--adapters", tmp_path / "out", "-o", tmp_path / "again")
    assert again.exit_code == 0, again.output
    with torch.no_grad():
        torch.testing.assert_close(loaded(tmp_path / "again")(input_ids=TOKENS).logits, logits, atol=1e-4, rtol=1e-4)


def test_what_a_smaller_rank_lacks_is_told(adapted: tuple[Path, Path, torch.Tensor], tmp_path: Path) -> None:
    model, _, _ = adapted
    shutil.copytree(model, tmp_path / "trained")
    before = load_file(model / "model.safetensors")
    name, norm = "model.layers.1.mlp.down_proj.weight", "model.norm.weight"
    u, _ = torch.linalg.qr(torch.randn(32, 3))
    v, _ = torch.linalg.qr(torch.randn(48, 3))
    added = u @ torch.diag(torch.tensor([4.0, 2.0, 0.5])) @ v.T
    save_file(
        {**before, name: before[name] + added, norm: before[norm] + 1},
        tmp_path / "trained" / "model.safetensors",
        metadata={"format": "pt"},
    )
    result = fivefold("convert", tmp_path / "trained", "--base", model, "--rank", "1", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    residual = math.sqrt((4.0 + 0.25) / (16.0 + 4.0 + 0.25))
    assert f"2 adapters of rank 1. They lack {residual:.2%} of what" in result.output
    assert f"in {name}" in result.output
    assert f"Left out: 1 tensors that differ and can have no adapter, such as {norm}" in result.output
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{name.removesuffix('.weight')}.lora_{matrix}.weight"] for matrix in "AB")
    torch.testing.assert_close(b @ a, 4.0 * torch.outer(u[:, 0], v[:, 0]), atol=1e-5, rtol=1e-4)
    for arguments, says in (
        (("--base", model), "--base needs the other: give --base and --rank"),
        (("--base", model, "--rank", "1", "--dtype", "float32"), "--dtype does not go with --base"),
        (("--base", model, "--rank", "1"), "pass --overwrite to replace it"),
        (("--base", tmp_path / "trained", "--rank", "1", "--overwrite"), "give another --base"),
    ):
        refused = fivefold("convert", tmp_path / "trained", *arguments, "-o", tmp_path / "out")
        assert refused.exit_code == 2, refused.output
        assert says in " ".join(refused.output.split())


def test_adapters_of_joint_experts_are_merged_and_taken_apart(tmp_path: Path) -> None:
    config = GptOssConfig(
        vocab_size=41, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    before = load_file(tmp_path / "model" / "model.safetensors")
    matrices: dict[str, torch.Tensor] = {}
    wanted = dict(before)
    for kind, inputs, outputs in (("gate_up_proj", 16, 48), ("down_proj", 24, 16)):
        name = f"model.layers.1.mlp.experts.{kind}"
        a, b = torch.randn(3, 2, inputs), torch.randn(3, outputs, 2)
        for e in range(3):
            path = f"base_model.model.model.layers.1.mlp.experts.{e}.{kind}"
            matrices |= {f"{path}.lora_A.weight": a[e].clone(), f"{path}.lora_B.weight": b[e].clone()}
        wanted[name] = before[name] + 3.0 * torch.einsum("eri,eor->eio", a, b)
    (tmp_path / "adapters").mkdir()
    save_file(matrices, tmp_path / "adapters" / "adapter_model.safetensors")
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 6}))
    result = fivefold("convert", tmp_path / "model", "--adapters", tmp_path / "adapters", "-o", tmp_path / "merged")
    assert result.exit_code == 0, result.output
    after = load_file(tmp_path / "merged" / "model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-5, rtol=1e-5)
    result = fivefold(
        "convert", tmp_path / "merged", "--base", tmp_path / "model", "--rank", "2", "-o", tmp_path / "out"
    )
    assert "12 adapters of rank 2. They lack 0.00%" in result.output, result.output
    fivefold("convert", tmp_path / "model", "--adapters", tmp_path / "out", "-o", tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    for name, tensor in wanted.items():
        torch.testing.assert_close(again[name], tensor, atol=1e-4, rtol=1e-4)
