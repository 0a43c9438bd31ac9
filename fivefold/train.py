"""Reinforcement learning: the roles are started, then one loop runs.

prompts ─> rollout ─> rewards ─> (critic, reference) ─> advantages ─> mini-batches ─> (critic), actor
   ^                                                                                         │
next step <───────────────────── rollout engines <──────────────────── new weights <─────────┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fivefold.checkpoints.run_state import RunState
from fivefold.checkpoints.start import FromScratch, Resume
from fivefold.config.schema.train import TrainRecipe
from fivefold.experience.samples import (
    TokenTexts,
    are_shown,
    as_record,
    extremes,
    idle_shares,
    many_sequences,
    no_signal,
    reward_metrics,
    sample_metrics,
    token_values,
)
from fivefold.experience.source import Experience, Source
from fivefold.experience.stream import Stream
from fivefold.experience.waiting import Saved, taken_over
from fivefold.observe.columns import TRAIN_COLUMNS
from fivefold.observe.jsonl import JsonLines
from fivefold.observe.screens import ScreenKind
from fivefold.observe.step_log import SampleLog
from fivefold.roles.devices import Roles
from fivefold.roles.launch import launch_roles
from fivefold.run.loop import begin, run_steps
from fivefold.run.profiling import recorder
from fivefold.run.setup import OpenRun
from fivefold.run.speed import StepSpeed, Worked
from fivefold.run.state_owners import state_owners
from fivefold.run.steps import StepDone
from fivefold.run.stepwise import Steps
from fivefold.run.whole_run import run_whole
from fivefold.train_setup import TrainSetup, set_up
from fivefold.types import Sample
from fivefold.update.compose import policy_update
from fivefold.update.step import Prepared, StepOutcome, UpdateState

if TYPE_CHECKING:
    from fivefold.experience.replay_buffer import ReplayBuffer


def train(recipe: TrainRecipe, *, overwrite: bool = False, screen: ScreenKind = "table") -> Steps[dict[str, Any]]:
    """Run `recipe`, as `run_whole` says. Returns the content of `summary.json`."""
    return run_whole(recipe, TRAIN_COLUMNS, partial(set_up, recipe), _execute, overwrite=overwrite, screen=screen)


def _execute(
    setup: TrainSetup, start: FromScratch | Resume, run: OpenRun, state: RunState, began: float
) -> Steps[RunState]:
    """Start the roles, with the state of a checkpoint, and run the loop."""
    roles = launch_roles(run.session, setup.recipe, setup.ground.placement, setup.total_steps, setup.route)
    begin(start, roles, setup.recipe, run)
    run.say_ready(began)
    saved, note = taken_over(start)
    if note is not None:
        run.screen.note(note)
    return (yield from run_loop(setup, roles, run, state, began, saved))


def run_loop(
    setup: TrainSetup, roles: Roles, run: OpenRun, state: RunState, began: float, saved: Saved | None = None
) -> Steps[RunState]:
    """Run the steps after `state`, with samples that a checkpoint has. Returns the state after the last one."""
    training = Reinforcement(setup, roles, run, state)
    if setup.route.transport.serves_adapters:
        _check_adapters(setup, roles, run)
    with _source(setup, roles, training.needs_rollout_logprobs, run, state.step, saved) as training.source:
        owners = {**state_owners(roles, setup.recipe, run.timers), **training.source.owners}
        state = yield from run_steps(setup, training, roles, run, state, owners, began)
        training.source.stream.settle()
    return state


def _check_adapters(setup: TrainSetup, roles: Roles, run: OpenRun) -> None:
    """Check that servers compute the actor's adapters. Their next weights must be the actor's."""
    from fivefold.roles.adapter_probe import kinds_of  # here, because most runs have none
    from fivefold.run.adapter_probe import Probe

    recipe = setup.recipe
    Probe(
        roles,
        run.timers,
        kinds_of(setup.ground.shape.with_lora(recipe.actor.lora)),
        setup.data.prompts,
        recipe.gconfig.temperature,
        recipe.gconfig.max_new_tokens,
        run.screen.note,
    ).run()


class Reinforcement:
    """The steps of reinforcement learning."""

    source: Source
    """Gives each step its samples."""

    def __init__(self, setup: TrainSetup, roles: Roles, run: OpenRun, state: RunState) -> None:
        """Take the roles, which have their processes, and the state of the run before its next step."""
        recipe, self._timers = setup.recipe, run.timers
        self._setup, self._roles, self._run = setup, roles, run
        self._update = policy_update(
            recipe,
            roles,
            run.timers,
            setup.ground.shape,
            setup.experts,
            token_rewards=setup.rewards.reads_tokens,
        )
        self._updated = UpdateState.of(state, recipe.actor)
        self._recorded = recorder(recipe.profile, run.folder.profile, roles.trained)
        self._speed = StepSpeed.of(recipe, setup.ground, roles, run.screen.note)
        self._texts = TokenTexts(setup.ground.tokenizer)
        self._was_told_of_no_signal = self._was_told_of_sequences = False

    def needs_rollout_logprobs(self) -> bool:
        """Return whether the next loss reads the rollout's log-prob of every token."""
        return self._update.needs_rollout_logprobs(self._updated)

    def begin(self, state: RunState) -> None:
        """Give the rollout the actor's weights."""
        self._send_weights(state.step)

    def step(self, state: RunState, samples: SampleLog) -> StepDone:
        """Take samples, train on them, and send the new weights."""
        began, step = time.perf_counter(), state.step + 1
        experience = self.source.take(step)
        # Written before the update: if it fails, its samples are where the search begins.
        n_logged = self._write_samples(experience.new, step, samples)
        prepared, outcome = self._train(experience, step, n_logged, samples)
        if outcome.problem is None and step % self._setup.recipe.rollout.sync_freq_steps == 0:
            self._send_weights(step)
        seconds, whole = self._timers.take(), time.perf_counter() - began
        worked = Worked(prepared.batch, prepared.batch, outcome.given, outcome.trained)
        metrics = {
            **prepared.metrics,
            **outcome.metrics,
            **idle_shares(experience.metrics, seconds, whole),
            **experience.metrics,
            **self._described(experience.new),
            "tokens_per_second": worked.n_tokens / whole,
            **self._speed.metrics(worked, seconds),
        }
        if outcome.trained and not self._was_told_of_no_signal and (note := no_signal(experience.samples, metrics)):
            self._was_told_of_no_signal = True
            self._run.screen.note(f"step {step}: {note}", style="yellow")
        if not self._was_told_of_sequences and (note := many_sequences(self._setup.recipe.environment, metrics)):
            self._was_told_of_sequences = True
            self._run.screen.note(f"step {step}: {note}", style="yellow")
        self._updated = outcome.state
        after = replace(outcome.state.stored(state), step=step, sampler=self.source.sampler_state, weight_version=step)
        shown = self._shown(experience.new, step)
        return StepDone(after, metrics, seconds, whole, outcome.problem, outcome.news, shown)

    def evaluate(self, step: int) -> dict[str, float] | None:
        """Evaluate the model after a step."""
        self.source.stream.settle()
        evaluator, run = self._setup.evaluator, self._run
        if evaluator is None:
            return None
        if self._roles.rollout.version != step:
            self._send_weights(step)
            self.source.stream.settle()
        with self._timers.phase("evaluation"):
            evaluation = evaluator.run(self.source.stream, partial(self._write_held_out, step))
        when = f"after step {step}" if step else "before training"
        run.screen.note(f"held-out accuracy {when}: {evaluation.told}", style="cyan")
        return evaluation.measures

    def take_news(self) -> str | None:
        """Return what the user should know of the rollout since the last call."""
        return self.source.stream.take_news()

    def _train(
        self, experience: Experience, step: int, n_logged: int, samples: SampleLog
    ) -> tuple[Prepared, StepOutcome]:
        """Update the models that are trained. Returns what they were trained on, and what that came to."""
        with self._recorded(step), self._roles.training(self._timers):
            prepared = self._update.prepare(
                step, experience.samples, experience.batch, experience.greedy, self._updated
            )
            logs_tokens = self._setup.recipe.stats.logged_tokens
            samples.complete(token_values(prepared.batch, n_logged, self._texts) if logs_tokens else None)
            with self._timers.phase("train"):
                return prepared, self._update.run(prepared)

    def _send_weights(self, version: int) -> None:
        """Give the rollout the actor's weights: while the next step runs, or at once if the route does not allow it."""
        roles, timers = self._roles, self._timers
        self.source.stream.settle()
        if self._setup.route.overlaps_training:
            give = partial(roles.give_weights, roles.copy_weights(timers), version, timers)
            self.source.weights_follow(version, give)
        else:
            roles.send_weights(version, timers)
            self.source.weights_sent(version)

    def _write_samples(self, samples: Sequence[Sample], step: int, log: SampleLog) -> int:
        """Log the samples of a step, as many as the recipe wants. Returns their number."""
        wanted = self._setup.recipe.stats.n_logged_samples
        logged = samples if wanted == "all" else samples[:wanted]
        records = [as_record(sample, step=step) for sample in logged]
        log.write(records)
        return len(records)

    def _write_held_out(self, step: int, samples: Sequence[Sample]) -> None:
        """Log the samples of an evaluation, as many as the recipe wants."""
        wanted, evaluator = self._setup.recipe.evaluator.n_logged_samples, self._setup.evaluator
        logged = samples if wanted == "all" else samples[:wanted]
        if not logged or evaluator is None:
            return
        with JsonLines(self._run.folder.held_out_samples) as lines:
            for sample in logged:
                lines.write({**as_record(sample, step=step), "set": evaluator.set_of(sample.prompt)})
            lines.sync()

    def _described(self, samples: Sequence[Sample]) -> dict[str, float]:
        by_source = len(self._setup.data.sources) > 1
        return sample_metrics(samples) | reward_metrics(samples, self._setup.rewards, by_source=by_source)

    def _shown(self, samples: Sequence[Sample], step: int) -> list[tuple[float, str, str]]:
        """Return the samples that the screen shows."""
        if not are_shown(step, self._setup.recipe.stats.shown_samples_freq_steps):
            return []
        return [(sample.reward, sample.prompt.text, sample.shown_text) for sample in extremes(samples)]


@contextmanager
def _source(
    setup: TrainSetup, roles: Roles, corrects: Callable[[], bool], run: OpenRun, step: int, saved: Saved | None
) -> Iterator[Source]:
    """Yield the source of the samples of all steps after `step`; `saved` are those that a checkpoint has."""
    recipe, timers = setup.recipe, run.timers
    resend = partial(roles.send_weights, timers=timers)
    tell = partial(run.screen.note, style="yellow")
    judge = setup.judge(roles, timers, tell)
    with Stream(
        recipe, roles.rollout, setup.rewards, timers, resend, setup.reward_model(roles), judge, tell=tell
    ) as stream:
        yield Source(
            recipe,
            setup.sampler,
            setup.sampling,
            stream,
            timers,
            first_step=step + 1,
            last_step=setup.total_steps,
            saved=saved,
            corrects=corrects,
            buffer=None if recipe.rollout.replay_buffer is None else _buffer(setup, saved or Saved()),
        )


def _buffer(setup: TrainSetup, saved: Saved) -> ReplayBuffer:
    """Return the replay buffer, with the groups of a checkpoint."""
    from fivefold.experience.replay_buffer import ReplayBuffer, restored  # here, because most runs have none

    config = setup.recipe.rollout.replay_buffer
    assert config is not None
    return ReplayBuffer(config, setup.recipe.seed, restored(saved.kept, setup.data.prompts))
