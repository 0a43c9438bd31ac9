"""The reference for models that see images: transformers' whole model, one sequence at a time, and plain autograd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hf_reference import Tensors, gradients_as_in_files
from ragged import uneven_batch
from tiny_models import VOCAB

from fivefold.batch import Batch
from fivefold.types import PlacedImage

PATCH_VALUES, MERGE = 96, 2
IMAGE, VIDEO, START, END = 97, 98, 99, 100
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_VISION = {"depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
_VISION |= {"num_position_embeddings": 16, "patch_size": 4}
_TEXT = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
_TEXT |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 128}
_DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 6}
_DELTA |= {"layer_types": ["linear_attention", "full_attention"] * 2, "rms_norm_eps": 1e-2}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_EXPERTS |= {"shared_expert_intermediate_size": 24}

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        "Qwen3VLConfig",
        {**_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [4, 2, 2]}},
        {**_VISION, "deepstack_visual_indexes": [0, 2]},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        {
            **_TEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [4, 2, 2]},
            **{**_EXPERTS, "moe_intermediate_size": 24},
            "mlp_only_layers": [1],
        },
        {**_VISION, "deepstack_visual_indexes": [0, 2]},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        {
            **{key: value for key, value in _TEXT.items() if key != "head_dim"},
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [2, 1, 1]},
        },
        {
            **{key: value for key, value in _VISION.items() if key != "num_position_embeddings"},
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    ),
    "qwen3_5": (
        "Qwen3_5Config",
        {
            **_TEXT,
            **_DELTA,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
        },
        _VISION,
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        {**{key: value for key, value in _TEXT.items() if key != "intermediate_size"}, **_DELTA, **_EXPERTS},
        _VISION,
    ),
}
"""Configuration class, text and vision of each model."""


def save_models(folder: Path) -> None:
    """Write every model to `folder / name`, in float32."""
    import transformers

    for name, (config_class, text, vision) in MODELS.items():
        config = getattr(transformers, config_class)(text_config=text, vision_config=vision, **_TOKENS)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(len(name))
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):
                parameter.data.uniform_(-3.0, 1.5, generator=generator)
            elif parameter.ndim == 1 and not key.endswith("bias"):
                parameter.data.uniform_(-0.5, 0.5, generator=generator)
            else:
                parameter.data.normal_(std=0.15, generator=generator)
        model.save_pretrained(folder / name)


def image(seed: int, start: int, rows: int, columns: int) -> PlacedImage:
    """Return an image of random pixels."""
    patches = np.random.default_rng(seed).normal(size=(rows * columns * MERGE**2, PATCH_VALUES))
    return PlacedImage(patches.astype(np.float32), seed, start, rows, columns)


def batch_with_images() -> Batch:
    """Return a batch of which some rows have images, one of them two, and one the same image as another."""
    batch = uneven_batch(lengths=(11, 1, 24, 5, 31, 9, 17))
    first, wide, tall = image(1, 1, 2, 1), image(2, 2, 2, 4), image(3, 12, 3, 1)
    again = PlacedImage(first.patches_PC, first.digest, 2, first.rows, first.columns)
    images: list[tuple[PlacedImage, ...]] = [(), (), (wide, tall), (), (image(4, 0, 2, 3),), (), (again,)]
    images[0] = (first,)
    tokens_T, mask_T = batch.tokens_T.clone() % IMAGE, batch.mask_T.clone()
    for begin, row in zip(batch.offsets(), images, strict=False):
        for each in row:
            span = slice(begin + each.start, begin + each.start + each.n_tokens)
            tokens_T[span], mask_T[span] = IMAGE, 0
    return Batch(batch.lengths, tokens_T, mask_T, images=tuple(images))


def logprobs_and_gradients(folder: Path, batch: Batch, scratch: Path) -> tuple[torch.Tensor, float, Tensors]:
    """Return log-probs float32 [T], 0 on first tokens; the SFT loss; and its gradient, but for the vision tower's."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    rows, total = [], 0.0
    n_trained = batch.mask_T.sum()
    for index in range(len(batch)):
        sequence = batch.select([index])
        logprobs_L = _logprobs(model, sequence)
        loss = -(logprobs_L * sequence.mask_T).sum() / n_trained
        loss.backward()
        rows.append(logprobs_L.detach())
        total += float(loss)
    found = gradients_as_in_files(model, scratch)
    text = {name: grad for name, grad in found.items() if "visual." not in name}
    return torch.cat(rows), total, dict(each for name, grad in text.items() for each in _by_expert(name, grad))


def _by_expert(name: str, grad: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a tensor, or the matrices of each expert in one of all experts [E, out, in]."""
    layer, _, kind = name.rpartition(".")
    if kind not in ("gate_up_proj", "down_proj"):
        yield name, grad
        return
    for expert, matrices in enumerate(grad):
        parts = dict(zip(("gate", "up"), matrices.chunk(2), strict=True)) if kind != "down_proj" else {"down": matrices}
        yield from ((f"{layer}.{expert}.{part}_proj.weight", each) for part, each in parts.items())


def _logprobs(model: Any, sequence: Batch) -> torch.Tensor:
    tokens_L = sequence.tokens_T
    inputs: dict[str, Any] = {"input_ids": tokens_L[None]}
    [images] = sequence.images or [()]
    if images:
        inputs |= {
            "pixel_values": torch.cat([torch.from_numpy(each.patches_PC) for each in images]),
            "image_grid_thw": torch.tensor([[1, each.rows * MERGE, each.columns * MERGE] for each in images]),
            "mm_token_type_ids": (tokens_L == IMAGE).int()[None],
        }
    log_p_LV = model(**inputs).logits[0].log_softmax(-1)
    logprobs = log_p_LV[:-1].gather(1, tokens_L[1:, None]).squeeze(1)
    return torch.cat([torch.zeros(1), logprobs])
