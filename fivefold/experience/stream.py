"""Groups of samples on their way from prompts to rewards.

    submit ──> jobs ──> replicas ──> completions ──────────> rewards ──> collect
               the thread "rollout"                          the thread that collects,
                                                             or threads "rewards", while the main thread trains

A synchronous run computes rewards in the main thread, which waits for them anyway. Some functions need that thread:
signals, by which a time limit interrupts them, reach no other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import count
from typing import TYPE_CHECKING, Self

from fivefold.config.schema.train import TrainRecipe
from fivefold.experience.group import Group
from fivefold.experience.samples import judged, model_scores, rewarded
from fivefold.observe.errors import RunFailed
from fivefold.observe.progress import counting
from fivefold.observe.timers import SETUP, PhaseTimers
from fivefold.rewards import event_loop
from fivefold.rewards.reward_set import RewardSet
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.responses import Job, Work
from fivefold.roles.reward_model import RewardModel
from fivefold.roles.rollout import Rollout
from fivefold.roles.rollout_stream import RolloutStream
from fivefold.rollout.protocol import GenerationRequest, n_begun
from fivefold.types import Sample

if TYPE_CHECKING:
    from fivefold.roles.judge import Judge

ENDING_S = 30.0
"""Seconds that threads have to end, which they do after their slice on the replicas or their rewards."""


class Stream:
    """Answers groups and computes their rewards. It is a context manager, in whose block its threads run."""

    def __init__(
        self,
        recipe: TrainRecipe,
        rollout: Rollout,
        rewards: RewardSet,
        timers: PhaseTimers,
        resend: Callable[[int], None],
        reward_model: RewardModel | None = None,
        judge: Judge | None = None,
        *,
        tell: Callable[[str], None],
    ) -> None:
        """Begin without a group.

        Args:
            recipe: with `rollout.max_head_offpolicyness` above 0, rewards are computed in threads.
            rollout: the replicas.
            rewards: the recipe's rewards.
            timers: count the phases of all threads.
            resend: sends the weights of the given version, which are the current ones, to all replicas: a server was
                started again.
            reward_model: the model whose score is one of the rewards.
            judge: the model that the rewards ask.
            tell: tells the user at once that a server was started again; any thread may call it.
        """
        self._rollout = rollout
        self._rewards = rewards if judge is None else rewards.asking(judge)
        self._timers = timers
        self._resend = resend
        self._tell = tell
        self._reward_model = reward_model
        self._judge_model = judge
        self._timeout_s = recipe.scheduler.timeout_s
        self._environment = recipe.environment
        self._retries = recipe.environment.retries if recipe.environment else 0
        self.is_ahead = recipe.rollout.max_head_offpolicyness > 0
        """Whether groups are answered while others are trained."""
        deals = not rollout.is_server and not self.is_ahead
        self._replicas = RolloutStream(rollout, None if deals else recipe.rollout.max_batch_size)
        self.changed = threading.Condition()
        """Guards all that follows, and the groups."""
        self._numbers = count()
        self._groups: dict[int, Group] = {}
        """Groups that are being answered, by the number of their jobs."""
        self._new: list[tuple[list[Job], bool]] = []
        """Jobs that the replicas do not have yet, and whether they go before those that wait."""
        self._answered: list[Group] = []
        """Groups that wait for their rewards."""
        self._with_failures: list[Group] = []
        """Groups with episodes that failed; `take_failed` forgets them."""
        self._failures_changed = True
        """Whether episodes have failed since the last look at how many did."""
        self._n_unrewarded = 0
        """Number of groups that are answered and have no rewards yet."""
        self._caller = SETUP
        """Phase of the thread that submitted last; `setup`: it is in none, and the thread "rollout" counts its own."""
        self._is_resting = True
        """Whether the thread "rollout" waits for work, outside of any phase."""
        self._failure: BaseException | None = None
        self._has_ended = False
        self._version = 0
        self._update: threading.Thread | None = None
        """Gives the replicas the last weights while the main thread trains."""
        self.answered_at = self._progress = time.perf_counter()
        """Times at which the last group was answered, and at which the last one had its rewards."""
        self._helpers = ExitStack()
        """What runs next to the threads."""
        self._threads = [self._thread("rollout", self._answer)]
        n_at_once = (1 + recipe.rollout.max_head_offpolicyness) * recipe.train_dataset.batch_size
        n_judges = min(rewards.n_at_once, n_at_once) if self.is_ahead else 0
        self._judged_at_once = recipe.train_dataset.batch_size if reward_model else 1 if n_judges > 1 else None
        """Most groups that a thread judges together; None: all that were answered meanwhile."""
        names = ["rewards"] if n_judges == 1 else [f"rewards {number}" for number in range(1, n_judges + 1)]
        self._threads += [self._thread(name, self._judge_ahead) for name in names]

    def submit(self, groups: Sequence[Group], *, first: bool = False) -> None:
        """Let replicas answer groups; those that are answered already only get their rewards.

        Args:
            groups: the groups.
            first: whether they go before all that wait.
        """
        if self._judge_model is not None and self._judge_model.stops_rollout and not self._rollout.gate.is_open:
            # It has slept while completions of this step, or of an evaluation, were judged.
            self._resend(self._version)
            self.weights_sent(self._version)
        with self.changed:
            numbered = {next(self._numbers): group for group in groups if not group.is_answered}
            jobs = [
                Job(number, each.prompt, each.requests, each.sampling, retries=self._retries)
                for number, each in numbered.items()
            ]
            self._note_answered([group for group in groups if group.is_answered])
            if jobs:
                self._groups |= numbered
                self._new.append((jobs, first))
                self._caller = self._timers.current
            self.changed.notify_all()

    def collect(self, groups: Sequence[Group]) -> list[Sample]:
        """Wait until groups have their rewards, which a synchronous run computes here; return all their samples.

        Those whose environment failed are not among them.

        Raises:
            RunFailed: no group was finished within `scheduler.timeout_s`, or more environments failed than
                `environment.max_failed` allows.
            ValueError: a reward function failed.
            WorkerError: a worker failed.
        """
        with counting("generating", sum(len(group.requests) for group in groups)) as done:
            with self.changed:
                self._progress = time.perf_counter()
                self._failures_changed = True
                for group in groups:
                    group.count = done
                    done(group.n_answered)
            while (ready := self._next(groups)) is not None:
                if ready:
                    self._judge(ready)
                else:
                    self._renew()
        if not self.is_ahead:
            # A reward model scores all samples at once: its micro-batches are then the same in every run.
            self._complete(groups)
            with self.changed:
                self.changed.wait_for(lambda: self._is_resting or self._failure is not None)
        return [sample for group in groups for sample in group.finished]

    def check_scored(self, samples: Sequence[Sample]) -> None:
        """Refuse the samples of a step or an evaluation if a reward could score none of them.

        Raises:
            ValueError: see `RewardSet.check_scored`.
        """
        self._rewards.check_scored([sample.rewards for sample in samples])

    def weights_sent(self, version: int) -> None:
        """Take note that all replicas have weights of `version`."""
        with self.changed:
            self._version = version
            self._replicas.weights_sent()
            self.changed.notify_all()

    def update_beside(self, update: Callable[[], None]) -> None:
        """Run `update`, which gives the replicas weights, in a thread. What it raises ends the wait for groups."""
        self._update = self._thread("weights", update)
        self._update.start()

    def settle(self) -> None:
        """Wait until the replicas have the weights that were last given to them; raise what failed in a thread."""
        if self._update is not None:
            self._update.join()
            self._update = None
        with self.changed:
            if self._failure is not None:
                raise self._failure

    def take_news(self) -> str | None:
        """Return which episodes failed since the last call."""
        with self.changed:
            failures = [failure for group in self._with_failures for failure in group.failures]
            self._with_failures = []
        if not failures:
            return None
        number = f"{len(failures)} episode{'s' * (len(failures) > 1)}"
        return f"{number} failed, and left the group: {failures[0].rstrip()}"

    @property
    def work(self) -> list[Work]:
        """What each replica has done, as far as it has reported."""
        return list(self._replicas.work)

    def so_far(self) -> dict[Group, Sequence[GenerationRequest]]:
        """Return the requests of all groups that are not answered, with their tokens up to the last weights."""
        self.settle()
        # In this order: a replica forgets what it has lost only after this process has noted it.
        told = self._rollout.unfinished()
        with self.changed:
            whole = {
                number: own for number, group in self._groups.items() if group.is_whole(own := told.get(number, ()))
            }
            return {
                group: max(whole.get(number, ()), group.requests, key=n_begun) for number, group in self._groups.items()
            }

    def _answer(self) -> None:
        """Keep the replicas at work until the stream is closed."""
        while self._wait_for_work():
            with self._phase("rollout"):
                self._advance()
                while not self.is_ahead and self._is_due and not self._has_ended:
                    self._advance()
            if not self.is_ahead:
                with self._phase("rewards"), self.changed:
                    self.changed.wait_for(lambda: self._is_due or self._n_unrewarded == 0)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        if self.is_ahead:
            return self._timers.phase("generation")
        return self._timers.phase(name) if self._caller == SETUP else self._timers.named(self._caller)

    @property
    def _is_due(self) -> bool:
        """Whether the thread "rollout" has something to do, or is to end."""
        return self._has_ended or bool(self._new) or self._replicas.has_work

    def _wait_for_work(self) -> bool:
        """Wait for work, and return True; False: the stream is closed."""
        with self.changed:
            self._is_resting = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._is_due)
            self._is_resting = False
            return not self._has_ended

    def _advance(self) -> None:
        """Hand new jobs to the replicas, and wait for some answers."""
        with self.changed:
            new, self._new = self._new, []
        for jobs, first in new:
            self._replicas.submit(sorted(jobs, key=self._place_in_queue), first=first)
        answers = self._replicas.advance()
        for restart in self._replicas.take_restarts():
            self._tell(restart)
        with self.changed:
            for job in self._replicas.take_lost():
                self._groups[job.number].resume(job)
            for answer in answers:
                self._groups[answer.number].add(answer)
            numbers = dict.fromkeys(answer.number for answer in answers)
            groups = [self._groups.pop(number) for number in numbers if self._groups[number].is_answered]
            self._note_answered(groups)
            for group in groups:
                group.on_answered()
            self.changed.notify_all()
        self._rollout.learn_lengths([s for group in groups for s in group.samples if not s.has_failed])

    def _place_in_queue(self, job: Job) -> tuple[int, float]:
        """Return what sorts jobs that come together: jobs of the next step first, and among them the longest."""
        step, _ = self._groups[job.number].place
        return step, -self._rollout.expected_length(job.prompt)

    def _note_answered(self, groups: Sequence[Group]) -> None:
        self._answered += groups
        self._n_unrewarded += len(groups)
        if self._environment is not None and (failed := [group for group in groups if group.failures]):
            self._with_failures += failed
            self._failures_changed = True
        self.answered_at = time.perf_counter()

    def _next(self, groups: Sequence[Group]) -> list[Group] | None:
        """Wait for what the collecting thread has to do.

        Returns:
            Groups to compute rewards of; none: replicas need weights. None: all of `groups` are there.
        """
        with self.changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._environment is not None and self._failures_changed:
                    self._check_failures(groups, self._environment.max_failed)
                    self._failures_changed = False
                if all(group.rewarded is not None or (not self.is_ahead and group.values) for group in groups):
                    return None
                if self._answered and not self.is_ahead and not self._judges_later:
                    return self._take_answered()
                if self._replicas.needs_weights:
                    return []
                # A response that is judged has the whole time, and some more to end by its own limit.
                judging = self._rewards.slowest()
                grace = 2 * event_loop.CLEAN_UP_S
                begin = self._progress if judging is None else max(self._progress, judging.began + grace)
                left = begin + self._timeout_s - time.perf_counter()
                if left <= 0 and judging is not None:
                    raise judging.too_slow()
                if left <= 0:
                    raise RunFailed(
                        f"no group of samples was finished for scheduler.timeout_s={self._timeout_s:g} s, while the "
                        f"trainer waited: {len(self._groups)} prompts are being answered, {len(self._answered)} groups "
                        "wait for their rewards. See the logs of the rollout; if the completions need longer, raise "
                        "scheduler.timeout_s"
                    )
                self.changed.wait(left)

    @property
    def _judges_later(self) -> bool:
        """Whether completions wait for all others, because the judge has its devices in turn, once for all of them."""
        in_turn = self._judge_model is not None and self._judge_model.takes_turns
        return in_turn and bool(self._groups or self._new)

    def _check_failures(self, groups: Sequence[Group], most: float) -> None:
        """End the run if too many episodes of `groups` have failed.

        Raises:
            RunFailed: more than the share `most` of all.
        """
        failures = [failure for group in groups for failure in group.failures]
        n_episodes = sum(len(group.requests) for group in groups)
        if len(failures) > most * n_episodes:
            raise RunFailed(
                f"{len(failures)} of the {n_episodes} episodes of a step have failed, more than the share "
                f"environment.max_failed={most:g} allows. The first error:\n{failures[0]}"
            )

    def _renew(self) -> None:
        """Send weights to servers that were started again."""
        self.settle()
        if self._replicas.needs_weights:
            self._resend(self._version)
            self.weights_sent(self._version)

    def _take_answered(self) -> list[Group]:
        """Return groups that wait for their rewards, at most `_judged_at_once` of the first."""
        self._answered.sort(key=lambda group: group.place)
        n = len(self._answered) if self._judged_at_once is None else self._judged_at_once
        groups, self._answered = self._answered[:n], self._answered[n:]
        return groups

    def _judge_ahead(self) -> None:
        """Compute the rewards of groups as they are answered, until the stream is closed; several threads may.

        A reward that judges several responses at the same time, as a coroutine does, gets one group from each thread,
        the next step's first, so that a slow one holds up no other. At most a step's groups go to a reward model at
        once, so that groups of later steps do not hold it up.
        """
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._answered or self._has_ended)
                if self._has_ended:
                    return
                groups = self._take_answered()
            with self._timers.phase("rewards"):
                self._judge(groups)
                self._complete(groups)

    def _judge(self, groups: Sequence[Group]) -> None:
        """Compute the rewards of groups together, without those that a reward model gives."""
        with nullcontext() if self._judge_model is None else self._judge_model.working():
            batch = RemoteBatch.joined([group.batch for group in groups]) if self._rewards.reads_tokens else None
            values = iter(judged([group.samples for group in groups], self._rewards, batch))
        with self.changed:
            self._progress = time.perf_counter()
            for group in groups:
                group.values = [next(values) for _ in group.requests]

    def _complete(self, groups: Sequence[Group]) -> None:
        """Give the samples of groups their rewards, including the scores of the reward model."""
        samples = [sample for group in groups for sample in group.samples]
        values = [each for group in groups for each in group.values or ()]
        scores: dict[int, float] = {}
        if self._reward_model is not None:
            batch = RemoteBatch.joined([group.batch for group in groups])
            scores = model_scores(samples, batch, self._rewards, self._reward_model)
        done = iter(rewarded(samples, values, self._rewards, scores))
        with self.changed:
            self._progress = time.perf_counter()
            self._n_unrewarded -= len(groups)
            for group in groups:
                group.rewarded = [next(done) for _ in group.requests]
                group.rewarded_at = self._progress
            self.changed.notify_all()

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Return a thread that hands what it raises to the main thread."""

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - `collect` and `settle` raise it
                with self.changed:
                    self._failure = self._failure or error
                    self.changed.notify_all()

        return threading.Thread(target=run, name=name, daemon=True)

    def __enter__(self) -> Self:
        if self._rewards.has_coroutines and self.is_ahead:
            self._helpers.enter_context(event_loop.beside())
        if self._judge_model is not None:
            self._helpers.enter_context(self._judge_model)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self._has_ended = True
            self.changed.notify_all()
        self._rollout.gate.end()
        self._helpers.close()
        until = time.monotonic() + ENDING_S
        for thread in [*self._threads, *filter(None, [self._update])]:
            thread.join(max(0.0, until - time.monotonic()))
