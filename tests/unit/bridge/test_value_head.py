"""A value head is read under either name, and is 0 where a language model has none; the configs of its models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.bridge.hf_writer import copy_configs
from fivefold.bridge.value_head import WithValueHead


class Folder:
    """Tensors in memory."""

    folder = Path("model")

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        self.names = frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def file(self, name: str) -> str:
        return f"file of {name}"

    def read(self, name: str, *index: slice) -> torch.Tensor:
        return self._tensors[name][index or slice(None)]


def test_a_head_is_read_under_either_name() -> None:
    weight, bias = torch.randn(1, 4), torch.randn(1)
    for folder in (
        Folder(score__weight=weight, score__bias=bias),
        Folder(v_head__summary__weight=weight, v_head__summary__bias=bias),
    ):
        tensors = WithValueHead(folder, 4)
        assert torch.equal(tensors.read("score.weight", slice(0, 1), slice(1, 3)), weight[:, 1:3])
        assert torch.equal(tensors.read("score.bias"), bias)
        assert tensors.shape("score.weight") == (1, 4)
        assert tensors.file("score.bias").endswith("bias")


def test_what_is_missing_is_zero_and_the_rest_is_read() -> None:
    norm = torch.randn(4)
    tensors = WithValueHead(Folder(norm=norm, score__weight=torch.ones(1, 4)), 4)
    assert tensors.names == {"norm", "score.weight", "score.bias"}
    assert torch.equal(tensors.read("score.weight"), torch.ones(1, 4))
    assert torch.equal(tensors.read("score.bias", slice(0, 1)), torch.zeros(1))
    assert torch.equal(tensors.read("norm"), norm)
    assert WithValueHead(Folder(), 4).read("score.weight", slice(0, 1), slice(0, 4)).tolist() == [[0, 0, 0, 0]]


def test_a_reward_model_has_no_bias() -> None:
    weight = torch.randn(1, 4)
    critic = Folder(v_head__summary__weight=weight, v_head__summary__bias=torch.ones(1))
    tensors = WithValueHead(critic, 4, has_bias=False)
    assert "score.bias" not in tensors.names
    assert torch.equal(tensors.read("score.weight"), weight)


@pytest.mark.parametrize(("end", "pad", "written"), [(1, 0, 0), (1, 1, None), ([3, 1], 1, None), (None, 1, 1)])
def test_a_reward_models_padding_is_told_from_its_end_token(tmp_path: Path, end: Any, pad: int, written: Any) -> None:
    """transformers scores the last token that is no padding: with padding like the end token, the one before that."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "eos_token_id": end, "pad_token_id": pad}
    (source / "config.json").write_text(json.dumps(config))
    (source / "generation_config.json").write_text("{}")
    copy_configs(target, source, torch.float32, scores="Sequence")
    new = json.loads((target / "config.json").read_text())
    assert new["architectures"] == ["Qwen3ForSequenceClassification"]
    assert len(new["id2label"]) == 1
    assert new["pad_token_id"] == written
    assert not (target / "generation_config.json").exists()
