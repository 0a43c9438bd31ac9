"""Images in the embedded engine: prompts whose tokens of images have features in the place of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import PrefixChange
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLPreTrainedModel, Qwen2_5_VLTextModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLPreTrainedModel, Qwen3VLTextModel
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoePreTrainedModel, Qwen3VLMoeTextModel

from fivefold.rollout.forward import cache_argument
from fivefold.types import PlacedImage
from fivefold.vision.positions import positions_with, saved_by
from fivefold.vision.tower import VisionTower, rows_of

Images = tuple[PlacedImage, ...]

_RENAMED: Any = [PrefixChange(prefix_to_remove="language_model", model_prefix="model")]
register_checkpoint_conversion_mapping(Qwen3VLTextConfig.model_type, _RENAMED, overwrite=True)
_TURNED: Any = get_checkpoint_conversion_mapping("qwen3_vl_moe")
register_checkpoint_conversion_mapping(Qwen3VLMoeTextConfig.model_type, [*_RENAMED, *_TURNED], overwrite=True)


class _WithOutputLayer:
    """A language model with its output layer, which transformers has inside the whole model alone."""

    decoder: Any
    """The class of the model without that layer."""
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        """Build the model of a text_config."""
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self.decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[attr-defined]

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Any:
        """Build a model, as transformers' factories do."""
        return cls._from_config(config, **options)  # type: ignore[attr-defined]

    def forward(self, *, cache: Any = None, logits_to_keep: int = 0, **inputs: Any) -> CausalLMOutputWithPast:
        """Return the logits of the last `logits_to_keep` tokens; 0: of all."""
        hidden = self.model(**{cache_argument(self.decoder): cache}, **inputs).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, -logits_to_keep:]))


class Qwen3VLForCausalLM(_WithOutputLayer, Qwen3VLPreTrainedModel):
    """Qwen3-VL's language model."""

    config_class = Qwen3VLTextConfig
    decoder = Qwen3VLTextModel


class Qwen3VLMoeForCausalLM(_WithOutputLayer, Qwen3VLMoePreTrainedModel):
    """The same with experts."""

    config_class = Qwen3VLMoeTextConfig
    decoder = Qwen3VLMoeTextModel


class Qwen2_5VLForCausalLM(_WithOutputLayer, Qwen2_5_VLPreTrainedModel):
    """Qwen2.5-VL's language model."""

    config_class = Qwen2_5_VLTextConfig
    decoder = Qwen2_5_VLTextModel


TEXT_MODELS: dict[str, Any] = {
    each.config_class.model_type: each for each in (Qwen3VLForCausalLM, Qwen3VLMoeForCausalLM, Qwen2_5VLForCausalLM)
}
"""The classes by the `model_type` of their text_config."""


@dataclass(frozen=True)
class Sight:
    """The images of rows, and what sees them."""

    tower: VisionTower
    images: Sequence[Images]
    """Of each row."""

    @property
    def keys(self) -> list[tuple[int, ...]]:
        """What tells the images of each row from other rows'."""
        return [tuple(image.digest for image in images) for images in self.images]

    @property
    def saved(self) -> Tensor:
        """By how much the positions after each row's images are lower than their places, int64 [B]."""
        return torch.tensor([saved_by(images) for images in self.images])

    def of(self, rows: Sequence[int]) -> Sight | None:
        """Return the images of some rows; None: they have none."""
        images = [self.images[row] for row in rows]
        return Sight(self.tower, images) if any(images) else None

    def inputs(self, model: PreTrainedModel, tokens_UP: Tensor, padding_U: Sequence[int]) -> dict[str, Any]:
        """Return transformers' arguments for prompts with padding at the left, a row of images each."""
        width = tokens_UP.shape[1]
        embeddings_UPH = model.get_input_embeddings()(tokens_UP)
        is_image_UP = torch.zeros_like(tokens_UP, dtype=torch.bool, device="cpu")
        positions_3UP = torch.zeros(3, *tokens_UP.shape, dtype=torch.int64)
        for row, (images, padding) in enumerate(zip(self.images, padding_U, strict=True)):
            positions_3UP[:, row, padding:] = positions_with(images, width - padding)
            for image in images:
                is_image_UP[row, padding + image.start : padding + image.start + image.n_tokens] = True
        flat = [image for images in self.images for image in images]
        seen = self.tower.features(flat).select(rows_of(flat).to(model.device))
        is_image_UP = is_image_UP.to(model.device)
        embeddings_UPH[is_image_UP] = seen.embeddings.to(embeddings_UPH.dtype)
        inputs: dict[str, Any] = {"inputs_embeds": embeddings_UPH, "position_ids": positions_3UP.to(model.device)}
        if seen.deepstack:
            inputs |= {"visual_pos_masks": is_image_UP, "deepstack_visual_embeds": list(seen.deepstack)}
        return inputs
