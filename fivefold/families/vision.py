"""What sees the images of a model: a vision tower, whose features stand in the place of tokens, as config.json says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fivefold.families.hf_config import HFConfig

VISION_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
"""What transformers takes for keys that a vision_config leaves out."""

WINDOWED_DEFAULTS = {
    **{key: value for key, value in VISION_DEFAULTS.items() if key != "num_position_embeddings"},
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "patch_size": 14,
}
"""The same for Qwen2.5-VL."""

_TOKENS = ("vision_start", "image", "vision_end", "video")


@dataclass(frozen=True)
class VisionShape:
    """Sizes of a vision tower, and how a language model takes what it sees. The tower is not trained."""

    n_layers: int
    hidden: int
    ffn_hidden: int
    out_hidden: int
    """Width of the features, which is the language model's."""
    patch_values: int
    """Numbers of one patch: its pixels in all channels and frames."""
    n_positions: int
    """Learned positions of patches."""
    merge: int
    """Patches on each side of the square that becomes one token."""
    marker: tuple[int, int, int]
    """Tokens that a prompt has for each image: its beginning, the image token once, its end."""
    video_token: int
    """Token that stands for videos."""
    rope_sections: tuple[int, ...]
    """Channel pairs of heads that turn by the time, the row and the column of a token."""
    is_interleaved: bool = True
    """Whether channel pairs of the three alternate; else each section is in one piece."""
    is_windowed: bool = False
    """Whether it is Qwen2.5-VL's tower: layers that see windows, gated MLPs, and no learned positions."""
    n_deepstack: int = 0
    """First layers of the language model after which features of layers inside the tower are added."""

    @property
    def image_token(self) -> int:
        """Token in whose place a feature stands."""
        return self.marker[1]

    @property
    def n_parameters(self) -> int:
        """Parameters of the tower."""
        if self.is_windowed:
            return self._windowed_parameters
        attention = 4 * self.hidden * (self.hidden + 1)
        mlp = 2 * self.hidden * self.ffn_hidden + self.ffn_hidden + self.hidden
        layers = self.n_layers * (attention + mlp + 4 * self.hidden)
        merged = self.hidden * self.merge**2
        merger = merged * (merged + 1) + (merged + 1) * self.out_hidden
        norms = 2 * self.hidden + 2 * merged * self.n_deepstack
        patches = (self.patch_values + 1 + self.n_positions) * self.hidden
        return layers + patches + (1 + self.n_deepstack) * merger + norms

    @property
    def _windowed_parameters(self) -> int:
        attention = 4 * self.hidden * (self.hidden + 1)
        mlp = 3 * self.hidden * self.ffn_hidden + 2 * self.ffn_hidden + self.hidden
        merged = self.hidden * self.merge**2
        merger = merged * (merged + 1) + (merged + 1) * self.out_hidden + self.hidden
        return self.n_layers * (attention + mlp + 2 * self.hidden) + merger + self.patch_values * self.hidden


def read_vision(config: HFConfig, *, sections: Sequence[int], has_deepstack: bool) -> VisionShape:
    """Return the vision tower of a config.json with `text_config` and `vision_config`.

    Args:
        config: the whole file.
        sections: channel pairs by axis where the file does not give `mrope_section`.
        has_deepstack: whether the family adds features of layers inside the tower; by default of three.

    Raises:
        ValueError: a key that is missing or inconsistent.
    """
    vision = HFConfig({**config.fields("vision_config"), "model_type": config.family}, VISION_DEFAULTS)
    n_deepstack = 0
    if has_deepstack:
        n_deepstack = (
            len(vision.items("deepstack_visual_indexes", int)) if vision.states("deepstack_visual_indexes") else 3
        )
    shape = _read(config, config.inside("text_config"), vision, sections)
    return replace(shape, n_positions=vision.integer("num_position_embeddings"), n_deepstack=n_deepstack)


def read_windowed_vision(config: HFConfig, text: HFConfig, *, sections: Sequence[int]) -> VisionShape:
    """Return the vision tower of Qwen2.5-VL; the arguments and errors are as in `read_vision`.

    `text` has the keys of the language model.
    """
    fields = {**config.fields("vision_config"), "model_type": config.family}
    if "in_chans" in fields:
        fields["in_channels"] = fields["in_chans"]
    shape = _read(config, text, HFConfig(fields, WINDOWED_DEFAULTS), sections)
    return replace(shape, is_interleaved=False, is_windowed=True)


def _read(config: HFConfig, text: HFConfig, vision: HFConfig, sections: Sequence[int]) -> VisionShape:
    """Return what all towers have."""
    rope = text.fields("rope_scaling") or text.fields("rope_parameters")
    stated = rope.get("mrope_section", list(sections))
    if not isinstance(stated, list) or len(stated) != 3 or not all(type(pairs) is int for pairs in stated):
        raise config.error(f"config.json has mrope_section={stated!r}; it must be three whole numbers")
    side, channels, frames = (vision.integer(key) for key in ("patch_size", "in_channels", "temporal_patch_size"))
    out_hidden, hidden = vision.integer("out_hidden_size"), text.integer("hidden_size")
    if out_hidden != hidden:
        raise config.error(
            f"vision_config has out_hidden_size={out_hidden}, and text_config hidden_size={hidden}: features stand in "
            "the place of tokens, so they must be equal"
        )
    start, image, end, video = (config.integer(f"{name}_token_id", least=0) for name in _TOKENS)
    return VisionShape(
        n_layers=vision.integer("depth"),
        hidden=vision.integer("hidden_size"),
        ffn_hidden=vision.integer("intermediate_size"),
        out_hidden=out_hidden,
        patch_values=side * side * channels * frames,
        n_positions=0,
        merge=vision.integer("spatial_merge_size"),
        marker=(start, image, end),
        video_token=video,
        rope_sections=tuple(stated),
    )
