"""`fivefold eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.command import Overrides, RecipePath, reporting_errors
from fivefold.imports import large_imports

ModelPath = Annotated[
    str | None,
    typer.Option(help="Model to evaluate, in place of the recipe's actor.path: folder, hub name or package:NAME."),
]


SamplesPath = Annotated[
    Path | None,
    typer.Option(help="JSONL file to write: each answer with its prompt, set, rewards and length."),
]


def evaluate(
    recipe: RecipePath, overrides: Overrides = None, model: ModelPath = None, samples: SamplesPath = None
) -> None:
    """Measure a model on held-out problems.

    The problems are the recipe's valid_dataset or valid_datasets, sampled as its evaluator section says. Prints JSON.

    \b
    Examples:
      fivefold eval recipes/quickstart.yaml
      fivefold eval recipes/quickstart.yaml --model runs/quickstart/trial-0/weights
      fivefold eval recipes/quickstart.yaml --samples answers.jsonl
    """
    with reporting_errors():
        from fivefold.config.load import load_recipe
        from fivefold.config.schema.train import TrainRecipe

        loaded = load_recipe(recipe, overrides or [], TrainRecipe)
        # The recipe is checked before anything heavy, such as torch and Ray, is imported.
        with large_imports():
            from fivefold.evaluate import evaluate
            from fivefold.observe.status_line import live_status

        with live_status() as status:
            result = evaluate(loaded, model=model, samples=samples, status=status)
        typer.echo(json.dumps(result, indent=2))
