"""Checks of the models of all roles before a process is started: their weight files, and the tokens that they read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from fivefold.bridge.audit import check_weights
from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.bridge.kept import check_kept, draft_files
from fivefold.config.problems import RecipeError
from fivefold.config.roles import Role
from fivefold.config.schema.engine import EngineConfig, FrozenModelConfig
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import is_quantized, load_shape
from fivefold.families.shape import ModelShape
from fivefold.layout.backends import BACKENDS
from fivefold.layout.recipe import recipe_allocation
from fivefold.roles.specs import model_shape
from fivefold.rollout.tokenizer import has_tokenizer, load_tokenizer, other_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_weight_files(recipe: Recipe, roles: Iterable[Role]) -> None:
    """Check the weight files that processes of `roles` will read.

    Raises:
        ValueError: a model that is missing or not supported, or files that are broken or of another model.
    """
    for role in roles:
        if role.path is None:  # it has the actor's
            continue
        folder, engine = resolve_model_folder(role.path), role.section
        if not isinstance(engine, EngineConfig):
            # A server reads quantized tensors in its way, whose names and shapes are not known here.
            is_foreign = _is_served(recipe, role) and is_quantized(folder)
            check_weights(folder, None if is_foreign else model_shape(recipe, role))
        elif engine.megatron.dist_checkpointing_path is not None:
            _check_torch_dist(engine.megatron.dist_checkpointing_path, load_shape(folder))
            check_kept(folder, model_shape(recipe, role))
        elif engine.init_from_scratch:
            check_kept(folder, model_shape(recipe, role))
        else:
            check_weights(folder, model_shape(recipe, role))
    if isinstance(recipe, TrainRecipe) and (drafts := recipe.rollout.speculative) and drafts.method == "mtp":
        draft_files(resolve_model_folder(recipe.actor.path))


def _is_served(recipe: Recipe, role: Role) -> bool:
    """Return whether an inference server reads a role's weight files."""
    return any(BACKENDS[each.backend].is_server for each in recipe_allocation(recipe).roles if each.role == role.name)


def _check_torch_dist(checkpoint: str, shape: ModelShape) -> None:
    # Imported here: torch.distributed.checkpoint takes half a second, which most drivers save.
    from fivefold.bridge.megatron_reader import MegatronWeights

    MegatronWeights(checkpoint, shape).close()


def check_tokenizers(
    recipe: Recipe, roles: Iterable[Role], actor: ModelShape, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse frozen models that would read other tokens than the actor has sampled.

    Args:
        recipe: the recipe.
        roles: the roles; roles without a separate frozen model are not checked.
        actor: shape of the actor's model.
        tokenizer: the run's.

    Raises:
        ValueError: a model that is missing or not supported, or that has other tokens.
    """
    frozen = [role for role in roles if isinstance(role.section, FrozenModelConfig)]
    if problems := [line for role in frozen for line in _token_problems(recipe, role, actor.vocab, tokenizer)]:
        raise RecipeError(recipe.experiment_name, problems)


def _token_problems(recipe: Recipe, role: Role, actor_vocab: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield a line if a model reads other tokens than the run's tokenizer and the actor have."""
    assert role.path is not None
    vocab = model_shape(recipe, role).vocab
    key, folder = f"{role.spec.key}.path={role.path}", resolve_model_folder(role.path)
    last = max(number for number in tokenizer.get_vocab().values() if number < actor_vocab)
    if last >= vocab:
        yield f"{key} has {vocab} tokens, and the actor's tokenizer goes up to token {last}: name one with all of them"
    elif not has_tokenizer(folder):
        if vocab != actor_vocab:
            yield (
                f"{key} has {vocab} tokens, the actor {actor_vocab}, and no tokenizer that shows whether they are the "
                "same but for padding: put the files of its tokenizer into the folder"
            )
    elif found := other_token(tokenizer, load_tokenizer(str(folder), trust_remote_code=recipe.trust_remote_code)):
        number, ours, theirs = found
        yield (
            f"{key} reads other tokens than the actor's: token {number} is {theirs!r} in its tokenizer and {ours!r} in "
            "the actor's, so name a model with the actor's tokenizer"
        )
