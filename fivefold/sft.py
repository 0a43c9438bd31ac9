"""Supervised fine-tuning with the same engine: cross entropy on given responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.config.schema.data import SFTRowsConfig
from fivefold.config.schema.sft import SFTRecipe
from fivefold.data.examples import Examples
from fivefold.data.sft import SFTExample, load_sft, sft_columns
from fivefold.engine.scores import Logprobs
from fivefold.observe.columns import SFT_COLUMNS
from fivefold.observe.screens import ScreenKind
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.devices import Models
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.run.stepwise import Steps
from fivefold.supervised import Learnt, run_supervised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivefold.families.shape import ModelShape


@dataclass(frozen=True)
class FineTuning:
    """The method of `fivefold sft`."""

    recipe: SFTRecipe

    columns = SFT_COLUMNS
    unit = "examples"
    measured = ("nll",)
    n_appended = 0
    n_compared = 1

    def load(
        self, rows: SFTRowsConfig, tokenizer: PreTrainedTokenizerBase, model: tuple[str, ModelShape]
    ) -> Examples[SFTExample]:
        """Read prompts and responses."""
        return load_sft(rows, tokenizer, model)

    def update(self, models: Models, examples: Sequence[SFTExample], timers: PhaseTimers) -> Learnt:
        """Make one optimizer step on the responses."""
        batch = RemoteBatch.of(sft_columns(examples))
        with timers.phase("train"):
            return Learnt(models.actor.update(batch, SFTLoss()), trained=batch, scored=batch)

    def measure(self, models: Models, examples: Sequence[SFTExample]) -> dict[str, float]:
        """Return the mean negative log-likelihood of a response's token, in nats."""
        batch = RemoteBatch.of(sft_columns(examples))
        return {"nll": -float(models.actor.sums(batch, Logprobs()).sum()) / batch.totals().n_trained_tokens}

    def told(self, measures: Mapping[str, float]) -> str:
        """Return the loss as a text."""
        return f"loss {measures['nll']:.4f} a token"


def sft(recipe: SFTRecipe, *, overwrite: bool = False, screen: ScreenKind = "table") -> Steps[dict[str, Any]]:
    """Run `recipe`, as `run_supervised` says. Returns the content of `summary.json`."""
    return run_supervised(recipe, FineTuning(recipe), overwrite=overwrite, screen=screen)
