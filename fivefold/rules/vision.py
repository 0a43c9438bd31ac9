"""Rules of images: what a recipe whose prompts have some asks of its models, engines and layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fivefold.config.roles import ROLES, roles_of, trained_models
from fivefold.config.schema.data import RowsConfig
from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.shape import ModelShape
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.recipe import recipe_allocation
from fivefold.layout.stages import chunk_sizes
from fivefold.rules.models import RoleShapes


def image_keys(recipe: Recipe) -> dict[str, str]:
    """Return the columns of images, by the dotted keys that name them."""
    sections: dict[str, RowsConfig] = {"train_dataset": recipe.train_dataset, **recipe.held_out}
    return {f"{name}.image_key": rows.image_key for name, rows in sections.items() if rows.image_key is not None}


def most_pixels(recipe: TrainRecipe) -> int | None:
    """Return the most pixels to which any image is resized; None: the model's image processor says it for some."""
    limits = [rows.max_pixels for rows in (recipe.train_dataset, *recipe.held_out.values()) if rows.image_key]
    return None if None in limits else max((limit for limit in limits if limit is not None), default=None)


def image_problems(recipe: Recipe, shape: ModelShape, others: RoleShapes) -> Iterator[str]:
    """Yield a line for each part of a recipe that images do not reach; `shape` is the actor's."""
    if not (keys := image_keys(recipe)):
        return
    key, column = next(iter(keys.items()))
    if shape.vision is None:
        yield (
            f"{key}={column} names images, and the actor's model ({shape.family}) reads text alone: use a model of "
            "Qwen3-VL or Qwen3.5 with its vision_config, or drop the key"
        )
        return
    if isinstance(recipe, TrainRecipe):
        yield from _sampling_problems(recipe, f"{key}={column}")
    for role, other in others.items():
        if ROLES[role].row != "reward" and other.vision != shape.vision:
            path = roles_of(recipe)[role].path
            yield (
                f"{ROLES[role].key}.path={path} is a model that does not take images as the actor's does "
                f"({key}={column}): name one with the same vision_config and tokens for images"
            )
    for role, config in trained_models(recipe).items():
        if config.megatron.kernels == "te":
            yield f"{key}={column} has not been tried with {role}.megatron.kernels=te: set it to fivefold"


def _sampling_problems(recipe: TrainRecipe, given: str) -> Iterator[str]:
    """Yield a line for each part of rollout and rewards that images do not reach, or that was not tried with them."""
    yield from _environment_problems(recipe.environment, given)
    if recipe.reward.model is not None:
        yield f"{given}: reward models read text alone, so drop reward.model"
    layout = next(each for each in recipe_allocation(recipe).roles if each.role == "rollout")
    if layout.backend == "transformers":
        return
    if layout.pp > 1:
        yield (
            f"{given} has not been tried with pipeline stages of {layout.backend}: drop p from rollout.backend, or "
            "use t"
        )
    untried = {"speculative": recipe.rollout.speculative, "quantization": recipe.rollout.quantization}
    for name in [name for name, value in untried.items() if value is not None]:
        yield f"{given} has not been tried with rollout.{name}: drop it, or use rollout.backend=transformers:d1"


def _environment_problems(environment: EnvironmentConfig | None, given: str) -> Iterator[str]:
    """Yield a line for an environment whose episodes are not one sequence that begins with the row's messages."""
    if environment is None:
        return
    if environment.agent is not None:
        yield f"{given}: an agent writes its own prompts, which are text: use environment.game or environment.tools"
    if environment.memory is not None:
        yield f"{given}: an episode with images is one sequence, so drop environment.memory"
    if environment.tools is not None and not environment.keep_thinking:
        yield f"{given}: an episode with images is one sequence, so set environment.keep_thinking=true"


def image_layout_problems(
    recipe: Recipe, layouts: Mapping[str, ParallelLayout], shapes: Mapping[str, ModelShape]
) -> Iterator[str]:
    """Yield a line for each role whose first stage lacks layers to which features of images are added."""
    if not image_keys(recipe):
        return
    for role, layout in layouts.items():
        vision = shapes[role].vision
        if vision is None or not layout.is_training:
            continue
        try:
            first = chunk_sizes(shapes[role].n_layers, layout.pp, layout.vpp, layout.split)[0]
        except ValueError:
            continue  # which is another problem
        if first < vision.n_deepstack:
            yield (
                f"{role}: the first stage has {first} layers, and features of images are added to the first "
                f"{vision.n_deepstack}: lower p or v, or set num_layers_in_first_pipeline_stage"
            )
