"""Training of a reward model on preferences, by Bradley and Terry: one score for a sequence (docs/preferences.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from fivefold.algorithms.preferences import BradleyTerry
from fivefold.config.schema import RMRecipe
from fivefold.data.examples import Examples
from fivefold.data.preferences import Pair, load_pairs, score_columns
from fivefold.observe.table import PAIR_COLUMNS
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.preference_update import Comparison, Scoring
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.supervised import Learnt, run_supervised

SCORING = Scoring("values")


@dataclass(frozen=True)
class RewardModeling:
    """The method of `fivefold rm`."""

    recipe: RMRecipe

    columns = PAIR_COLUMNS
    measured = ("accuracy", "loss", "margin")
    n_appended = 1

    def load(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Examples[Pair], Examples[Pair] | None]:
        """Read pairs."""
        valid = self.recipe.valid_dataset
        return load_pairs(self.recipe.train_dataset, tokenizer), None if valid is None else load_pairs(valid, tokenizer)

    def update(self, actor: Actor, examples: Sequence[Pair], timers: PhaseTimers) -> Learnt:
        """Make one optimizer step on pairs."""
        comparison = self._comparison(examples)
        return Learnt(SCORING.update(actor, comparison, timers), comparison.batch.n_tokens)

    def measure(self, actor: Actor, examples: Sequence[Pair]) -> dict[str, float]:
        """Return the metrics of the loss."""
        return SCORING.measure(actor, self._comparison(examples))

    def told(self, measures: Mapping[str, float]) -> str:
        """Return the accuracy and the margin as a text."""
        return f"accuracy {measures['accuracy']:.3f}, margin {measures['margin']:.3f}"

    def _comparison(self, pairs: Sequence[Pair]) -> Comparison:
        answers = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
        batch = RemoteBatch.of(score_columns(answers))
        return Comparison(batch, BradleyTerry(self.recipe.actor.center_rewards_coefficient), n_trained=len(batch))


def rm(recipe: RMRecipe, *, overwrite: bool = False) -> dict[str, Any]:
    """Run `recipe`, as `run_supervised` says. Returns the content of `summary.json`."""
    return run_supervised(recipe, RewardModeling(recipe), overwrite=overwrite)
