"""Training of a reward model on preferences, by Bradley and Terry: one score for a sequence (docs/preferences.md)."""

from __future__ import annotations

from typing import Any

from fivefold.algorithms.preferences import BradleyTerry
from fivefold.config.schema.preferences import RMRecipe
from fivefold.data.preferences import score_columns
from fivefold.observe.screens import ScreenKind
from fivefold.run.stepwise import Steps
from fivefold.supervised import PairMethod, run_supervised
from fivefold.update.preferences import Scoring


def rm(recipe: RMRecipe, *, overwrite: bool = False, screen: ScreenKind = "table") -> Steps[dict[str, Any]]:
    """Run `recipe`, as `run_supervised` says. Returns the content of `summary.json`."""
    objective = BradleyTerry(recipe.actor.center_rewards_coefficient)
    method = PairMethod(recipe, Scoring("values"), objective, score_columns, n_appended=1)
    return run_supervised(recipe, method, overwrite=overwrite, screen=screen)
