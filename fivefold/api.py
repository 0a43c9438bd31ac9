"""Runs from Python: a recipe, its steps one at a time, and what they measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fivefold.config.load import load_any_recipe, recipe_of
from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.imports import large_imports
from fivefold.observe.json_records import records
from fivefold.observe.run_dir import RunDir
from fivefold.observe.screens import ScreenKind
from fivefold.run.stepwise import Steps, to_the_end

Start = Callable[..., Steps[dict[str, Any]]]


class Run:
    """A run of a recipe, as `fivefold train`, `sft`, `dpo` or `rm` make it.

        run = Run("recipes/quickstart.yaml", ["total_train_steps=20"])
        for step in run.steps():
            print(step.number, step.metrics["reward/mean"])
        print(run.summary["accuracy_after"])

    Its results are where the command's would be, and it resumes from its newest checkpoint like the command.
    """

    def __init__(
        self,
        recipe: Recipe | str | Path | Mapping[str, Any],
        overrides: Sequence[str] = (),
        *,
        overwrite: bool = False,
        screen: ScreenKind = "quiet",
    ) -> None:
        """Check the recipe; nothing is started.

        Args:
            recipe: a recipe, its YAML file, or its keys as nested mappings.
            overrides: `key=value` texts, as on the command line; for a file or mappings.
            overwrite: delete the results of an earlier run of the same name.
            screen: what is printed.

        Raises:
            ValueError: a recipe with problems, or overrides of a recipe that has been checked.
        """
        if isinstance(recipe, Mapping):
            self.recipe: Recipe = recipe_of(recipe, overrides)
        elif isinstance(recipe, str | Path):
            self.recipe = load_any_recipe(recipe, overrides)
        elif overrides:
            raise ValueError(f"overrides={list(overrides)} are for a file or mappings: change the recipe itself")
        else:
            self.recipe = recipe
        self.summary: dict[str, Any] | None = None
        """The content of `summary.json`; None until the last step is done."""
        self._start = partial(trainer_of, overwrite=overwrite, screen=screen)

    @property
    def folder(self) -> Path:
        """The folder of the run's results."""
        return RunDir.of(self.recipe).path

    def steps(self) -> Steps[dict[str, Any]]:
        """Make the steps, one each time that the next is asked for, and return the summary.

        A loop that is left early ends the run after the step, with a checkpoint from which `steps` continues, also in
        another process; the iterator must then be closed, or dropped. Only the main thread can make steps.

        Raises:
            ValueError: a recipe, a data set or a machine with which the run cannot start; nothing was trained.
            RunFailed: a worker failed, died or hung, or a checkpoint could not be written.
            RunStopped: the run was asked to end, and ended after a step.
        """
        self.summary = yield from self._start(self.recipe)
        return self.summary

    def finish(self) -> dict[str, Any]:
        """Make all steps that are left; return the summary. It raises what `steps` raises."""
        return to_the_end(self.steps())

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each step that is done, with its number as `step`."""
        return list(records(RunDir.of(self.recipe).metrics))


def trainer_of(recipe: Recipe, *, overwrite: bool, screen: ScreenKind) -> Steps[dict[str, Any]]:
    """Return the steps of a recipe of any kind; nothing has begun. The arguments are explained on `Run`."""
    # torch and Ray are imported only now, after the recipe was checked.
    start: Start
    with large_imports():
        match recipe:
            case TrainRecipe():
                from fivefold.train import train as start
            case SFTRecipe():
                from fivefold.sft import sft as start
            case DPORecipe():
                from fivefold.dpo import dpo as start
            case RMRecipe():
                from fivefold.rm import rm as start
    return start(recipe, overwrite=overwrite, screen=screen)
