"""A run of reinforcement learning as it is known before a process is started: what is checked, loaded and told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from fivefold.algorithms.build import check_methods
from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.bridge.kept import check_tower
from fivefold.checkpoints.run_state import RunState
from fivefold.config.algorithms import deviations
from fivefold.config.schema.train import EvaluatorConfig, TrainRecipe
from fivefold.data.prompts import PromptDataset, load_prompts
from fivefold.data.rows import dropped_rows, held_out_usage, repeated_prompts
from fivefold.data.sampler import EpochSampler
from fivefold.data.sft import end_token
from fivefold.environments.build import check_environment
from fivefold.evaluate import Evaluator, check_judged, check_lengths
from fivefold.layout.placement import Placement
from fivefold.observe.timers import PhaseTimers
from fivefold.rewards.resolve import resolve_rewards
from fivefold.rewards.reward_set import RewardSet
from fivefold.roles.devices import Roles
from fivefold.roles.launch import replica_spec
from fivefold.roles.reward_model import RewardModel
from fivefold.rollout.engines import check_server
from fivefold.rollout.protocol import SamplingParams
from fivefold.rules.replay import replay_taken, with_replay
from fivefold.rules.vision import image_keys
from fivefold.run.setup import lay_groundwork
from fivefold.run.whole_run import RunSetup
from fivefold.types import Prompt
from fivefold.update.expert_examples import ExpertExamples
from fivefold.update.samples import check_prompts
from fivefold.weights.table import choose_route
from fivefold.weights.transport import Route

if TYPE_CHECKING:
    from fivefold.roles.judge import Judge, JudgeTexts


@dataclass(frozen=True)
class TrainSetup(RunSetup[Prompt]):
    """A run of reinforcement learning as it is known before a process is started."""

    recipe: TrainRecipe
    rewards: RewardSet
    data: PromptDataset
    evaluator: Evaluator | None
    sampling: SamplingParams
    experts: ExpertExamples | None
    """Responses of an expert to learn in addition to the rewards; None: there are none."""
    route: Route
    """How weights travel from the actor to the rollout."""
    replay: str | None
    """What the banner says about router replay; None: nothing."""
    judge_texts: JudgeTexts | None = None
    """Turns questions into tokens of the model that judges; None: there is none."""

    def facts(self) -> Mapping[str, object]:
        """Return what the banner says about this kind of run."""
        recipe, placement = self.recipe, self.ground.placement
        devices = (
            "CPU processes" if placement.is_cpu else f"{recipe.cluster.n_nodes} x {recipe.cluster.n_gpus_per_node} GPUs"
        )
        left_over = self.sampler.n_dropped
        unused = f"; {left_over} prompts of each epoch fill no step" if left_over else ""
        prompts, samples = recipe.train_dataset.batch_size, recipe.gconfig.n_samples
        return {
            "devices": devices,
            "weight sync": self.route.transport.title,
            "algorithm": ", with ".join([recipe.algorithm, *filter(None, [", ".join(deviations(recipe))])]),
            **({} if recipe.actor.lora is None else {"lora": self.ground.shape.with_lora(recipe.actor.lora).adapted}),
            **({} if self.replay is None else {"router replay": self.replay}),
            **({"frozen": ", ".join(recipe.actor.freeze)} if recipe.actor.freeze else {}),
            **({} if recipe.environment is None else {"environment": recipe.environment.name}),
            "prompts": self.data.usage,
            **({} if self.experts is None else {"expert": self.experts.examples.usage}),
            **({} if recipe.train_dataset.sampler == "epochs" else {"sampler": recipe.train_dataset.sampler}),
            **({"held out": self._held_out(self.evaluator.data)} if self.evaluator else {}),
            "steps": f"{self.total_steps} of {prompts} prompts x {samples} samples{unused}",
        }

    def _held_out(self, data: PromptDataset) -> str:
        """Return what the banner says about the held-out prompts."""
        held_out, trained = ((prompt.key for prompt in each.prompts) for each in (data, self.data))
        return held_out_usage(data.usage, held_out, trained)

    def warnings(self) -> Iterator[str]:
        """Yield what is odd about the data, and how samples differ from the policy that is trained."""
        if altering := self.recipe.gconfig.alterations:
            keys = " and ".join(f"gconfig.{name}" for name in altering)
            yield (
                f"{keys}: tokens are sampled from another distribution than the policy that is trained, whose "
                "log-probs have gconfig.temperature alone"
            )
        held_out = self.evaluator.sets if self.evaluator else {}
        for key, data in {"train_dataset": self.data, **held_out}.items():
            yield from dropped_rows(key, data.n_rows, data.n_too_long)
            # An environment may begin each episode with the same words.
            if self.recipe.environment is None:
                yield from repeated_prompts(key, [prompt.key for prompt in data.prompts])

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of what evaluations measure and the summary has."""
        return ("accuracy", "reward", "response_length")

    @property
    def comparable(self) -> tuple[str, ...]:
        """Names of what every evaluation measures, also of each set of held-out prompts if there are several."""
        names = [key.rpartition(".")[2] for key in self.recipe.held_out]
        sets = [f"{measure}/set/{name}" for name in names for measure in ("accuracy", "reward")]
        return (*self.measured, *(sets if len(names) > 1 else []))

    @property
    def evaluations_due(self) -> EvaluatorConfig:
        """When held-out prompts are evaluated."""
        return self.recipe.evaluator

    @property
    def expert_sampler(self) -> EpochSampler[Any] | None:
        """Reads an expert's examples; None: there are none."""
        return None if self.experts is None else self.experts.sampler

    def evaluations(self, state: RunState) -> dict[str, Any]:
        """Return what the summary says about evaluations, with the number of prompts that they had."""
        return {
            **super().evaluations(state),
            "held_out_prompts": len(self.evaluator.data) if self.evaluator else 0,
        }

    def reward_model(self, roles: Roles) -> RewardModel | None:
        """Return the reward model among the roles; None if there is none."""
        model = roles.frozen.get("reward")
        return None if model is None else RewardModel(model, end_token(self.ground.tokenizer))

    def judge(self, roles: Roles, timers: PhaseTimers, tell: Callable[[str], None]) -> Judge | None:
        """Return the model that judges, None if there is none; `tell` tells the user what happens to it."""
        if roles.judge is None or self.judge_texts is None:
            return None
        from fivefold.roles.judge import Judge  # here, because most runs have none

        return Judge(roles.judge, self.recipe, self.judge_texts, timers, tell)


def set_up(recipe: TrainRecipe, began: datetime | None = None) -> TrainSetup:
    """Check and load everything that needs no worker.

    Args:
        recipe: the recipe.
        began: time of the run's first start; None: now.

    Raises:
        ValueError: a recipe, a model or a data set that cannot work.
    """
    ground = lay_groundwork(recipe, began)
    replay, recipe = replay_taken(recipe, ground.shape), with_replay(recipe, ground.shape)
    route = choose_route(recipe, ground.placement)
    check_server(replica_spec(recipe, ground.placement, ground.path, load_weights=False, route=route))
    check_environment(recipe.environment, ground.tokenizer)
    rewards = resolve_rewards(recipe.reward, recipe.scheduler.timeout_s)
    model = ground.path, ground.shape
    data = load_prompts(recipe.train_dataset, ground.tokenizer, model)
    if image_keys(recipe):
        check_tower(resolve_model_folder(ground.path))
    rewards.check_prompts(data.prompts)
    held_apart = None
    if share := recipe.train_dataset.hold_out:
        data, held_apart = data.held_apart(share, recipe.seed)
    evaluator = Evaluator.of(recipe, ground.tokenizer, rewards, held_apart, model=model)
    sampling = SamplingParams.for_training(recipe).never(data.placeholders)
    held_out = evaluator.data.prompts if evaluator else ()
    rewards.check_sources([*data.prompts, *held_out])
    asked = [(data.prompts, sampling), *([(held_out, evaluator.sampling)] if evaluator else [])]
    for prompts, how in asked:
        check_lengths(recipe, ground.shape, prompts, how)
        if recipe.reward.model is not None:
            check_judged(ground.others["reward"], ground.tokenizer, prompts, how)
    sampler = data.sampler(recipe.train_dataset, recipe.seed)
    check_prompts(recipe, data.prompts)
    check_methods(recipe)
    return TrainSetup(
        recipe=recipe,
        ground=ground,
        rewards=rewards,
        data=data,
        evaluator=evaluator,
        sampling=sampling,
        sampler=sampler,
        experts=ExpertExamples.load(recipe, ground),
        total_steps=recipe.n_steps(sampler.batches_per_epoch),
        route=route,
        replay=replay,
        judge_texts=None if recipe.reward.judge is None else _judge_texts(recipe, ground.placement, began),
    )


def _judge_texts(recipe: TrainRecipe, placement: Placement, began: datetime | None) -> JudgeTexts:
    from fivefold.roles.judge_launch import check_judge  # here, because most runs have none

    return check_judge(recipe, placement, began)
