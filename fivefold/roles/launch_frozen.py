"""Starts models that are not trained, in processes of their own: a reward model, a teacher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from fivefold.bridge.audit import check_weights
from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.bridge.value_head import with_stored_head
from fivefold.cluster.group import WorkerGroup
from fivefold.cluster.session import Session
from fivefold.config.paths import resolve_model_path
from fivefold.config.problems import RecipeError
from fivefold.config.role_sections import ROLE_SECTIONS, frozen_models
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.contract import Offloadable
from fivefold.families.read import load_shape
from fivefold.families.shape import ModelShape
from fivefold.layout.placement import Placement
from fivefold.roles.actor import Actor
from fivefold.roles.frozen import FrozenModel
from fivefold.roles.trainer_roles import engine_config, trainer_of, trainer_role
from fivefold.roles.trainer_worker import TrainerSpec, TrainerWorker
from fivefold.rollout.tokenizer import has_tokenizer, load_tokenizer, other_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def frozen_shape(recipe: TrainRecipe, role: str) -> ModelShape:
    """Return the shape of a frozen model, that of a reward model with the head in its weight files.

    Raises:
        ValueError: a model that is missing or not supported, or a reward model without a head.
    """
    folder = resolve_model_folder(frozen_models(recipe)[role].path)
    shape = load_shape(folder)
    return with_stored_head(shape, folder) if role == "reward" else shape


def check_frozen(
    recipe: TrainRecipe, actor: ModelShape, placement: Placement, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse frozen models that cannot be started, or that would read other tokens than the actor has sampled.

    Args:
        recipe: the recipe.
        actor: shape of the actor's model.
        placement: the roles on their devices; those that are not placed are not checked.
        tokenizer: the run's.

    Raises:
        ValueError: a model that is missing or not supported, that has other tokens, or whose weight files are broken.
    """
    shapes = {role: frozen_shape(recipe, role) for role in frozen_models(recipe) if role in placement}
    problems: list[str] = []
    for role, shape in shapes.items():
        problems += _token_problems(recipe, role, shape.vocab, actor.vocab, tokenizer)
    if problems:
        raise RecipeError(recipe.experiment_name, problems)
    for role, shape in shapes.items():
        check_weights(resolve_model_folder(frozen_models(recipe)[role].path), shape)


def _token_problems(
    recipe: TrainRecipe, role: str, vocab: int, actor_vocab: int, tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """Yield a line if a model of `vocab` tokens reads other tokens than the run's tokenizer and the actor have."""
    path = frozen_models(recipe)[role].path
    key, folder = f"{ROLE_SECTIONS[role]}.path={path}", resolve_model_folder(path)
    last = max(number for number in tokenizer.get_vocab().values() if number < actor_vocab)
    if last >= vocab:
        yield f"{key} has {vocab} tokens, and the actor's tokenizer goes up to token {last}: name one with all of them"
    elif not has_tokenizer(folder):
        if vocab != actor_vocab:
            yield (
                f"{key} has {vocab} tokens, the actor {actor_vocab}, and no tokenizer that shows whether they are the "
                "same but for padding: put the files of its tokenizer into the folder"
            )
    elif found := other_token(tokenizer, load_tokenizer(str(folder))):
        number, ours, theirs = found
        yield (
            f"{key} reads other tokens than the actor's: token {number} is {theirs!r} in its tokenizer and {ours!r} in "
            "the actor's, so name a model with the actor's tokenizer"
        )


def frozen_specs(recipe: TrainRecipe, placement: Placement) -> dict[str, TrainerSpec]:
    """Return the spec of the processes of each frozen model that is placed, by role."""
    specs = {}
    for role, section in frozen_models(recipe).items():
        if role in placement:
            shape = frozen_shape(recipe, role)
            specs[role] = TrainerSpec(
                model=engine_config(section, resolve_model_path(section.path)),
                layout=placement[role].layout,
                seed=recipe.seed,
                timeout_s=recipe.scheduler.timeout_s,
                value_head=shape.value_head,
                value_bias=shape.value_bias,
            )
    return specs


def offloaded_frozen(recipe: TrainRecipe, placement: Placement, role: str) -> tuple[Offloadable, ...]:
    """Return what a frozen model moves off its devices while it does not work: on GPUs that it shares, its weights."""
    wanted = frozen_models(recipe)[role].offload
    by_default = bool(placement.sharers(role)) and not placement.is_cpu
    return ("params",) if (by_default if wanted is None else wanted) else ()


def frozen_models_of(
    recipe: TrainRecipe,
    placement: Placement,
    groups: Mapping[str, WorkerGroup],
    specs: Mapping[str, TrainerSpec],
    actor: Actor | None,
) -> dict[str, FrozenModel]:
    """Return the handles of frozen models whose processes have started, by role.

    Args:
        recipe: the recipe.
        placement: the roles on their devices.
        groups: the processes of each role.
        specs: the spec of each frozen model.
        actor: the actor; None: it is not started.
    """
    models = {}
    for role, spec in specs.items():
        trained = set(placement.sharers(role)) - {"rollout"}
        models[role] = FrozenModel(
            trainer_of(groups[role], spec),
            is_offloaded=bool(offloaded_frozen(recipe, placement, role)),
            actor=actor if "actor" in trained else None,
            in_turn=actor.in_turn if actor is not None and trained else None,
        )
    return models


def launch_frozen(session: Session, recipe: TrainRecipe, placement: Placement) -> dict[str, FrozenModel]:
    """Start the frozen models that are placed, without an actor; return their handles by role."""
    specs = frozen_specs(recipe, placement)
    groups: dict[str, WorkerGroup] = {}
    for role, spec in specs.items():
        groups |= session.launch(trainer_role(role, placement, spec))
        groups[role].call(TrainerWorker.offload, offloaded_frozen(recipe, placement, role))
    return frozen_models_of(recipe, placement, groups, specs, None)
