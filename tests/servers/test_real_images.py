"""Prompts with images on real servers, against transformers' forward pass of the whole model.

VLLM_PYTHON=/opt/vllm/bin/python SGLANG_PYTHON=/opt/sglang/bin/python python -m pytest tests/servers/test_real_images.py
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from fivefold.bridge.hf_reader import HFWeights
from fivefold.bridge.hf_writer import save_hf
from fivefold.rollout.protocol import GenerationRequest, complete
from fivefold.rollout.servers.engine import ServerEngine
from fivefold.types import Completion, PlacedImage
from fivefold.weights.ipc_buffers import IPCSender
from fivefold.weights.stream import stacked
from tests.servers.test_real_servers import DTYPE, ON_CUDA, assert_close, route_of, sampling, spec_of, start

PACKAGED = Path(__file__).resolve().parents[2] / "fivefold" / "models" / "tiny-vl"
MERGE, PATCH_VALUES, VOCABULARY = 2, 96, 20
IMAGE, VIDEO = 4, 5
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10]}
FAMILIES = {
    "qwen3_vl": {"rope_parameters": {**ROPE, "mrope_interleaved": True}},
    "qwen3_vl_moe": {
        "rope_parameters": {**ROPE, "mrope_interleaved": True},
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
    },
    "qwen2_5_vl": {"rope_parameters": ROPE},
    "qwen3_5": {
        "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0, "mrope_interleaved": True},
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    },
}  # fmt: skip
TOWERS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    "qwen2_5_vl": {"window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_5": {"num_position_embeddings": 64},
}
KINDS = [
    f"{backend}-{family}-{transport}"
    for backend in ("vllm", "sglang")
    for family in FAMILIES
    for transport in (("ipc", "folder") if ON_CUDA else ("folder",))
]


def save_models(family: str, make: Callable[[str], Path]) -> tuple[Path, Path]:
    """Save two random models with the same vision tower, and what processes texts and images; return their folders."""
    packaged = AutoConfig.from_pretrained(PACKAGED).to_dict()
    text = {"hidden_size": 256, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 256}
    text |= {"initializer_range": 0.15, "eos_token_id": 2, "bos_token_id": None, **FAMILIES[family]}
    vision = {
        key: packaged["vision_config"][key] for key in ("patch_size", "temporal_patch_size", "spatial_merge_size")
    }
    vision |= {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 256}
    vision |= {"initializer_range": 0.3, **TOWERS[family]}
    tokens = {key: value for key, value in packaged.items() if key.endswith("_token_id")}
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, **tokens)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    merger = model.model.visual.merger
    if family == "qwen2_5_vl":
        # Its language model alone is so sharp that bfloat16 is 0.2 nats away from float32.
        for name, parameter in model.model.language_model.named_parameters():
            parameter.data *= 0.5 if parameter.dim() > 1 and "embed" not in name else 1.0
    else:
        merger.linear_fc2.weight.data *= 8  # so that much depends on what it sees
    first, second = (make(f"{family}-{seed}") for seed in range(2))
    for folder in (first, second):
        shutil.copytree(PACKAGED, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(first)
    weights = text_weights(first)
    # With 0.15 for Qwen2.5-VL as well, transformers in bfloat16 would be 0.5 nats away from float32.
    noise = 0.03 if family == "qwen2_5_vl" else 0.15
    save_hf(second, ((name, weight + noise * torch.randn_like(weight)) for name, weight in weights.items()), first)
    # In the form of published files, which servers read.
    kept = second.with_name(f"{family}-same")
    save_hf(kept, weights.items(), first)
    return kept, second


def text_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a language model that a trainer sends, experts' each for itself."""
    with HFWeights(folder) as stored:
        return {name: stored.read(name) for name in sorted(stored.names) if "visual." not in name}


@dataclass
class Seeing:
    """An engine, and two sets of weights for it whose towers are the same."""

    engine: ServerEngine
    folders: tuple[Path, Path]
    backend: str
    transport: str

    def use(self, which: int, version: int) -> PreTrainedModel:
        """Send a language model's weights to the server; return transformers' whole model."""
        device = "cuda" if self.transport == "ipc" else "cpu"
        weights = {name: tensor.to(device) for name, tensor in text_weights(self.folders[which]).items()}
        if self.transport == "ipc":
            sender = IPCSender(route_of(self.backend, self.transport), 0, n_buffers=2, max_bytes=100_000)
            self.engine.load_buckets(sender.items(stacked(weights.items())), version)
            del weights
            sender.free()
        else:
            self.engine.update_weights(weights.items(), version)
        model = AutoModelForImageTextToText.from_pretrained(
            self.folders[which], dtype=torch.float32, attn_implementation="eager"
        )
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPE).float()
        return model.eval()  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=KINDS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    """One server for each model."""
    backend, family, transport = request.param.split("-")
    variable = f"{backend.upper()}_PYTHON"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no Python that has {backend}")
    folders = save_models(family, tmp_path_factory.mktemp)
    spec = replace(spec_of(backend, os.environ[variable], folders[0], transport), sees=True, most_pixels=16384)
    if family == "qwen3_5" and backend == "vllm" and ON_CUDA:
        spec = replace(spec, arguments=(*spec.arguments, "--gdn-prefill-backend=triton"))
    engine = start(spec)
    yield Seeing(engine, folders, backend, transport)
    engine.close()


def image(seed: int, start: int, rows: int, columns: int) -> PlacedImage:
    patches = np.random.default_rng(seed).normal(size=(rows * columns * MERGE**2, PATCH_VALUES))
    return PlacedImage(patches.astype(np.float32), seed, start, rows, columns)


def request_of(seed: int, length: int, *images: PlacedImage) -> GenerationRequest:
    source = random.Random(length)
    tokens = [source.randrange(7, VOCABULARY) for _ in range(length)]
    for each in images:
        tokens[each.start : each.start + each.n_tokens] = [IMAGE] * each.n_tokens
    return GenerationRequest(tuple(tokens), seed, images=images)


def requests() -> list[GenerationRequest]:
    """Return groups of two with one image, several and none; some have the same tokens and other images."""
    prompts = [
        (40, image(1, 3, 4, 5)),
        (40, image(2, 3, 4, 5)),
        (90, image(1, 0, 4, 5), image(3, 30, 2, 9), image(5, 70, 1, 1)),
        (190, image(4, 20, 12, 13)),
        (25,),
    ]
    return [request_of(2 * i + j, length, *images) for i, (length, *images) in enumerate(prompts) for j in range(2)]


@torch.no_grad()
def logprobs(
    model: PreTrainedModel, asked: GenerationRequest, completion: Completion, images: Sequence[PlacedImage]
) -> Tensor:
    """Return the log-probs of a completion's tokens after a prompt that has these images in its images' places."""
    tokens = torch.tensor([[*asked.token_ids, *completion.token_ids.tolist()]])
    inputs: dict[str, Any] = {"input_ids": tokens}
    if images:
        patches = torch.cat([torch.from_numpy(each.patches_PC) for each in images])
        inputs |= {
            "pixel_values": patches.to(DTYPE).float(),
            "image_grid_thw": torch.tensor([[1, each.rows * MERGE, each.columns * MERGE] for each in images]),
            "mm_token_type_ids": (tokens == IMAGE).int(),
        }
    logits = model(**inputs).logits[0, len(asked.token_ids) - 1 : -1]
    logits[:, [IMAGE, VIDEO]] = -torch.inf
    chosen = torch.from_numpy(completion.token_ids).long()[:, None]
    return logits.log_softmax(-1).gather(1, chosen).squeeze(1)


def check(seeing: Seeing, model: PreTrainedModel) -> None:
    """Compare log-probs. In transformers, bfloat16 changes them by 0.02 to 0.04 in the mean, and other images by 0.12
    (Qwen3.5), 1.1 and 1.3."""
    asked = requests()
    completions = complete(seeing.engine, asked, replace(sampling(), bad_token_ids=(IMAGE, VIDEO)))
    pairs = list(zip(asked, completions, strict=True))
    actual = [torch.tensor(completion.logprobs) for completion in completions]
    expected = [logprobs(model, each, completion, each.images) for each, completion in pairs]
    assert_close(actual, expected)
    # Other pixels give other log-probs, so that a tower without weights or a mix-up would show.
    others = [
        logprobs(model, each, completion, [replace(own, patches_PC=-own.patches_PC) for own in each.images])
        for each, completion in pairs
    ]
    seen = [i for i, each in enumerate(asked) if each.images]
    gaps = [torch.cat([(actual[i] - wanted[i]).abs() for i in seen]).mean() for wanted in (expected, others)]
    assert gaps[1] > 2 * gaps[0], gaps


def test_log_probs_are_those_of_the_whole_model_with_the_latest_weights(seeing: Seeing) -> None:
    for version, which in enumerate([0, 1, 0]):
        check(seeing, seeing.use(which, version))


@pytest.mark.skipif(not ON_CUDA, reason="servers sleep only on GPUs")
def test_a_server_that_slept_sees_as_before(seeing: Seeing) -> None:
    for version in (5, 6):
        seeing.engine.sleep()
        # What others leave in the memory meanwhile.
        filled = torch.full((2**30,), float("nan"), device="cuda")
        del filled
        torch.cuda.empty_cache()
        seeing.engine.wake_weights()
        model = seeing.use(version % 2, version)
        seeing.engine.wake()
        check(seeing, model)
