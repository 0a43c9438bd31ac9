"""Runs inside vLLM's API server: makes prompts with images out of patches that Fivefold has computed.

vLLM's own processor of images is not called, so that its model sees the trainer's patches to the bit, and a prompt has
the tokens of its request. It imports nothing of Fivefold, as `fivefold_generate`, which uses it.

An image of a request:

    {"path": "/proc/17/fd/9",       a file with its patches, the values of each one after another
     "dtype": "bfloat16", "shape": [96, 1536],
     "grid": [8, 12],               patches in a column and in a row
     "name": "81985529-4x6",        tells it from all others
     "start": 5, "n_tokens": 24}    its tokens in the prompt
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.inputs import mm_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

KIND = "image"
"""vLLM's name for what images are among other things that models see."""


def prompt_with(images: Sequence[Mapping[str, Any]], token_ids: list[int], salt: Mapping[str, str]) -> Any:
    """Return vLLM's form of a prompt with images.

    Args:
        images: the images, as above.
        token_ids: the prompt's tokens.
        salt: vLLM's arguments for the cache of prefixes.
    """
    return mm_input(
        token_ids,
        mm_kwargs=MultiModalKwargsItems({KIND: [_seen(image) for image in images]}),
        # vLLM keeps by these what its tower has computed. That stays right, because no update changes the tower.
        mm_hashes={KIND: [image["name"] for image in images]},
        mm_placeholders={KIND: [PlaceholderRange(offset=image["start"], length=image["n_tokens"]) for image in images]},
        **salt,
    )


def _seen(image: Mapping[str, Any]) -> Any:
    """Return the arguments of vLLM's model for one image."""
    n_patches, n_values = image["shape"]
    dtype = getattr(torch, image["dtype"])
    # The patches stay in the file's memory until vLLM sends them to its engine.
    patches = torch.from_file(image["path"], shared=False, size=n_patches * n_values, dtype=dtype)
    inputs = {
        "pixel_values": patches.view(n_patches, n_values),
        "image_grid_thw": torch.tensor([[1, *image["grid"]]]),
    }
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes(KIND, torch.tensor([n_patches])),
        "image_grid_thw": MultiModalFieldConfig.batched(KIND, keep_on_cpu=True),
    }
    return MultiModalKwargsItems.from_hf_inputs(inputs, fields)[KIND][0]
