"""Adapters next to the weights of real servers, against transformers' forward pass of the merged weights.

    VLLM_PYTHON=/opt/vllm/bin/python SGLANG_PYTHON=/opt/sglang/bin/python python -m pytest tests/servers

Each kind of layer is adapted alone, because servers drop adapters whose names they do not know, and say nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fivefold.config.schema.lora import LoraConfig
from fivefold.families.adapters import find_adapter
from fivefold.families.read import load_shape
from fivefold.families.served import ServedAdapters
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import tensors
from fivefold.rollout.contract import complete
from fivefold.rollout.servers.engine import ServerEngine
from fivefold.weights.buckets import pack
from tests.servers.test_real_servers import (
    DTYPE,
    assert_logprobs,
    requests_of,
    sampling,
    save_model,
    spec_of,
    start,
)

LORA = LoraConfig(rank=16, rank_of_experts=4, alpha=8.0)
KINDS = [
    f"{backend}-{family}-{experts}"
    for backend in ("vllm", "sglang")
    for family, experts in (("qwen3_moe", "each"), ("qwen3_moe", "shared_outer"), ("qwen3", "each"))
]
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "all"]


@dataclass
class Adapted:
    """An engine whose server has adapters next to the weights in a folder."""

    engine: ServerEngine
    folder: Path
    shape: ModelShape
    n_updates: int = 0

    def use(self, layer: str, seed: int = 0) -> PreTrainedModel:
        """Send adapters that are 0 but on the layers of one name; return transformers' model with them merged."""
        generator = torch.Generator().manual_seed(seed)
        sent = {}
        for tensor in tensors(self.shape):
            if tensor.adapts is None:
                continue
            for name in tensor.names:
                is_on = layer == "all" or f".{layer}." in name
                matrix = torch.randn(tensor.shape, generator=generator) * (0.3 if "lora_A" in name else is_on * 0.3)
                sent[name] = matrix.to(DTYPE)
        self.n_updates += 1
        self.engine.receive(pack(sent.items(), 100_000), self.n_updates)
        return self._merged(sent)

    def _merged(self, sent: Mapping[str, Tensor]) -> PreTrainedModel:
        merged = self.folder / "merged"
        shutil.copytree(self.folder, merged, ignore=shutil.ignore_patterns("merged"), dirs_exist_ok=True)
        weights = load_file(self.folder / "model.safetensors")
        named = {name: (name, matrix) for name, matrix in sent.items()}
        assert self.shape.adapters is not None
        for name, weight in weights.items():
            up, down = find_adapter(named, name, "A"), find_adapter(named, name, "B")
            weight.copy_(weight.to(DTYPE))
            if up is not None and down is not None:
                weight.add_(self.shape.adapters.scale(len(up[1])) * down[1].float() @ up[1].float())
        save_file(weights, merged / "model.safetensors", {"format": "pt"})
        return loaded(merged)


def loaded(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=KINDS)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    """One server of each kind for each model."""
    backend, family, experts = request.param.split("-")
    variable = f"{backend.upper()}_PYTHON"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no Python that has {backend}")
    folder = save_model(family, 0, tmp_path_factory.mktemp(family))
    shape = load_shape(folder).with_lora(LORA.model_copy(update={"experts": experts}))
    spec = spec_of(backend, os.environ[variable], folder, "served_adapter")
    engine = start(replace(spec, adapters=ServedAdapters.of(shape)))
    yield Adapted(engine, folder, shape)
    engine.close()


@pytest.mark.parametrize("layer", LAYERS)
def test_log_probs_move_as_those_of_merged_weights_whichever_layers_are_adapted(adapted: Adapted, layer: str) -> None:
    """The prompts are the same each time, so that a cache of earlier adapters would change the log-probs."""
    requests, model = requests_of(12), adapted.use(layer)
    completions = complete(adapted.engine, requests, sampling())
    assert_logprobs(model, requests, completions)
    base = loaded(adapted.folder)
    with pytest.raises(AssertionError):  # so much do adapters of these layers change
        assert_logprobs(base, requests, completions)


def test_a_server_that_slept_has_its_weights_and_new_adapters(adapted: Adapted) -> None:
    requests = requests_of(12)
    for seed in (1, 2):
        adapted.engine.sleep()
        assert not adapted.engine.has_weights
        adapted.engine.wake_weights()
        model = adapted.use("all", seed)
        adapted.engine.wake()
        assert_logprobs(model, requests, complete(adapted.engine, requests, sampling()))
