"""Runs inside SGLang's server: makes prompts with images out of patches that Fivefold has computed.

SGLang's own processor of images is not called, so that its model sees the trainer's patches to the bit, and a prompt
has the tokens of its request. It imports nothing of Fivefold, which need not be installed next to SGLang.

The images of a request have the form that `inside_vllm/fivefold_images.py` describes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor


class PatchesOfImages(QwenVLImageProcessor):
    """SGLang's processor for models of Qwen that see images; it is asked for images of requests alone."""

    async def process_mm_data_async(
        self, image_data: Sequence[Mapping[str, Any]], input_text: Sequence[int], *args: Any, **kwargs: Any
    ) -> Any:
        """Return SGLang's form of a prompt with images.

        Args:
            image_data: the images, in the order of their tokens.
            input_text: the prompt's tokens.
            args: further arguments of SGLang's, which are of texts and other media.
            kwargs: alike.
        """
        token_ids = list(input_text)
        items = [_item(image) for image in image_data]
        positions_3T = positions([_span(image, self.spatial_merge_size) for image in image_data], len(token_ids))
        return MultimodalProcessorOutput(
            mm_items=items,
            input_ids=token_ids,
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(token_ids, items),
            im_token_id=self.IM_TOKEN_ID,
            im_start_id=self.vision_start_token_id,
            im_end_id=self.vision_end_token_id,
            video_token_id=self.VIDEO_TOKEN_ID,
            mrope_positions=positions_3T,
            mrope_position_delta=(positions_3T.max() + 1 - len(token_ids)).reshape(1, 1),
        )


def _item(image: Mapping[str, Any]) -> Any:
    """Return the arguments of SGLang's model for one image."""
    n_patches, n_values = image["shape"]
    dtype = getattr(torch, image["dtype"])
    # The patches stay in the file's memory until SGLang sends them to its scheduler.
    patches = torch.from_file(image["path"], shared=False, size=n_patches * n_values, dtype=dtype)
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        feature=patches.view(n_patches, n_values),
        offsets=[(image["start"], image["start"] + image["n_tokens"] - 1)],
        model_specific_data={"image_grid_thw": torch.tensor([[1, *image["grid"]]])},
    )
    # SGLang keeps by this what its tower has computed, and prefixes. That stays right, because no update changes the
    # tower. Its prefixes tell images apart by the last 30 bits.
    name = image["name"].encode()
    item.set_hash(zlib.crc32(name[::-1]) << 32 | zlib.crc32(name))
    return item


def _span(image: Mapping[str, Any], merge: int) -> tuple[int, int, int]:
    """Return the first of an image's tokens, and how many rows and columns of tokens it has."""
    rows, columns = image["grid"]
    return image["start"], rows // merge, columns // merge


def positions(spans: Sequence[tuple[int, int, int]], n_tokens: int) -> torch.Tensor:
    """Return the positions of a prompt's tokens, int64 [3, n_tokens]: times, rows and columns.

    Args:
        spans: of each image its first token, rows and columns.
        n_tokens: tokens of the prompt.
    """
    parts, end, position = [], 0, 0
    for start, rows, columns in [*spans, (n_tokens, 0, 0)]:
        text = torch.arange(position, position + start - end)
        parts.append(text.expand(3, -1))
        position += start - end
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        parts.append(torch.stack((torch.zeros_like(row), row, column)).flatten(1) + position)
        position += max(rows, columns)
        end = start + rows * columns
    return torch.cat(parts, dim=1)
