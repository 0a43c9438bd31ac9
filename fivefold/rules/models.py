"""Rules of models: what roles, data and keys ask of a model's vocabulary, positions and parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from fivefold.config.roles import ROLES, TEACHER, roles_of
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.rules import OfPart, marked, said
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.shape import ModelShape

RoleShapes = Mapping[str, ModelShape]
"""Shapes of the models that roles other than the actor have, by role."""
_READS = {
    "ref": "a KL divergence needs the same tokens",
    "critic": "the critic reads the actor's tokens",
    "reward": "the reward model reads the actor's tokens",
    "teacher": "the teacher gives probabilities of the actor's tokens",
}
"""Why each role must have the actor's tokens."""
MOST_FULL = 16_384
"""Largest vocabulary over which a teacher gives all log-probs: they take 8 bytes a token and entry in host memory."""


def vocabulary_problems(recipe: Recipe, shape: ModelShape, others: RoleShapes) -> Iterator[str]:
    """Yield a line for each role whose model needs the actor's vocabulary and has another; `shape` is the actor's."""
    for role, other in others.items():
        if other.vocab != shape.vocab and not ROLES[role].has_own_tokens and not reads_tokens_alone(recipe, role):
            path = roles_of(recipe)[role].path
            sampled = " or set actor.distill.over=sampled" if ROLES[role].row == TEACHER else ""
            yield (
                f"{ROLES[role].key}.path={path} has {other.vocab} tokens in its vocabulary, the actor "
                f"{shape.vocab}: {_READS[ROLES[role].row]}, so name a model with the actor's vocabulary{sampled}"
            )


def reads_tokens_alone(recipe: Recipe, role: str) -> bool:
    """Return whether a role reads the actor's tokens and says nothing about other tokens.

    Its vocabulary may then be padded to another size than the actor's, if the tokenizers agree.
    """
    is_sampled = isinstance(recipe, TrainRecipe) and recipe.actor.distill.over == "sampled"
    return role == "reward" or (ROLES[role].row == TEACHER and is_sampled)


def reference_problems(recipe: TrainRecipe, shape: ModelShape, others: RoleShapes) -> Iterator[str]:
    """Yield a line if a reference is to follow an actor whose model has another shape."""
    if recipe.ref.refresh_steps is None:
        return
    key = "refresh_every" if recipe.ref.refresh_every is not None else "ema_decay"
    if others.get("ref", shape) != shape:
        yield (
            f"ref.{key}={getattr(recipe.ref, key)} takes the actor's weights, but ref.path={recipe.ref.path} is a "
            f"model of another shape: name one with the actor's shape, or drop ref.{key}"
        )


def distillation_problems(recipe: TrainRecipe, shape: ModelShape) -> Iterator[str]:
    """Yield a line if a teacher would give more log-probs than host memory holds."""
    if recipe.actor.distill.over == "full" and shape.vocab > MOST_FULL:
        yield (
            f"actor.distill.over=full keeps all {shape.vocab:,} log-probs of each token, which is for vocabularies of "
            f"up to {MOST_FULL:,}: set over=top_k, which counts all other tokens as one"
        )


def sampling_problems(recipe: TrainRecipe, shape: ModelShape) -> Iterator[str]:
    """Yield a line for each key of `gconfig` that asks for what the model cannot generate, whatever the prompts are."""
    longest = recipe.gconfig.max_new_tokens
    together = recipe.gconfig.max_tokens
    if together is not None and together > shape.most_tokens:
        yield f"gconfig.max_tokens={together} is too much: the model {shape.limit}; lower it"
    if together is None and longest >= shape.most_tokens:
        yield f"gconfig.max_new_tokens={longest} leaves no room for a prompt: the model {shape.limit}; lower it"
    if recipe.environment is not None and recipe.environment.max_length > shape.most_tokens:
        yield f"environment.max_length={recipe.environment.max_length} is too much: the model {shape.limit}; lower it"
    config = recipe.gconfig
    for key, tokens in {
        "stop_token_ids": config.stop_token_ids,
        "bad_token_ids": config.bad_token_ids,
        "logit_bias": map(int, config.logit_bias),
    }.items():
        if strays := [token for token in tokens if token >= shape.vocab]:
            yield f"gconfig.{key} holds {strays[0]}, but the model's vocabulary has {shape.vocab} tokens: remove it"


def part_problems(path: str, section: BaseModel, shape: ModelShape, *, warns: bool = False) -> Iterator[str]:
    """Yield a line for each key of a section about a part that the model lacks; those that warn, or the others."""
    for key, value, mark in marked(section, OfPart):
        if mark.warns is warns and not getattr(shape, mark.part):
            if warns:
                yield f"{path}.{key}={said(value)} has no effect: {shape.family} has no {mark.name}"
            else:
                yield f"{path}.{key}={said(value)} is about {mark.name}, and {shape.family} has none: drop it"


def check_tokens(shape: ModelShape, data: str, largest: int) -> None:
    """Refuse tokens outside the model's vocabulary, which slices of an embedding would take for tokens of others.

    Args:
        shape: the model.
        data: what errors call the data.
        largest: the largest token of the data.

    Raises:
        ValueError: there is such a token.
    """
    if largest >= shape.vocab:
        raise ValueError(
            f"{data} has token {largest}, but the model's vocabulary has {shape.vocab:,} tokens: tokenizer and model "
            "do not belong together, so name the model's own tokenizer in tokenizer_path, or another model"
        )


def check_examples(shape: ModelShape, section: str, longest: int, largest_token: int, n_appended: int = 0) -> None:
    """Refuse examples that are longer than the model's positions, or whose tokens the model does not have.

    Args:
        shape: the model.
        section: the recipe's section of the data set.
        longest: tokens of the longest example.
        largest_token: the largest token of all examples.
        n_appended: tokens that are appended to every example.

    Raises:
        ValueError: the longest example is longer than the model's positions, or a token is not in its vocabulary.
    """
    check_tokens(shape, section, largest_token)
    if longest + n_appended > shape.most_tokens:
        most = shape.most_tokens - n_appended
        last = ", one of them behind each example" if n_appended else ""
        raise ValueError(
            f"the longest example of {section} has {longest} tokens, but the model {shape.limit}{last}: set "
            f"{section}.max_length={most} to leave such examples out"
        )
