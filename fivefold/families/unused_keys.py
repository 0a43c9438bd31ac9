"""Keys of a recipe that were set but change nothing, because of what other keys or the model say."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from fivefold.config.presets import ADVANTAGES, PRESETS
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.shape import ModelShape

_WITHOUT_CLIP = ("reinforce", "sapo", "topr", "kl_cov", "kimi")
"""Values of `actor.loss` that read no clip range."""
_WIDE = 0.1
"""Distance from 1 that the ratio of a sequence does not reach: its tokens' ratios lie on both sides of 1."""
_CUT = "top_p, top_k or min_new_tokens cut the distribution"
_OF_CHECKPOINTS = ("freq_steps", "freq_epochs", "freq_secs", "max_to_keep", "keep_best", "snapshot")
"""Keys of `recover` that are about checkpoints to write."""
ABSENT = object()


def unused_keys(recipe: Recipe, shape: ModelShape) -> tuple[str, ...]:
    """Return a line for each key that differs from its default and has no effect. They are warnings, not errors.

    Args:
        recipe: the recipe.
        shape: shape of the model at `actor.path`.
    """
    return tuple(_unused_keys(recipe, shape))


def _unused_keys(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    if recipe.total_train_steps is not None:
        yield from _differing("", recipe, ("total_train_epochs",), f"total_train_steps is {recipe.total_train_steps}")
    if not recipe.recover.is_enabled:
        yield from _differing("recover", recipe.recover, _OF_CHECKPOINTS, "recover.mode is disabled")
    if not shape.is_moe:
        reason = f"{shape.family} has no experts"
        yield from _differing("actor.megatron", recipe.actor.megatron, ("router_dtype", "token_dispatcher"), reason)
    if not isinstance(recipe, TrainRecipe):
        return
    actor = recipe.actor
    chosen = PRESETS[recipe.algorithm]
    if actor.kl_ctl == 0:
        # An algorithm may say where a KL term would be, without having one.
        names = [
            name for name in ("kl_in", "kl_estimator") if getattr(actor, name) != chosen.get(f"actor.{name}", ABSENT)
        ]
        yield from _differing("actor", actor, tuple(names), "actor.kl_ctl is 0")
    if actor.advantage != "gae":
        names = ["discount", "gae_lambda", "gae_length_alpha"]
        yield from _differing("actor", actor, tuple(names), f"actor.advantage is {actor.advantage}")
    if (obstacle := _why_not_measured(recipe)) is not None:
        yield from _differing("actor.rollout_correction", actor.rollout_correction, ("auto_threshold",), obstacle)
    if shape.is_moe and actor.rollout_correction.method == "auto" and recipe.gconfig.truncates_distribution:
        # It is the default, on which a mixture of experts may depend.
        yield f"actor.rollout_correction.method=auto has no effect: {_CUT}, whose mismatch is not measured"
    if actor.kl_target is None:
        yield from _differing("actor", actor, ("kl_horizon",), "actor.kl_target is null")
    if actor.entropy_target is None:
        yield from _differing("actor", actor, ("entropy_step",), "actor.entropy_target is null")
    if not actor.overlong_reward_penalty:
        names = ["overlong_tokens", "overlong_penalty_factor"]
        yield from _differing("actor", actor, tuple(names), "actor.overlong_reward_penalty is false")
    if not actor.dynamic_sampling:
        yield from _differing("actor", actor, ("dynamic_sampling_max_rounds",), "actor.dynamic_sampling is false")
    if actor.loss_aggregation != "sequence_sum_fixed":
        reason = f"actor.loss_aggregation is {actor.loss_aggregation}"
        yield from _differing("actor", actor, ("loss_length",), reason)
    if actor.loss in _WITHOUT_CLIP and not chosen.get("actor.eps_clip"):
        names = ["eps_clip", "eps_clip_higher"]
        yield from _differing("actor", actor, tuple(names), f"actor.loss={actor.loss} clips no ratio")
    if actor.loss == "gspo" and recipe.algorithm != "gspo" and actor.eps_clip >= _WIDE:
        # An algorithm's own range that a recipe changes is told as such.
        low, high = (PRESETS["gspo"][f"actor.{name}"] for name in ("eps_clip", "eps_clip_higher"))
        yield (
            f"actor.eps_clip={actor.eps_clip} clips next to nothing: actor.loss=gspo compares it with the mean ratio "
            f"of a whole sequence, for which algorithm=gspo has {low} and {high}"
        )
    if actor.loss in (*_WITHOUT_CLIP, "gspo", "gmpo", "cispo", "clip_cov", "cpgd", "rec"):
        yield from _differing("actor", actor, ("c_clip",), f"actor.loss={actor.loss} has no dual clip")
    if actor.advantage in ADVANTAGES and actor.advantage != "grpo":
        names = ["mean_level", "std_level", *(["eps"] if actor.advantage != "gdpo" else [])]
        reason = f"actor.advantage is {actor.advantage}"
        yield from _differing("actor.reward_norm", actor.reward_norm, tuple(names), reason)
    elif actor.reward_norm.std_level == "none":
        reason = "actor.reward_norm.std_level is none"
        yield from _differing("actor.reward_norm", actor.reward_norm, ("eps",), reason)


def _why_not_measured(recipe: TrainRecipe) -> str | None:
    """Return why no mismatch between rollout and trainer begins a correction; None: one may."""
    if (method := recipe.actor.rollout_correction.method) != "auto":
        return f"actor.rollout_correction.method is {method}"
    if recipe.gconfig.truncates_distribution:
        return f"{_CUT}, so that auto corrects nothing"
    if recipe.actor.recompute_logprob is False:
        return "actor.recompute_logprob is false, so that auto corrects nothing"
    if recipe.rollout.max_head_offpolicyness > 0:
        return "in asynchronous training auto corrects from the first step on"
    return None


def _differing(path: str, section: BaseModel, names: tuple[str, ...], reason: str) -> Iterator[str]:
    for name in names:
        if (value := getattr(section, name)) != type(section).model_fields[name].default:
            yield f"{path}{'.' if path else ''}{name}={value} has no effect: {reason}"
