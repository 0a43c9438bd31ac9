"""Accuracy on held-out prompts: between training steps, and of a model alone (`fivefold eval`)."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fivefold.bridge.audit import check_weights
from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.bridge.kept import check_tower
from fivefold.cluster.session import Session
from fivefold.config.paths import resolve_model_path
from fivefold.config.problems import RecipeError
from fivefold.config.roles import roles_of
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.prompts import PromptDataset, load_prompts
from fivefold.data.sft import end_token
from fivefold.engine.values import N_APPENDED
from fivefold.environments.build import check_environment
from fivefold.experience.group import groups_of
from fivefold.experience.samples import accuracy, as_record, pass_at_k, sample_metrics
from fivefold.experience.stream import Stream
from fivefold.families.read import load_shape
from fivefold.families.shape import ModelShape
from fivefold.layout.allocation import Allocation
from fivefold.layout.placement import Placement, place_allocation
from fivefold.layout.recipe import recipe_allocation
from fivefold.observe.errors import RunFailed
from fivefold.observe.json_records import write_lines
from fivefold.observe.private_folder import PrivateFolder
from fivefold.observe.status_line import StatusLine
from fivefold.observe.timers import PhaseTimers
from fivefold.rewards.resolve import resolve_rewards
from fivefold.rewards.reward_set import RewardSet
from fivefold.roles.checks import check_tokenizers, check_weight_files
from fivefold.roles.launch import launch_frozen, replica_spec
from fivefold.roles.reward_model import RewardModel
from fivefold.roles.rollout import Rollout
from fivefold.roles.rollout_followers import launch_followers, rollout_role
from fivefold.roles.specs import model_shape
from fivefold.rollout.engines import check_server
from fivefold.rollout.protocol import SamplingParams
from fivefold.rollout.tokenizer import tokenizer_of
from fivefold.rules.judge import judge_problems
from fivefold.rules.layouts import layout_problems, replica_problems
from fivefold.rules.models import check_tokens, sampling_problems
from fivefold.rules.rollout import server_problems
from fivefold.rules.vision import image_keys, image_problems
from fivefold.types import Prompt, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOGS = "fivefold_evaluation-"
"""Beginning of the names of folders with the logs of evaluations, in the temporary directory."""
_EVALUATING = ("rollout", "reward", "judge")
"""Roles that a model is evaluated with."""


@dataclass(frozen=True)
class Evaluation:
    """Results of a model on held-out prompts."""

    accuracy: float
    """Share of completions with full reward."""
    reward: float
    """Mean reward."""
    response_length: float
    """Mean length of a completion, in tokens."""
    n_prompts: int
    pass_at: Mapping[str, float]
    """`pass_at/<k>` of prompts with several completions: the chance that one of k is right."""
    parts: Mapping[str, float]
    """`accuracy/set/<name>` and `reward/set/<name>` of each of several sets, `accuracy/source/<data_source>` and
    `reward/source/<data_source>` of each of several data sources."""

    @property
    def told(self) -> str:
        """The accuracy, and the reward where it is another number, as a text."""
        accuracy, reward = f"{self.accuracy:.3f}", f"{self.reward:.3f}"
        # Right answers may not be worth 1, or others not 0.
        return f"{accuracy if reward == accuracy else f'{accuracy}, reward {reward}'} on {self.n_prompts} prompts"

    @property
    def measures(self) -> dict[str, float]:
        """All that was measured, by name."""
        return {
            "accuracy": self.accuracy,
            **self.pass_at,
            "reward": self.reward,
            "response_length": self.response_length,
            **self.parts,
        }


class Evaluator:
    """Evaluates the rollout's weights on held-out prompts."""

    def __init__(self, recipe: TrainRecipe, sets: Mapping[str, PromptDataset]) -> None:
        """Take the sets of held-out prompts, by the dotted keys of their sections."""
        self.sets = sets
        self.data = PromptDataset.joined(list(sets.values()))
        self._set_of = [key.rpartition(".")[2] for key, data in sets.items() for _ in data.prompts]
        self.sampling = SamplingParams.for_evaluation(recipe.gconfig, recipe.evaluator).never(self.data.placeholders)
        self._n_samples = recipe.evaluator.n_samples
        self._seed = recipe.seed

    @classmethod
    def of(
        cls,
        recipe: TrainRecipe,
        tokenizer: PreTrainedTokenizerBase,
        rewards: RewardSet,
        held_out: PromptDataset | None = None,
        *,
        model: tuple[str, ModelShape],
    ) -> Evaluator | None:
        """Return the evaluator of a recipe, None if it has no held-out prompts.

        Args:
            recipe: the recipe.
            tokenizer: the model's tokenizer.
            rewards: the recipe's rewards.
            held_out: the prompts that `train_dataset.hold_out` names, if they are loaded already.
            model: folder or hub name of the model, and its shape.

        Raises:
            ValueError: held-out prompts that cannot be read, or that the reward cannot judge.
        """
        if not recipe.has_held_out:
            return None
        sets = {key: load_prompts(rows, tokenizer, model) for key, rows in recipe.held_out.items()}
        if share := recipe.train_dataset.hold_out:
            if held_out is None:
                _, held_out = load_prompts(recipe.train_dataset, tokenizer, model).held_apart(share, recipe.seed)
            sets["train_dataset.hold_out"] = held_out
        evaluator = cls(recipe, sets)
        rewards.check_prompts(evaluator.data.prompts)
        return evaluator

    def run(self, stream: Stream, keep: Callable[[Sequence[Sample]], object] = lambda samples: None) -> Evaluation:
        """Sample every held-out prompt with the current weights. Random choices are the same in every evaluation.

        Args:
            stream: samples completions and gives them their rewards.
            keep: is given all samples.

        Raises:
            RunFailed: no group was finished within `scheduler.timeout_s`.
            ValueError: a reward function failed, or a judge scored no sample.
            WorkerError: a worker failed.
        """
        groups = groups_of(self.data.prompts, self._n_samples, self.sampling, (self._seed, "evaluation"))
        stream.submit(groups, first=True)
        samples = stream.collect(groups)
        stream.check_scored(samples)
        keep(samples)
        return Evaluation(
            accuracy=accuracy(samples),
            reward=sum(sample.reward for sample in samples) / len(samples),
            response_length=sample_metrics(samples)["response_length/mean"],
            n_prompts=len(groups),
            pass_at=pass_at_k(samples),
            parts={**self._by_set(samples), **self._by_source(samples)},
        )

    def set_of(self, prompt: Prompt) -> str:
        """Return the name of the set that a prompt is of."""
        return self._set_of[prompt.index]

    def _by_set(self, samples: Sequence[Sample]) -> dict[str, float]:
        return _measures_of("set", samples, self.set_of) if len(self.sets) > 1 else {}

    def _by_source(self, samples: Sequence[Sample]) -> dict[str, float]:
        has_several = len(self.data.sources) > 1
        return _measures_of("source", samples, lambda prompt: prompt.data_source) if has_several else {}


def _measures_of(kind: str, samples: Sequence[Sample], part_of: Callable[[Prompt], str]) -> dict[str, float]:
    """Return `accuracy/<kind>/<part>` and `reward/<kind>/<part>` of each part that prompts belong to."""
    parts: dict[str, list[Sample]] = {}
    for sample in samples:
        parts.setdefault(part_of(sample.prompt), []).append(sample)
    return {f"accuracy/{kind}/{part}": accuracy(own) for part, own in sorted(parts.items())} | {
        f"reward/{kind}/{part}": fmean(sample.reward for sample in own) for part, own in sorted(parts.items())
    }


def check_judged(
    shape: ModelShape, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], sampling: SamplingParams
) -> None:
    """Refuse requests whose answers the reward model cannot score.

    Args:
        shape: the reward model.
        tokenizer: the actor's tokenizer.
        prompts: the prompts.
        sampling: options of the completions.

    Raises:
        ValueError: a tokenizer without an end-of-sequence token, or completions that could exceed the model's
            positions.
    """
    end_token(tokenizer)
    check_requests(shape, prompts, sampling, model="reward model", n_appended=N_APPENDED)


def check_lengths(recipe: TrainRecipe, shape: ModelShape, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
    """Refuse prompts that the actor cannot answer, or that leave an episode of several turns no room.

    Args:
        recipe: the recipe.
        shape: the actor.
        prompts: the prompts.
        sampling: options of the completions.

    Raises:
        ValueError: see `check_requests`; or a prompt is as long as an episode may be.
    """
    if recipe.environment is None:
        check_requests(shape, prompts, sampling)
        return
    check_tokens(shape, "a prompt", max(max(prompt.token_ids) for prompt in prompts))
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest >= recipe.environment.max_length:
        raise ValueError(
            f"the longest prompt has {longest} tokens, and an episode may have environment.max_length="
            f"{recipe.environment.max_length}: raise it, or lower the data set's max_length"
        )


def check_requests(
    shape: ModelShape, prompts: Sequence[Prompt], sampling: SamplingParams, *, model: str = "model", n_appended: int = 0
) -> None:
    """Refuse requests that the model cannot answer, or whose answers it cannot read.

    Args:
        shape: the model.
        prompts: the prompts.
        sampling: options of the completions.
        model: what errors call the model.
        n_appended: most tokens that are appended to a completion.

    Raises:
        ValueError: completions that could exceed the model's positions, or prompts with tokens that it does not have.
    """
    check_tokens(shape, "a prompt", max(max(prompt.token_ids) for prompt in prompts))
    n_prompt = max(len(prompt.token_ids) for prompt in prompts)
    longest = n_prompt + sampling.after(n_prompt).max_new_tokens + n_appended
    if longest > shape.most_tokens:
        raise ValueError(
            f"the longest prompt and max_new_tokens={sampling.max_new_tokens} make {longest} tokens, but the {model} "
            f"{shape.limit}: lower max_new_tokens of gconfig or evaluator, or the data set's max_length"
        )


def evaluate(
    recipe: TrainRecipe, *, model: str | None = None, samples: Path | None = None, status: StatusLine | None = None
) -> dict[str, float | int | str]:
    """Measure the accuracy of `model` (None: the recipe's actor) on the recipe's held-out prompts.

    Only the rollout engine is started, and the models of the rewards if there are any. `status` shows the progress.

    Args:
        recipe: the recipe.
        model: the model.
        samples: JSONL file that gets a line for each completion; None: they are not kept.
        status: shows the progress.

    Raises:
        ValueError: the recipe has no `valid_dataset`, its rollout cannot run here, its actor starts from a
            Megatron-Core checkpoint, the model's weight files are broken or of another model, or the prompts and their
            completions are too long for a model.
        RunFailed: a worker or the reward failed.
    """
    if model is None and (checkpoint := recipe.actor.megatron.dist_checkpointing_path) is not None:
        raise ValueError(
            f"the recipe's actor starts from the Megatron-Core checkpoint {checkpoint}, which a rollout engine cannot "
            "load: convert it with `fivefold convert`, and name the Hugging Face folder with --model"
        )
    from fivefold.roles import judge_launch  # here, because training imports this module and most runs have no judge

    path = resolve_model_path(recipe.actor.path if model is None else model)
    folder = resolve_model_folder(path)
    shape = load_shape(folder)
    placement = _place(recipe, shape)
    check_weights(folder, shape)
    tokenizer = tokenizer_of(recipe, path)
    scoring = [role for name, role in roles_of(recipe).items() if name in placement and name != "rollout"]
    check_tokenizers(recipe, scoring, shape, tokenizer)
    check_weight_files(recipe, scoring)
    spec = replica_spec(recipe, placement, path, load_weights=True)
    check_server(spec)
    judge_texts = None if recipe.reward.judge is None else judge_launch.check_judge(recipe, placement)
    check_environment(recipe.environment, tokenizer)
    rewards = resolve_rewards(recipe.reward, recipe.scheduler.timeout_s)
    evaluator = Evaluator.of(recipe, tokenizer, rewards, model=(path, shape))
    if evaluator is None:
        raise ValueError("the recipe has no valid_dataset: name the held-out prompts to evaluate on")
    if image_keys(recipe):
        check_tower(folder)
    if samples is not None:
        samples.touch()  # a folder that does not exist ends the command before it begins
    check_lengths(recipe, shape, evaluator.data.prompts, evaluator.sampling)
    if recipe.reward.model is not None:
        check_judged(
            model_shape(recipe, roles_of(recipe)["reward"]), tokenizer, evaluator.data.prompts, evaluator.sampling
        )
    status = StatusLine(PhaseTimers()) if status is None else status
    timers = status.timers
    # A failure leaves the folder, because its message names a log file in it, until the next evaluation.
    private = PrivateFolder.create(Path(tempfile.gettempdir()), LOGS)
    with private.until_it_fails() as logs, Session.open(recipe.scheduler, recipe.cluster, logs, timers) as session:
        status.follow(session.progress)
        frozen = launch_frozen(session, recipe, placement)
        is_server = placement["rollout"].layout.is_server
        followers = launch_followers(session, placement, spec)
        group = session.launch(rollout_role(placement, spec, followers))["rollout"]
        rollout = Rollout(group, shares_devices=False, is_server=is_server)
        reward_model = RewardModel(frozen["reward"], end_token(tokenizer)) if frozen else None
        judge = None
        if judge_texts is not None:
            judge = judge_launch.judge_beside_rollout(session, recipe, placement, rollout, judge_texts, timers, _tell)
        stream = Stream(recipe, rollout, rewards, timers, _no_weights, reward_model, judge, tell=_tell)
        with stream, timers.phase("evaluation"):
            result = _run(evaluator, stream, samples)
    return {
        "model": path,
        **result.measures,
        "n_prompts": result.n_prompts,
        "n_too_long": evaluator.data.n_too_long,
    }


def _no_weights(version: int) -> None:
    raise AssertionError("a server that is started again loads its weights itself")


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


def _run(evaluator: Evaluator, stream: Stream, file: Path | None) -> Evaluation:
    def write(samples: Sequence[Sample]) -> None:
        if file is not None:
            records = ({**as_record(sample, step=0), "set": evaluator.set_of(sample.prompt)} for sample in samples)
            write_lines(file, records)

    try:
        return evaluator.run(stream, write)
    except ValueError as error:  # such as a reward that fails on a completion: a failure of the run, not of its setup
        raise RunFailed(str(error)) from error
    finally:
        if failed := stream.take_news():
            print(failed, file=sys.stderr)


def _place(recipe: TrainRecipe, shape: ModelShape) -> Placement:
    """Place the rollout's replicas, and the models of the rewards, as if they had the cluster alone.

    The cluster may be too small for the actor.

    Raises:
        RecipeError: replicas that the model, the cluster or a server does not allow.
    """
    allocation = recipe_allocation(recipe)
    kept = (tuple(role for role in group if role.role in _EVALUATING) for group in allocation.groups)
    groups = Allocation(tuple(group for group in kept if group))
    placement = place_allocation(groups, recipe.cluster.n_nodes, recipe.cluster.n_gpus_per_node)
    roles = {name: role for name, role in roles_of(recipe).items() if name in placement and name != "rollout"}
    shapes = {"rollout": shape} | {name: model_shape(recipe, role) for name, role in roles.items()}
    problems = [f"{role}: {line}" for role in shapes for line in layout_problems(placement[role].layout, shapes[role])]
    problems += [*replica_problems(placement), *server_problems(recipe), *sampling_problems(recipe, shape)]
    problems += judge_problems(recipe, shapes)
    problems += image_problems(recipe, shape, {})
    if problems:
        raise RecipeError(recipe.experiment_name, problems)
    return placement
