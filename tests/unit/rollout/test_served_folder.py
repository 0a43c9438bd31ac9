"""Folders of adapters for servers, which PEFT loads and with which it computes what merged weights compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fivefold.bridge.served_folder import ServedFolder
from fivefold.config.schema.lora import LoraConfig
from fivefold.families.adapters import find_adapter
from fivefold.families.read import load_shape
from fivefold.families.shape import ModelShape

Folder = Callable[..., Path]
LORA = LoraConfig(rank=6, rank_of_experts=2, alpha=5.0, use_rslora=True)


def loaded(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()  # type: ignore[no-any-return]


def merged(folder: Path, shape: ModelShape, sent: dict[str, Tensor], out: Path) -> PreTrainedModel:
    """Return the model with W + scale * B A in its files."""
    weights, named = load_file(folder / "model.safetensors"), {name: (name, matrix) for name, matrix in sent.items()}
    assert shape.adapters is not None
    for name, weight in weights.items():
        up, down = find_adapter(named, name, "A"), find_adapter(named, name, "B")
        if up is not None and down is not None:
            weight.add_(shape.adapters.scale(len(up[1])) * down[1] @ up[1])
    out.mkdir()
    for file in folder.glob("*.json"):
        (out / file.name).write_bytes(file.read_bytes())
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return loaded(out)


@pytest.mark.parametrize("one_rank", [False, True])
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("qwen2", {}),
        ("qwen2", {"targets": ["v_proj", "up_proj"]}),
        ("narrow_experts", {}),
        ("narrow_experts", {"experts": "shared_outer"}),
        ("narrow_experts", {"targets": ["up_proj"]}),
    ],
)
def test_peft_computes_with_the_folder_what_merged_weights_compute(
    model: str, changes: dict[str, object], one_rank: bool, model_folder: Folder, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")

    folder = model_folder(model)
    shape = load_shape(folder).with_lora(LORA.model_copy(update=changes))
    served = ServedFolder(shape, torch.float32, one_rank=one_rank)
    generator = torch.Generator().manual_seed(0)
    sent = {name: 0.3 * torch.randn(full, generator=generator) for name, full in served.sent.items()}
    served.save(tmp_path / "adapters", sent.items())
    n_bytes = (tmp_path / "adapters/adapter_model.safetensors").stat().st_size
    assert n_bytes == served.n_bytes
    tokens = torch.arange(3, 23).view(2, 10)
    with torch.no_grad():
        wanted = merged(folder, shape, sent, tmp_path / "merged")(input_ids=tokens).logits
        base = loaded(folder)
        plain = base(input_ids=tokens).logits
        found = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters"))(input_ids=tokens).logits
    assert (wanted - plain).abs().mean() > 0.1
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)
