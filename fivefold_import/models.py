"""What is known of the model that a source trains: by its name, if it ships, or from its folder."""

from __future__ import annotations

import re

from fivefold.families.read import find_config, find_shape
from fivefold.families.shape import ModelShape

MOE_NAME = re.compile(
    r"moe|mixtral|deepseek-?(v2|v3|r1(?!-distill))|moonlight|kimi-?k2|glm-?4\.[5-7]|\d+(\.\d+)?b-?a\d+(\.\d+)?b",
    re.IGNORECASE,
)
"""Names of mixture-of-experts models, for models whose shape is not known."""

IMAGE_NAME = re.compile(
    r"(?<![a-z])(vl|vision|llava|internvl|pixtral|omni|(open)?vla|minicpm-?[vo]|qvq)(?![a-z])|glm-?4\.\d+v", re.I
)
"""Names of models that read images or video."""

SEEING_NAME = re.compile(r"qwen(3|2\.5)-vl-|qwen3\.[56]-", re.I)
"""Names of models whose images are read here too."""

UNREAD_NAME = re.compile(
    r"nvidia-nemotron-(nano|3)|nemotron-3-(nano|super|ultra)|tencent/hy|hunyuan|deepseek-?v4|(?<![a-z])mimo-|seed-oss|"
    r"gemma-(1\.1|2|2b|4|7b)-",
    re.IGNORECASE,
)
"""Names of models that no family here has the layers of, such as those with Mamba's."""


def is_unread(model: str) -> bool:
    """Return whether the name is of a model that no family here can build."""
    return known_shape(model) is None and bool(UNREAD_NAME.search(model))


def known_shape(model: str) -> ModelShape | None:
    """Return the model's shape; None if neither its name nor its folder says it."""
    try:
        return find_shape(model)
    except ValueError:
        return None


def is_moe(model: str) -> bool:
    """Return whether the model is a mixture of experts, by its shape or else by its name."""
    shape = known_shape(model)
    return shape.is_moe if shape is not None else bool(MOE_NAME.search(model))


def reads_images(model: str) -> bool:
    """Return whether the model reads images or video, by its config.json or else by its name."""
    try:
        return "vision_config" in find_config(model)
    except ValueError:
        return bool(IMAGE_NAME.search(model.rstrip("/").rpartition("/")[2]))


def sees(model: str) -> bool:
    """Return whether images of the model are read here too, by its config.json or else by its name."""
    try:
        return find_shape(model).vision is not None
    except ValueError:
        return bool(SEEING_NAME.search(model.rstrip("/").rpartition("/")[2]))


def router_aux_loss(model: str) -> float | None:
    """Return the weight of the router's auxiliary loss that the model's config.json has; None if it is not known."""
    try:
        weight = find_config(model).get("router_aux_loss_coef")
    except ValueError:
        return None
    return float(weight) if isinstance(weight, int | float) else None
