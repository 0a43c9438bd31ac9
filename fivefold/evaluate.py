"""Accuracy on held-out prompts: between training steps, and of a model by itself (`fivefold eval`)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.cluster.session import Session
from fivefold.config.paths import resolve_model_path
from fivefold.config.schema import TrainRecipe
from fivefold.data.prompts import load_prompts
from fivefold.layout.check import check_recipe
from fivefold.layout.placement import place
from fivefold.layout.shape import load_shape
from fivefold.observe.timers import PhaseTimers
from fivefold.rewards import NamedReward, resolve_reward
from fivefold.roles import Rollout, rollout_role
from fivefold.rollout.hf_model import load_tokenizer
from fivefold.rollout.protocol import SamplingParams
from fivefold.samples import accuracy, make_samples, sample_metrics
from fivefold.types import Prompt, Sample


@dataclass(frozen=True)
class Evaluation:
    """How a model does on held-out prompts."""

    accuracy: float
    """Share of completions with full reward."""
    reward: float
    """Mean reward."""
    response_length: float
    """Mean length in tokens."""
    n_prompts: int
    samples: tuple[Sample, ...]


class Evaluator:
    """Held-out prompts, and how they are sampled and judged."""

    def __init__(
        self, recipe: TrainRecipe, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, reward: NamedReward
    ) -> None:
        self.prompts = tuple(prompts)
        self._tokenizer = tokenizer
        self._reward = reward
        self._n_samples = recipe.evaluator.n_samples
        self._sampling = SamplingParams.for_evaluation(recipe.gconfig, recipe.evaluator)
        self._seed = recipe.seed

    @classmethod
    def of(cls, recipe: TrainRecipe, tokenizer: PreTrainedTokenizerBase, reward: NamedReward) -> Evaluator | None:
        """None where the recipe has no `valid_dataset`."""
        if recipe.valid_dataset is None:
            return None
        return cls(recipe, load_prompts(recipe.valid_dataset, tokenizer).prompts, tokenizer, reward)

    def run(self, rollout: Rollout) -> Evaluation:
        """Sample every held-out prompt with the weights of now. Random choices are the same at every evaluation."""
        completions = rollout.generate(self.prompts, self._n_samples, self._sampling, (self._seed, "evaluation"))
        samples = make_samples(self.prompts, completions, self._tokenizer, self._reward)
        return Evaluation(
            accuracy=accuracy(samples),
            reward=sum(sample.reward for sample in samples) / len(samples),
            response_length=sample_metrics(samples)["response_length/mean"],
            n_prompts=len(self.prompts),
            samples=tuple(samples),
        )


def evaluate(recipe: TrainRecipe, *, model: str | None = None) -> dict[str, float | int | str]:
    """Accuracy of `model` (none: the recipe's actor) on the recipe's held-out prompts, by its rollout engine alone.

    Raises:
        ValueError: the recipe has no `valid_dataset`, or cannot run here.
    """
    path = resolve_model_path(model or recipe.actor.path)
    check_recipe(recipe, load_shape(resolve_model_folder(path)))
    tokenizer = load_tokenizer(resolve_model_path(recipe.tokenizer_path or path))
    evaluator = Evaluator.of(recipe, tokenizer, resolve_reward(recipe.reward))
    if evaluator is None:
        raise ValueError("the recipe has no valid_dataset: name the held-out prompts to evaluate on")
    timers = PhaseTimers()
    with (
        tempfile.TemporaryDirectory() as logs,
        Session.open(recipe.scheduler, recipe.cluster, Path(logs), timers) as session,
    ):
        role = rollout_role(recipe, place(recipe), path, load_weights=True)
        rollout = Rollout(session.launch(role)["rollout"], shares_devices=False)
        with timers.phase("evaluation"):
            result = evaluator.run(rollout)
    return {
        "model": path,
        "accuracy": result.accuracy,
        "reward": result.reward,
        "response_length": result.response_length,
        "n_prompts": result.n_prompts,
    }
