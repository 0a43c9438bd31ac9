"""Training on preferences without a reward model: DPO and its relatives (docs/preferences.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fivefold.algorithms.preferences import DirectPreference, KahnemanTversky
from fivefold.config.schema.data import DPORowsConfig
from fivefold.config.schema.preferences import DPORecipe
from fivefold.data.examples import Examples
from fivefold.data.preferences import Labelled, load_labelled
from fivefold.data.sft import SFTExample, sft_columns
from fivefold.observe.columns import KTO_COLUMNS
from fivefold.observe.screens import ScreenKind
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.devices import Models
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.run.stepwise import Steps
from fivefold.supervised import Learnt, PairMethod, run_supervised
from fivefold.update.preferences import Comparison, Scoring

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivefold.families.shape import ModelShape

SCORING = Scoring("logprobs")


@dataclass(frozen=True)
class LabelledAnswers:
    """The method of `fivefold dpo` on single answers: KTO."""

    recipe: DPORecipe

    columns = KTO_COLUMNS
    unit = "answers"
    measured = ("accuracy", "loss")
    n_appended = 0
    n_compared = 2

    def load(
        self, rows: DPORowsConfig, tokenizer: PreTrainedTokenizerBase, model: tuple[str, ModelShape]
    ) -> Examples[Labelled]:
        """Read answers with labels."""
        return load_labelled(rows, tokenizer, model)

    def update(self, models: Models, examples: Sequence[Labelled], timers: PhaseTimers) -> Learnt:
        """Make one optimizer step on answers."""
        comparison = self._comparison(examples)
        result = SCORING.update(models, comparison, timers)
        return Learnt(result, trained=comparison.trained, scored=comparison.batch)

    def measure(self, models: Models, examples: Sequence[Labelled]) -> dict[str, float]:
        """Return the metrics of the loss."""
        return SCORING.measure(models, self._comparison(examples))

    def told(self, measures: Mapping[str, float]) -> str:
        """Return the accuracy and the loss as a text."""
        return f"accuracy {measures['accuracy']:.3f}, loss {measures['loss']:.4f}"

    def _comparison(self, examples: Sequence[Labelled]) -> Comparison:
        answers = [example.answer for example in examples]
        longest = max(answer.n_tokens for answer in answers)
        # Half the batch away, because answers to one prompt often are adjacent.
        half = len(answers) // 2
        others = [
            _answered(prompt, answer, longest)
            for prompt, answer in zip(answers, answers[half:] + answers[:half], strict=True)
        ]
        objective = KahnemanTversky(self.recipe.actor, tuple(example.is_desirable for example in examples))
        return Comparison(RemoteBatch.of(sft_columns([*answers, *others])), objective, n_trained=len(answers))


def _answered(prompt: SFTExample, answer: SFTExample, longest: int) -> SFTExample:
    """Return one example's prompt with the answer to another, cut to `longest` tokens in all."""
    response_ids = answer.response_ids[: longest - len(prompt.prompt_ids)]
    return SFTExample(prompt.prompt_ids, response_ids, images=prompt.images)


def dpo(recipe: DPORecipe, *, overwrite: bool = False, screen: ScreenKind = "table") -> Steps[dict[str, Any]]:
    """Run `recipe`, as `run_supervised` says. Returns the content of `summary.json`."""
    if recipe.actor.loss_type == "kto":
        return run_supervised(recipe, LabelledAnswers(recipe), overwrite=overwrite, screen=screen)
    method = PairMethod(recipe, SCORING, DirectPreference.of(recipe.actor), sft_columns)
    return run_supervised(recipe, method, overwrite=overwrite, screen=screen)
