"""`fivefold train`."""

from __future__ import annotations

from fivefold.cli.command import AsJson, Overrides, OverwriteRun, Quiet, RecipePath, reporting_errors, screen_kind
from fivefold.imports import large_imports


def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    overwrite: OverwriteRun = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a model by reinforcement learning.

    Everything goes to runs/<experiment_name>/<trial_name>/: weights (Hugging Face format), metrics.jsonl, sample
    generations, TensorBoard logs, worker logs and summary.json.

    \b
    Examples:
      fivefold train recipes/quickstart.yaml
      fivefold train recipes/quickstart.yaml trial_name=lr-2e-6 actor.optimizer.lr=2e-6
      fivefold train recipes/quickstart.yaml cluster.n_gpus_per_node=1 actor.backend=megatron:d1
    """
    with reporting_errors() as command:
        from fivefold.config.load import load_recipe
        from fivefold.config.schema.train import TrainRecipe

        command.recipe = loaded = load_recipe(recipe, overrides or [], TrainRecipe)
        # The recipe is checked before anything heavy, such as torch and Ray, is imported.
        with large_imports():
            from fivefold.train import train

        train(loaded, overwrite=overwrite, screen=screen_kind(quiet=quiet, as_json=as_json))
