"""Values far from any that people train with: they are allowed, and most likely slips of the hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fivefold.config.keys import flattened
from fivefold.config.roles import trained_models
from fivefold.config.schema.recipe import Recipe

USUAL: Mapping[str, tuple[float, float]] = {
    "optimizer.lr": (1e-9, 0.05),
    "optimizer.decoupled_lr": (1e-9, 0.05),
    "optimizer.weight_decay": (0.0, 1.0),
    "optimizer.eps": (1e-20, 1e-2),
    "optimizer.gradient_clipping": (1e-4, 1e4),
    "transformer.moe_aux_loss_coeff": (0.0, 10.0),
    "transformer.moe_z_loss_coeff": (0.0, 10.0),
    "reward_norm.eps": (0.0, 1.0),
    "actor.eps_clip": (1e-5, 10.0),
    "actor.eps_clip_higher": (1e-5, 10.0),
    "actor.entropy_coeff": (-1.0, 1.0),
    "actor.kl_ctl": (0.0, 10.0),
    "gconfig.temperature": (0.01, 10.0),
    "freq_secs": (1.0, 1e9),
}
"""The least and the largest value that is usual, by the last words of a key."""


def unusual_values(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each value that is far from usual ones, and for a rate that is not meant for adapters."""
    for key, value in flattened(recipe.model_dump()):
        for name, (least, most) in USUAL.items():
            ends = key == name or key.endswith(f".{name}")
            if ends and isinstance(value, (int, float)) and not least <= value <= most:
                yield f"{key}={value:g} is far from usual values, which are from {least:g} to {most:g}"
    for role, model in trained_models(recipe).items():
        if model.lora is not None and "lr" not in model.optimizer.model_fields_set:
            yield (
                f"{role}.lora trains with {role}.optimizer.lr={model.optimizer.lr:g}, the default for all weights: "
                "adapters learn best at about ten times as high a rate (docs/lora.md)"
            )
