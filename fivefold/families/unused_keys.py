"""Keys of a recipe that were set but change nothing, because of what other keys or the model say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from fivefold.config.algorithms import ALGORITHMS
from fivefold.config.methods import ADVANTAGES, LOSSES, Method
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.shape import ModelShape

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
    chosen = ALGORITHMS[recipe.algorithm].keys
    if actor.kl_ctl == 0:
        # An algorithm may say where a KL term would be, without having one.
        names = [
            name for name in ("kl_in", "kl_estimator") if getattr(actor, name) != chosen.get(f"actor.{name}", ABSENT)
        ]
        yield from _differing("actor", actor, tuple(names), "actor.kl_ctl is 0")
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
    if actor.loss == "gspo" and recipe.algorithm != "gspo" and actor.eps_clip >= _WIDE:
        # An algorithm's own range that a recipe changes is told as such.
        low, high = (ALGORITHMS["gspo"].keys[f"actor.{name}"] for name in ("eps_clip", "eps_clip_higher"))
        yield (
            f"actor.eps_clip={actor.eps_clip} clips next to nothing: actor.loss=gspo compares it with the mean ratio "
            f"of a whole sequence, for which algorithm=gspo has {low} and {high}"
        )
    for key, rows in (("loss", LOSSES), ("advantage", ADVANTAGES)):
        yield from _unread(recipe, key, rows)
    if actor.advantage == "grpo" and actor.reward_norm.std_level == "none":
        reason = "actor.reward_norm.std_level is none"
        yield from _differing("actor.reward_norm", actor.reward_norm, ("eps",), reason)


def _unread(recipe: TrainRecipe, key: str, rows: Mapping[str, Method]) -> Iterator[str]:
    """Yield a line for each key that some of the methods read, and the one of `actor.<key>` does not."""
    name = getattr(recipe.actor, key)
    if name not in rows:  # a user's own may read any
        return
    known = dict.fromkeys(each for row in rows.values() for each in sorted(row.reads))
    for each in known:
        if each in rows[name].reads:
            continue
        section, _, last = f"actor.{each}".rpartition(".")
        owner = recipe.actor.reward_norm if section == "actor.reward_norm" else recipe.actor
        if getattr(owner, last) != ALGORITHMS[recipe.algorithm].keys.get(f"actor.{each}", ABSENT):
            yield from _differing(section, owner, (last,), f"actor.{key}={name} does not read it")


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
