"""Reinforcement learning: the roles are started, then one loop runs.

prompts ─> rollout ─> rewards ─> (critic, reference) ─> advantages ─> mini-batches ─> (critic), actor
   ^                                                                                         │
next step <───────────────────── rollout engines <──────────────────── new weights <─────────┘
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

from fivefold.algorithms.build import check_methods
from fivefold.checkpoints.due import Schedule
from fivefold.checkpoints.run_state import RunState
from fivefold.checkpoints.start import FromScratch, Resume
from fivefold.checkpoints.weights import WeightSaver
from fivefold.config.algorithms import deviations
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.prompts import PromptDataset, load_prompts
from fivefold.data.rows import held_out_usage
from fivefold.data.sampler import EpochSampler
from fivefold.data.sft import end_token
from fivefold.evaluate import Evaluator, check_judged, check_requests
from fivefold.experience.samples import as_record, extremes, idle_shares, reward_metrics, sample_metrics
from fivefold.experience.source import Experience, Source
from fivefold.experience.stream import Stream
from fivefold.experience.token_values import TokenTexts, token_values
from fivefold.experience.waiting import Saved, taken_over
from fivefold.observe.columns import TRAIN_COLUMNS
from fivefold.observe.errors import RunFailed
from fivefold.observe.jsonl import records
from fivefold.observe.screens import ScreenKind
from fivefold.rewards.resolve import resolve_rewards
from fivefold.rewards.reward_set import RewardSet
from fivefold.roles.devices import Roles
from fivefold.roles.launch import launch_roles, replica_spec
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.reward_model import RewardModel
from fivefold.roles.teacher import Teacher
from fivefold.roles.weights_overlap import copy_weights, give_weights
from fivefold.rollout.engines import check_server
from fivefold.rollout.protocol import SamplingParams
from fivefold.run.keeper import Keeper, keep
from fivefold.run.profiling import StepProfiler
from fivefold.run.setup import OpenRun, lay_groundwork
from fivefold.run.speed import StepSpeed, known_peak
from fivefold.run.state_owners import load_states, state_owners
from fivefold.run.whole_run import RunSetup, run_whole
from fivefold.types import Prompt, Sample
from fivefold.update.critic import CriticUpdate, critic_update
from fivefold.update.expert_examples import ExpertExamples
from fivefold.update.policy import PolicyUpdate, check_prompts
from fivefold.weights.table import choose_route
from fivefold.weights.transport import Route


@dataclass(frozen=True)
class TrainSetup(RunSetup[Prompt]):
    """A run of reinforcement learning as it is known before a process is started."""

    recipe: TrainRecipe
    rewards: RewardSet
    data: PromptDataset
    evaluator: Evaluator | None
    sampling: SamplingParams
    experts: ExpertExamples | None
    """Responses of an expert to learn beside the rewards; None: there are none."""
    route: Route
    """How weights travel from the actor to the rollout."""

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
            "prompts": self.data.usage,
            **({} if self.experts is None else {"expert": self.experts.usage}),
            **({} if recipe.train_dataset.sampler == "epochs" else {"sampler": recipe.train_dataset.sampler}),
            **({"held out": self._held_out(self.evaluator.data)} if self.evaluator else {}),
            "steps": f"{self.total_steps} of {prompts} prompts x {samples} samples{unused}",
        }

    def _held_out(self, data: PromptDataset) -> str:
        """Return what the banner says about the held-out prompts."""
        held_out, trained = ((prompt.token_ids for prompt in each.prompts) for each in (data, self.data))
        return held_out_usage(data.usage, held_out, trained)

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of what evaluations measure and the summary has."""
        return ("accuracy", "reward", "response_length")

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

    def teacher(self, roles: Roles) -> Teacher | None:
        """Return the teacher among the roles; None if there is none."""
        model = roles.frozen.get("teacher")
        return None if model is None else Teacher(model, self.recipe.actor.distill, self.ground.shape.vocab)


def set_up(recipe: TrainRecipe, began: datetime | None = None) -> TrainSetup:
    """Check and load everything that needs no worker.

    Args:
        recipe: the recipe.
        began: time of the run's first start; None: now.

    Raises:
        ValueError: a recipe, a model or a data set that cannot work.
    """
    ground = lay_groundwork(recipe, began)
    route = choose_route(recipe, ground.placement)
    check_server(replica_spec(recipe, ground.placement, ground.path, load_weights=False, route=route))
    rewards = resolve_rewards(recipe.reward, recipe.scheduler.timeout_s)
    data = load_prompts(recipe.train_dataset, ground.tokenizer)
    rewards.check_prompts(data.prompts)
    evaluator = Evaluator.of(recipe, ground.tokenizer, rewards)
    sampling = SamplingParams.for_training(recipe)
    prompts = [*data.prompts, *(evaluator.data.prompts if evaluator else ())]
    rewards.check_sources(prompts)
    check_requests(ground.shape, prompts, sampling)
    if recipe.reward.model is not None:
        check_judged(ground.others["reward"], ground.tokenizer, prompts, sampling)
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
        experts=ExpertExamples.of(recipe, ground),
        total_steps=recipe.n_steps(sampler.batches_per_epoch),
        route=route,
    )


def train(recipe: TrainRecipe, *, overwrite: bool = False, screen: ScreenKind = "table") -> dict[str, Any]:
    """Run `recipe`, as `run_whole` says. Returns the content of `summary.json`."""
    return run_whole(recipe, TRAIN_COLUMNS, partial(set_up, recipe), _execute, overwrite=overwrite, screen=screen)


def _execute(setup: TrainSetup, start: FromScratch | Resume, run: OpenRun, state: RunState, began: float) -> RunState:
    """Start the roles, with the state of a checkpoint, and run the loop."""
    recipe, ground = setup.recipe, setup.ground
    roles = launch_roles(run.session, recipe, ground.placement, setup.total_steps, setup.route)
    load_states(start, roles, recipe, run.timers)
    run.folder.write_engines({name: role.effective_config() for name, role in roles.trained.items()})
    run.folder.started()
    saved, note = taken_over(start)
    if note is not None:
        run.screen.note(note)
    return _loop(setup, roles, run, state, began, saved)


def _loop(
    setup: TrainSetup, roles: Roles, run: OpenRun, state: RunState, began: float, saved: Saved | None = None
) -> RunState:
    """Run the training loop from `state` on, with samples that a checkpoint has. Returns the state after its end."""
    recipe, timers = setup.recipe, run.timers
    critic = critic_update(recipe, roles.further.get("critic"), timers, state.critic_skips_in_a_row)
    teacher, experts = setup.teacher(roles), setup.experts
    update = PolicyUpdate(recipe, roles.actor, roles.frozen.get("ref"), timers, critic, teacher, experts)
    update.guard.in_a_row = state.skips_in_a_row
    if state.algorithm is not None:
        update.state = state.algorithm.resumed(recipe.actor)
    saver, evaluator = setup.schedule(recipe.saver), setup.schedule(recipe.evaluator)
    profiler = StepProfiler(recipe.profile, run.folder.profile, roles.trained)
    speed = _speed(setup, roles, run)
    owners, schedule = state_owners(roles, recipe, timers), setup.schedule(recipe.recover)
    with (
        _source(setup, roles, update, run, state.step, saved) as source,
        keep(run, recipe, owners | dict(source.owners), state, schedule, began) as keeper,
    ):
        run.screen.start(setup.total_steps, state.step, records(run.folder.metrics))
        texts = TokenTexts(setup.ground.tokenizer)
        loop = _Loop(setup, roles, run, update, critic, source, keeper, saver, evaluator, profiler, speed, texts)
        state = loop.begin(state)
        for step in range(state.step + 1, setup.total_steps + 1):
            state = loop.step(step, state)
        source.stream.settle()
    return state


@dataclass(frozen=True)
class _Loop:
    """What a step of the loop does, and with what."""

    setup: TrainSetup
    roles: Roles
    run: OpenRun
    update: PolicyUpdate
    critic: CriticUpdate | None
    source: Source
    keeper: Keeper
    saver: Schedule
    evaluator: Schedule
    profiler: StepProfiler
    speed: StepSpeed
    texts: TokenTexts

    def begin(self, state: RunState) -> RunState:
        """Give the rollout the actor's weights, and evaluate a model that is not trained yet."""
        self._send_weights(state.step)
        if state.step == 0:
            evaluation = self._evaluate(step=0)
            state = replace(state, evaluation_before=evaluation, evaluation_last=evaluation)
        self.run.timers.take()
        self.roles.take_moved()
        return state

    def step(self, step: int, state: RunState) -> RunState:
        """Take samples, train on them, send the new weights, and keep what is to be kept. Returns the state then."""
        began = time.perf_counter()
        experience = self.source.take(step)
        # Written before the update: if it fails, its samples are where the search begins.
        n_logged = self._write_samples(experience.samples, step)
        batch, metrics = self._train(experience, step, n_logged)
        if self.update.problem is None:
            self._send_weights(step)
        seconds, whole = self.run.timers.take(), time.perf_counter() - began
        metrics |= idle_shares(experience.metrics, seconds, whole)
        metrics |= experience.metrics | self._described(experience.samples)
        trains_actor = self.critic is None or not self.critic.is_warming_up(step)
        metrics |= self.speed.metrics(batch, self.update.given, seconds, whole, trains_actor=trains_actor)
        metrics |= self.roles.take_moved()
        if self.update.problem is not None:
            self.keeper.metrics.write(step, metrics)
            raise RunFailed(self.update.problem)
        state = self._keep(self._after(step, state), metrics)
        self._show(step, metrics, seconds, experience.samples)
        self.keeper.step_logged(state)
        return state

    def _send_weights(self, version: int) -> None:
        """Give the rollout the actor's weights: beside the next step, or if the route does not allow that, at once."""
        timers = self.run.timers
        self.source.stream.settle()
        if self.setup.route.overlaps_training:
            copy = copy_weights(self.roles.actor, self.roles.rollout, version, timers)
            give = partial(give_weights, self.roles.rollout, copy, timers, self.setup.route.transport)
            self.source.weights_follow(version, give)
        else:
            self.roles.send_weights(version, timers)
            self.source.weights_sent(version)

    def _evaluate(self, step: int) -> dict[str, float] | None:
        """Evaluate the model after a step, whose weights are those that were sent last."""
        self.source.stream.settle()
        if self.setup.evaluator is None:
            return None
        return _evaluate(self.setup.evaluator, self.source.stream, self.run, step)

    def _write_samples(self, samples: Sequence[Sample], step: int) -> int:
        """Log the samples of a step, as many as the recipe wants. Returns their number."""
        records = [as_record(sample, step=step) for sample in samples[: self.setup.recipe.stats.n_logged(len(samples))]]
        self.keeper.samples.write(records)
        return len(records)

    def _train(self, experience: Experience, step: int, n_logged: int) -> tuple[RemoteBatch, dict[str, float]]:
        """Update the models that are trained. Returns what they were trained on, and metrics."""
        with self.profiler.step(step), self.roles.training(self.run.timers):
            batch, metrics = self.update.prepare(experience.samples, experience.batch, experience.greedy)
            logs_tokens = self.setup.recipe.stats.logged_tokens
            self.keeper.samples.complete(token_values(batch, n_logged, self.texts) if logs_tokens else None)
            with self.run.timers.phase("train"):
                return batch, metrics | self.update.run(batch, experience.groups, step)

    def _described(self, samples: Sequence[Sample]) -> dict[str, float]:
        by_source = len(self.setup.data.sources) > 1
        return sample_metrics(samples) | reward_metrics(samples, self.setup.rewards, by_source=by_source)

    def _after(self, step: int, state: RunState) -> RunState:
        return replace(
            state,
            step=step,
            sampler=self.source.sampler_state,
            weight_version=step,
            skips_in_a_row=self.update.guard.in_a_row,
            critic_skips_in_a_row=self.critic.guard.in_a_row if self.critic else 0,
            algorithm=self.update.state,
            expert_sampler=None if self.setup.experts is None else self.setup.experts.sampler.state_dict(),
        )

    def _keep(self, state: RunState, metrics: dict[str, float]) -> RunState:
        """Save, evaluate and write a checkpoint, as is due, and log the step's metrics, whatever fails."""
        try:
            if self.saver.is_due(state.step):
                _save(self.setup, self.roles, self.run, state.step)
                self.saver.done()
            if self.evaluator.is_due(state.step):
                state = replace(state, evaluation_last=self._evaluate(state.step))
                metrics |= {f"eval/{name}": value for name, value in (state.evaluation_last or {}).items()}
                self.evaluator.done()
            return self.keeper.after_step(state, metrics)
        finally:
            phases = self.run.timers.take()
            later = {f"seconds/{phase}": value for phase, value in phases.items()} | self.roles.take_moved()
            # What is saved may take one more hand-over, which counts for the step.
            metrics |= {name: metrics.get(name, 0.0) + value for name, value in later.items()}
            self.keeper.metrics.write(state.step, metrics)

    def _show(self, step: int, metrics: dict[str, float], seconds: dict[str, float], samples: Sequence[Sample]) -> None:
        screen = self.run.screen
        screen.step(step, metrics, seconds)
        for news in filter(None, (self.update.news, self.source.stream.take_news())):
            screen.note(news)
        if self.setup.recipe.stats.shows_samples(step):
            screen.samples(step, [(s.reward, s.prompt.text, s.response_text) for s in extremes(samples)])


@contextmanager
def _source(
    setup: TrainSetup, roles: Roles, update: PolicyUpdate, run: OpenRun, step: int, saved: Saved | None
) -> Iterator[Source]:
    """Yield the source of the samples of all steps after `step`; `saved` are those that a checkpoint has."""
    recipe, timers = setup.recipe, run.timers
    resend = partial(roles.send_weights, timers=timers)
    with Stream(recipe, roles.rollout, setup.rewards, timers, resend, setup.reward_model(roles)) as stream:
        yield Source(
            recipe,
            setup.sampler,
            setup.sampling,
            stream,
            timers,
            first_step=step + 1,
            last_step=setup.total_steps,
            saved=saved,
            corrects=lambda: update.corrects,
        )


def _evaluate(evaluator: Evaluator, stream: Stream, run: OpenRun, step: int) -> dict[str, float]:
    with run.timers.phase("evaluation"):
        evaluation = evaluator.run(stream)
    when = f"after step {step}" if step else "before training"
    result = f"{evaluation.accuracy:.3f}"
    if (reward := f"{evaluation.reward:.3f}") != result:  # right answers are not worth 1, or others not 0
        result = f"{result}, reward {reward}"
    run.screen.note(f"held-out accuracy {when}: {result} on {evaluation.n_prompts} prompts", style="cyan")
    return evaluation.measures


def _save(setup: TrainSetup, roles: Roles, run: OpenRun, step: int) -> None:
    """Save the models that are trained as Hugging Face folders."""
    config, folder, timers = setup.recipe.saver, run.folder, run.timers
    with timers.phase("save"):
        for name, model in roles.trained.items():
            with roles.on_device(model, timers, "params"):
                WeightSaver(config, folder.weights_of(name), model.save).save(step)


def _speed(setup: TrainSetup, roles: Roles, run: OpenRun) -> StepSpeed:
    """Return what measures the steps' speed."""
    recipe, ground = setup.recipe, setup.ground
    peak = known_peak(recipe.cluster, roles.actor.device_names(), run.screen.note)
    return StepSpeed(recipe, ground.placement, ground.shape, ground.others, peak)
