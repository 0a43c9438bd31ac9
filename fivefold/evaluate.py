"""Accuracy on held-out prompts: between training steps, and of a model by itself (`fivefold eval`)."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.cluster.session import Session
from fivefold.config.paths import resolve_model_path
from fivefold.config.problems import RecipeError
from fivefold.config.schema import TrainRecipe
from fivefold.data.prompts import PromptDataset, load_prompts
from fivefold.experience.samples import accuracy, judge, sample_metrics
from fivefold.families.check import layout_problems, replica_problems, server_problems
from fivefold.families.read import load_shape
from fivefold.families.shape import ModelShape
from fivefold.layout.allocation import Allocation
from fivefold.layout.placement import Placement, place_allocation
from fivefold.layout.recipe import recipe_allocation
from fivefold.observe.errors import RunFailed
from fivefold.observe.timers import PhaseTimers
from fivefold.rewards import NamedReward, check_ground_truths, resolve_reward
from fivefold.roles.launch import replica_spec, rollout_role
from fivefold.roles.rollout import Rollout
from fivefold.rollout.engines import check_server
from fivefold.rollout.hf_model import load_tokenizer
from fivefold.rollout.protocol import SamplingParams
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

    def __init__(self, recipe: TrainRecipe, data: PromptDataset, reward: NamedReward) -> None:
        self.data = data
        self.sampling = SamplingParams.for_evaluation(recipe.gconfig, recipe.evaluator)
        self._reward = reward
        self._n_samples = recipe.evaluator.n_samples
        self._seed = recipe.seed

    @classmethod
    def of(cls, recipe: TrainRecipe, tokenizer: PreTrainedTokenizerBase, reward: NamedReward) -> Evaluator | None:
        """None where the recipe has no `valid_dataset`."""
        if recipe.valid_dataset is None:
            return None
        data = load_prompts(recipe.valid_dataset, tokenizer)
        check_ground_truths(reward, data.prompts)
        return cls(recipe, data, reward)

    def run(self, rollout: Rollout) -> Evaluation:
        """Sample every held-out prompt with the weights of now. Random choices are the same at every evaluation."""
        prompts = self.data.prompts
        generated = rollout.generate(prompts, self._n_samples, self.sampling, (self._seed, "evaluation"))
        samples = judge(generated.samples, self._reward)
        return Evaluation(
            accuracy=accuracy(samples),
            reward=sum(sample.reward for sample in samples) / len(samples),
            response_length=sample_metrics(samples)["response_length/mean"],
            n_prompts=len(prompts),
            samples=tuple(samples),
        )


def check_requests(shape: ModelShape, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
    """Refuse what the model cannot be asked.

    Raises:
        ValueError: completions that could outgrow the model's positions, or stop tokens outside its vocabulary.
    """
    longest = max(len(prompt.token_ids) for prompt in prompts) + sampling.max_new_tokens
    if longest > shape.max_positions:
        raise ValueError(
            f"the longest prompt and gconfig.max_new_tokens={sampling.max_new_tokens} make {longest} tokens, but the "
            f"model has {shape.max_positions} positions: lower gconfig.max_new_tokens or the data set's max_length"
        )
    if strays := [token for token in sampling.stop_token_ids if token >= shape.vocab]:
        raise ValueError(
            f"gconfig.stop_token_ids holds {strays[0]}, but the model's vocabulary has {shape.vocab} tokens: remove it"
        )


def evaluate(recipe: TrainRecipe, *, model: str | None = None) -> dict[str, float | int | str]:
    """Accuracy of `model` (none: the recipe's actor) on the recipe's held-out prompts, by its rollout engine alone.

    Raises:
        ValueError: the recipe has no `valid_dataset`, or its rollout cannot run here.
        RunFailed: a worker or the reward failed.
    """
    path = resolve_model_path(model or recipe.actor.path)
    shape = load_shape(resolve_model_folder(path))
    placement = _place_rollout(recipe, shape)
    check_server(replica_spec(recipe, placement, path, load_weights=True))
    tokenizer = load_tokenizer(resolve_model_path(recipe.tokenizer_path or path))
    evaluator = Evaluator.of(recipe, tokenizer, resolve_reward(recipe.reward, recipe.scheduler.timeout_s))
    if evaluator is None:
        raise ValueError("the recipe has no valid_dataset: name the held-out prompts to evaluate on")
    check_requests(shape, evaluator.data.prompts, evaluator.sampling)
    timers = PhaseTimers()
    # It outlives a failure, whose message names a file in it.
    logs = Path(tempfile.mkdtemp(prefix="fivefold-evaluation-"))
    with Session.open(recipe.scheduler, recipe.cluster, logs, timers) as session:
        role = rollout_role(recipe, placement, path, load_weights=True)
        rollout = Rollout(session.launch(role)["rollout"], shares_devices=False)
        with timers.phase("evaluation"):
            result = _run(evaluator, rollout)
    shutil.rmtree(logs)
    return {
        "model": path,
        "accuracy": result.accuracy,
        "reward": result.reward,
        "response_length": result.response_length,
        "n_prompts": result.n_prompts,
        "n_too_long": evaluator.data.n_too_long,
    }


def _run(evaluator: Evaluator, rollout: Rollout) -> Evaluation:
    try:
        return evaluator.run(rollout)
    except ValueError as error:  # a reward that fails on an answer, say: too late to be wrong input
        raise RunFailed(str(error)) from error


def _place_rollout(recipe: TrainRecipe, shape: ModelShape) -> Placement:
    """The rollout's replicas as if the cluster were theirs alone: the actor may need more than is here."""
    roles = [role for group in recipe_allocation(recipe).groups for role in group if role.role == "rollout"]
    placement = place_allocation(Allocation((tuple(roles),)), recipe.cluster.n_nodes, recipe.cluster.n_gpus_per_node)
    rollout = placement["rollout"]
    problems = [f"rollout: {line}" for line in layout_problems(rollout.layout, shape)]
    problems += [*replica_problems(rollout), *server_problems(recipe)]
    if problems:
        raise RecipeError(recipe.experiment_name, problems)
    return placement
