"""`fivefold play`."""

from __future__ import annotations

from typing import Annotated

import typer

from fivefold.cli.command import Overrides, RecipePath, reporting_errors
from fivefold.imports import large_imports

ModelPath = Annotated[
    str | None,
    typer.Option(help="Model that plays, in place of the recipe's actor.path: folder, hub name or package:NAME."),
]
NumberOfPrompts = Annotated[int, typer.Option("-n", min=1, help="Play the first N prompts, once each.")]


WithIds = Annotated[bool, typer.Option("--ids", help="Show the ids of tokens below their texts.")]


def play(
    recipe: RecipePath,
    overrides: Overrides = None,
    model: ModelPath = None,
    n: NumberOfPrompts = 1,
    ids: WithIds = False,
) -> None:
    """Play episodes of a recipe, and show them turn by turn.

    They are played in this process, and what is shown as the model's is what would be trained. Of an episode of several
    sequences, each says where it leaves an earlier one.

    \\b
    Examples:
      fivefold play recipes/guess-digit.yaml -n 3
      fivefold play recipes/guess-digit.yaml environment.game=my_game.py:Game
    """
    with reporting_errors():
        from fivefold.config.load import load_recipe
        from fivefold.config.schema.train import TrainRecipe

        loaded = load_recipe(recipe, overrides or [], TrainRecipe)
        with large_imports():
            from fivefold.play import play as played

        for episode in played(loaded, model, n, with_ids=ids):
            typer.echo(episode)
