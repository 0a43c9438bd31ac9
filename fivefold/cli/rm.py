"""`fivefold rm`."""

from __future__ import annotations

from fivefold.cli.command import AsJson, Overrides, OverwriteRun, Quiet, RecipePath, reporting_errors, screen_kind
from fivefold.imports import large_imports


def rm(
    recipe: RecipePath,
    overrides: Overrides = None,
    overwrite: OverwriteRun = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a reward model on preferences.

    \b
    Example:
      fivefold rm recipes/quickstart-rm.yaml trial_name=seed-2 seed=2
    """
    with reporting_errors() as command:
        from fivefold.config.load import load_recipe
        from fivefold.config.schema.preferences import RMRecipe

        command.recipe = loaded = load_recipe(recipe, overrides or [], RMRecipe)
        # The recipe is checked before anything heavy, such as torch and Ray, is imported.
        with large_imports():
            from fivefold.rm import rm

        rm(loaded, overwrite=overwrite, screen=screen_kind(quiet=quiet, as_json=as_json))
