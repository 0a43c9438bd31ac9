"""Keys of a recipe that were set but change nothing, because of what other keys or the model say."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.config.algorithms import ALGORITHMS
from fivefold.config.keys import flattened
from fivefold.config.roles import roles_of
from fivefold.config.schema.engine import EngineConfig
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.rules import said, warnings_of
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.shape import ModelShape
from fivefold.layout.allocation import Allocation
from fivefold.layout.recipe import recipe_allocation, recipe_devices
from fivefold.rules.models import part_problems

_WIDE = 0.1
"""Distance from 1 that the ratio of a sequence does not reach: its tokens' ratios lie on both sides of 1."""
_CUT = "top_p, top_k or min_new_tokens cut the distribution"
_ABSENT = object()
OF_EVERY_ENGINE = {"use_deterministic_algorithms", "dist_checkpointing_path"}
"""Keys of an engine's section that count, or are checked, with the other engine too."""


def unused_keys(recipe: Recipe, shape: ModelShape) -> tuple[str, ...]:
    """Return a line for each key that differs from its default and has no effect. They are warnings, not errors.

    Args:
        recipe: the recipe.
        shape: shape of the model at `actor.path`.
    """
    allocation = recipe_allocation(recipe)
    lines = [
        *_by_rules(recipe),
        *_other_engines(recipe, allocation),
        *part_problems("actor.megatron", recipe.actor.megatron, shape, warns=True),
    ]
    if isinstance(recipe, TrainRecipe):
        lines += [*_offloads(recipe, allocation), *_corrections(recipe, shape), *_norms(recipe), *_clips(recipe)]
    return tuple(lines)


def _by_rules(recipe: Recipe) -> Iterator[str]:
    # An algorithm may set keys that its other keys do not read, such as where a KL term would be.
    chosen = ALGORITHMS[recipe.algorithm].keys if isinstance(recipe, TrainRecipe) else {}
    for key, broken in warnings_of(recipe):
        if chosen.get(key, _ABSENT) != broken.value:
            yield broken.warning(key.removesuffix(broken.key).removesuffix("."))


def _other_engines(recipe: Recipe, allocation: Allocation) -> Iterator[str]:
    """Yield a line for each key of an engine that the model is not computed with."""
    backends = {role.role: role.backend for role in allocation.roles}
    for name, role in roles_of(recipe).items():
        if not isinstance(role.section, EngineConfig):
            continue
        backend = backends.get(name, backends["actor"])
        for engine in ("megatron", "fsdp"):
            section = getattr(role.section, engine)
            written = dict(flattened(section.model_dump(exclude_defaults=True))) if engine != backend else {}
            for key in sorted(written.keys() - OF_EVERY_ENGINE):
                yield (
                    f"{role.spec.key}.{engine}.{key}={said(written[key])} has no effect: {role.spec.key}.backend is "
                    f"{backend}"
                )


def _offloads(recipe: TrainRecipe, allocation: Allocation) -> Iterator[str]:
    """Yield a line for each key about what leaves the actor's devices, if nothing takes its place there."""
    [group] = [group for group in allocation.groups if any(role.role == "actor" for role in group)]
    if recipe.cluster.n_gpus_per_node == 0:
        reason = "the actor computes in CPU processes"
    elif len(group) == 1 and recipe_devices(recipe) is None:
        reason = "no other role shares the actor's GPUs"
    else:
        return
    for part, value in recipe.actor.offload.by_part.items():
        if value is not None:
            yield f"actor.offload.{part}={said(value)} has no effect: {reason}"


def _corrections(recipe: TrainRecipe, shape: ModelShape) -> Iterator[str]:
    """Yield a line if a correction that would begin by itself never does."""
    correction = recipe.actor.rollout_correction
    if correction.method != "auto":
        return
    if recipe.gconfig.truncates_distribution:
        obstacle = f"{_CUT}, so that auto corrects nothing"
    elif recipe.actor.recompute_logprob is False:
        obstacle = "actor.recompute_logprob is false, so that auto corrects nothing"
    elif recipe.rollout.max_head_offpolicyness > 0:
        obstacle = "in asynchronous training auto corrects from the first step on"
    elif recipe.rollout.quantization is not None:
        obstacle = "with rollout.quantization auto corrects from the first step on"
    else:
        return
    if correction.auto_threshold != type(correction).model_fields["auto_threshold"].default:
        yield f"actor.rollout_correction.auto_threshold={correction.auto_threshold} has no effect: {obstacle}"
    if shape.is_moe and recipe.gconfig.truncates_distribution:
        # It is the default, on which a mixture of experts may depend.
        yield f"actor.rollout_correction.method=auto has no effect: {_CUT}, whose mismatch is not measured"


def _norms(recipe: TrainRecipe) -> Iterator[str]:
    norm = recipe.actor.reward_norm
    if recipe.actor.advantage == "grpo" and norm.std_level == "none" and norm.eps != type(norm)().eps:
        yield f"actor.reward_norm.eps={norm.eps} has no effect: actor.reward_norm.std_level is none"


def _clips(recipe: TrainRecipe) -> Iterator[str]:
    actor = recipe.actor
    # If a recipe changes an algorithm's own range, the banner says so.
    if actor.loss == "gspo" and recipe.algorithm != "gspo" and actor.eps_clip >= _WIDE:
        low, high = (ALGORITHMS["gspo"].keys[f"actor.{name}"] for name in ("eps_clip", "eps_clip_higher"))
        yield (
            f"actor.eps_clip={actor.eps_clip} clips next to nothing: actor.loss=gspo compares it with the mean ratio "
            f"of a whole sequence, for which algorithm=gspo has {low} and {high}"
        )
