"""Asynchronous experience: prompts are answered ahead of their step, by weights that are at most so many versions old.

    main thread        take(step): waits until the step's groups are there          weights_sent: more prompts may begin
                            ^                                                              │
    threads "rewards"  groups with rewards <─── queue <─── groups                          v
    thread "rollout"                                          └── replicas <── jobs <── the rule of data/turns.py
    thread "weights"   gives the replicas new weights, where training goes on meanwhile  ──┘

Step s trains the same prompts in the same order as without a look-ahead, with the same seeds. What differs is which
weights have sampled their tokens. The number of groups that wait is bounded by the rule, so nothing is ever dropped.
A sampler that chooses by rewards does not know those of the last `max_head_offpolicyness` steps when it chooses: always
of exactly so many, so that it does not matter to its choice which completions finish first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import fmean
from types import TracebackType
from typing import Self

from fivefold.checkpoints.store import EXPERIENCE
from fivefold.checkpoints.writer import StateOwner
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.sampler import EpochSampler, SamplerState
from fivefold.data.turns import Turns
from fivefold.experience.overlap import ENDING_S, FinishedGroups
from fivefold.experience.samples import judge, outcomes, staleness_metrics
from fivefold.experience.source import Experience
from fivefold.experience.waiting import Saved, WaitingGroups
from fivefold.observe.errors import RunFailed
from fivefold.observe.timers import PhaseTimers
from fivefold.rewards import event_loop
from fivefold.rewards.reward_set import RewardSet
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.responses import Generated, Group, load_metrics
from fivefold.roles.reward_model import RewardModel
from fivefold.roles.rollout import Rollout
from fivefold.roles.rollout_stream import RolloutStream
from fivefold.roles.rollout_worker import Job
from fivefold.rollout.protocol import Begun, GenerationRequest, SamplingParams, group_requests, n_begun
from fivefold.types import Prompt, Sample


@dataclass(frozen=True)
class _Turn:
    """The prompts of one step."""

    prompts: Sequence[Prompt]
    requests: Sequence[GenerationRequest]
    """Those of one prompt side by side."""


@dataclass(frozen=True, eq=False)
class Judged:
    """A group with its rewards, which waits for its step."""

    samples: list[Sample]
    batch: RemoteBatch
    since: float
    """Time on `time.perf_counter` from which it waits."""


class StreamSource:
    """Answers the prompts of the next steps while others are trained. It is a context manager."""

    def __init__(
        self,
        recipe: TrainRecipe,
        sampler: EpochSampler[Prompt],
        rollout: Rollout,
        sampling: SamplingParams,
        rewards: RewardSet,
        timers: PhaseTimers,
        *,
        first_step: int,
        last_step: int,
        resend: Callable[[int], None],
        saved: Saved | None = None,
        reward_model: RewardModel | None = None,
    ) -> None:
        """Begin with the prompts of `first_step`, at the first `weights_sent`; those of `last_step` are the last.

        Of `saved`, what a checkpoint has, the groups are taken over that answer these prompts and are young enough, and
        those that were being answered go on; all other prompts are answered anew. `resend` sends the weights of the
        given version, which are those of now, to all replicas: to those whose server was started again. `reward_model`
        is the model of which one of the rewards is the score.
        """
        self._reward_model = reward_model
        self._resend = resend
        self._recipe = recipe
        self._sampler = sampler
        self._sampling = sampling
        self._rewards = rewards
        self._timers = timers
        self._size = recipe.gconfig.n_samples
        self._stream = RolloutStream(rollout, sampling, recipe.rollout.max_batch_size)
        self._rollout = rollout
        self._turns = Turns(
            recipe.train_dataset.batch_size,
            recipe.rollout.max_head_offpolicyness,
            first_turn=first_step - 1,
            last_turn=last_step - 1,
            max_running=recipe.rollout.max_concurrent_rollouts,
        )
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._read: dict[int, _Turn] = {}
        """Turns that have been read and not taken."""
        self._begun: list[int] = []
        """Prompts that may begin, and have not been handed to the replicas."""
        self._groups: dict[int, Group] = {}
        """Groups that are not taken, without their rewards, by prompt."""
        self._so_far: dict[int, Sequence[Begun | None]] = {}
        """What completions had in the checkpoint from which the run goes on, or when their server died, until
        they are finished, by prompt."""
        self._finished = FinishedGroups()
        self._judged: dict[int, Judged] = {}
        self._failure: BaseException | None = None
        self._has_ended = False
        self._update: threading.Thread | None = None
        """Gives the replicas the last weights, beside the training."""
        self._progress = self._last_take = time.perf_counter()
        """Times at which the last group finished, and at which the last step was taken."""
        self._work = list(self._stream.work)
        """What each replica had done by then."""
        n_judges = min(rewards.n_at_once, (1 + recipe.rollout.max_head_offpolicyness) * recipe.train_dataset.batch_size)
        self._judged_at_once = recipe.train_dataset.batch_size if reward_model else 1 if n_judges > 1 else None
        """Most groups that a thread judges together; None: all that have finished meanwhile."""
        judges = ["rewards"] if n_judges == 1 else [f"rewards {number}" for number in range(1, n_judges + 1)]
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in (("rollout", self._generate), *((name, self._judge) for name in judges))
        ]
        self._coroutines = ExitStack()
        self._restore(saved or Saved(), first_step - 1)

    @property
    def owners(self) -> Mapping[str, StateOwner]:
        """What a checkpoint has besides the position in the data: groups that wait for their step or are answered."""
        return {EXPERIENCE: WaitingGroups(self._waiting, self._running)}

    @property
    def sampler_state(self) -> SamplerState:
        """Position in the training data behind the prompts that were taken."""
        with self._changed:
            return self._sampler.state_dict(ahead=len(self._read))

    def weights_sent(self, version: int) -> None:
        """Let the prompts begin that are young enough with weights of version `version`, which all replicas have."""
        self._read_for(version)
        self._have_weights(version)

    def weights_follow(self, version: int, give: Callable[[], None]) -> None:
        """Call `give`, which gives all replicas weights of version `version`, in a thread beside the next step.

        The prompts that they make young enough begin behind it. What it raises ends the wait for the next samples.
        """
        self.settle()
        self._read_for(version)

        def update() -> None:
            give()
            self._have_weights(version)

        self._update = threading.Thread(target=self._guarded, args=(update,), name="weights", daemon=True)
        self._update.start()

    def settle(self) -> None:
        """Wait until the replicas have the weights that were last given to them; raise what failed beside training."""
        if self._update is not None:
            self._update.join()
            self._update = None
        with self._changed:
            if self._failure is not None:
                raise self._failure

    def take_news(self) -> str | None:
        """Return which servers were started again since the last call."""
        logs = [f"logs/rollout-{rank}.log" for rank in self._stream.take_died()]
        return f"servers have died or hung, and were started again: see {', '.join(logs)}" if logs else None

    def _read_for(self, version: int) -> None:
        """Read the turns whose prompts may begin with weights of a version."""
        with self._changed:
            # All at once, not as they begin: what a sampler was told before each turn is then the same in every run.
            self._read_until(version)

    def _have_weights(self, version: int) -> None:
        with self._changed:
            self._stream.weights_sent()
            self._turns.version = version
            self._admit()

    def take(self, step: int) -> Experience:
        """Return the experience of training step `step`, once all of its groups have their rewards.

        Raises:
            RunFailed: no group was finished within `scheduler.timeout_s`.
            ValueError: a reward function failed.
            WorkerError: a worker failed.
        """
        turn, began = step - 1, time.perf_counter()
        numbers = self._turns.prompts_of(turn)
        with self._timers.phase("rollout"):
            self._progress = max(self._progress, began)
            while not self._are_judged(numbers):
                self.settle()
                if self._stream.needs_weights:
                    self._resend(turn)
                    self.weights_sent(turn)
            with self._changed:
                groups = [self._judged.pop(number) for number in numbers]
                for number in numbers:
                    del self._groups[number]
                self._turns.take(turn)
                del self._read[turn]
        samples = [sample for group in groups for sample in group.samples]
        self._sampler.told(outcomes(samples))
        metrics = self._metrics(groups, began) | staleness_metrics(samples, version=turn)
        return Experience(samples, RemoteBatch.joined([group.batch for group in groups]), metrics)

    def _are_judged(self, numbers: Sequence[int]) -> bool:
        """Wait until prompts have their rewards, and return True; False: a replica needs weights before that.

        What another thread has raised is raised here.
        """
        limit = self._recipe.scheduler.timeout_s
        with self._changed:
            while not all(number in self._judged for number in numbers):
                if self._failure is not None:
                    raise self._failure
                if self._stream.needs_weights:
                    return False
                left = self._progress + limit - time.perf_counter()
                if left <= 0:
                    raise RunFailed(
                        f"no group of samples was finished for scheduler.timeout_s={limit:g} s, while the trainer "
                        f"waited: {self._turns.n_running} prompts are being answered, {len(self._finished)} groups "
                        "wait for their rewards. See the logs of the rollout; if the completions need longer, raise "
                        "scheduler.timeout_s"
                    )
                self._changed.wait(left)
            return True

    def _metrics(self, groups: Sequence[Judged], began: float) -> dict[str, float]:
        """Return how long groups have waited, the load of each replica, and how much each side had no work."""
        now = time.perf_counter()
        seconds, self._last_take = now - self._last_take, now
        work, before = list(self._stream.work), self._work
        self._work = work
        load = load_metrics([done - earlier for done, earlier in zip(work, before, strict=True)], seconds)
        waits = [now - group.since for group in groups]
        return {
            "staleness/wait_seconds": fmean(waits),
            "staleness/wait_seconds/max": max(waits),
            "idle/trainer": (now - began) / seconds,
            "idle/rollout": max(0.0, 1.0 - load["replica_busy/mean"]),
            **load,
        }

    def _waiting(self) -> dict[int, Group]:
        with self._changed:
            return dict(self._groups)

    def _running(self) -> dict[int, Sequence[GenerationRequest]]:
        """Return the requests of groups that are being answered, with their tokens up to the last weights."""
        self.settle()
        # In this order: a replica forgets what it has lost only after this process has noted it.
        told = {index // self._size: requests for index, requests in self._rollout.unfinished().items()}
        with self._changed:
            noted = {number: self._job(number).requests for number in self._so_far}
            return {
                number: max(told.get(number, ()), noted.get(number, ()), key=n_begun)
                for number in told.keys() | noted.keys()
                if self._turns.turn_of(number) in self._read
            }

    def _restore(self, saved: Saved, turn: int) -> None:
        """Take over groups of a checkpoint after which step `turn` + 1 is the next."""
        age, most_tokens = self._recipe.rollout.max_head_offpolicyness, self._sampling.max_new_tokens
        groups = {group.number: group for group in saved.groups}
        begun = {group.number: group for group in saved.begun}
        self._read_until(turn)
        for later in range(turn, turn + 1 + age):
            for number, prompt in zip(self._turns.prompts_of(later), self._read[later].prompts, strict=True):
                group, running = groups.get(number), begun.get(number)
                requests = self._job(number).requests
                if group and group.fits(prompt, requests, most_tokens) and later - group.oldest <= age:
                    self._groups[number] = group.restored(prompt, self._size)
                if running and running.fits(prompt, requests, most_tokens) and later - running.oldest <= age:
                    self._so_far[number] = running.begun
        self._turns.restore(self._groups)
        self._finished.add(list(self._groups.values()))

    def _admit(self) -> None:
        """Let prompts begin, as many as the rule allows."""
        while (number := self._turns.begin()) is not None:
            self._begun.append(number)
        self._changed.notify_all()

    def _read_until(self, version: int) -> None:
        """Read the turns whose prompts may begin with weights of a version, those behind the last step too."""
        for turn in range(version, version + 1 + self._recipe.rollout.max_head_offpolicyness):
            if turn not in self._read:
                self._read[turn] = self._next_turn(turn)

    def _next_turn(self, turn: int) -> _Turn:
        prompts = self._sampler.next_batch()
        requests = group_requests(
            [prompt.token_ids for prompt in prompts],
            self._size,
            # The seeds of a step without a look-ahead.
            (self._recipe.seed, "train", turn + 1),
            self._sampling.logprob_share,
        )
        return _Turn(prompts, requests)

    def _job(self, number: int) -> Job:
        turn = self._read[self._turns.turn_of(number)]
        row = number - self._turns.prompts_of(self._turns.turn_of(number)).start
        requests = turn.requests[row * self._size : (row + 1) * self._size]
        if begun := self._so_far.get(number):
            requests = [replace(request, begun=each) for request, each in zip(requests, begun, strict=True)]
        indices = range(number * self._size, (number + 1) * self._size)
        return Job(indices, [turn.prompts[row]] * self._size, requests)

    def _generate(self) -> None:
        """Keep the replicas at work until the source is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_ended or self._begun or self._stream.has_work)
                if self._has_ended:
                    return
                jobs, self._begun = [self._job(number) for number in self._begun], []
            for job in sorted(jobs, key=self._place_in_queue):
                self._stream.submit(job)
            with self._timers.phase("generation"):
                groups = self._stream.advance()
            with self._changed:
                for index, requests in self._stream.take_lost().items():
                    self._so_far[index // self._size] = [request.begun for request in requests]
                for group in groups:
                    self._turns.finish(group.number // self._size)
                    self._groups[group.number // self._size] = group
                    self._so_far.pop(group.number // self._size, None)
                self._admit()
            self._rollout.learn_lengths([sample for group in groups for sample in group.samples])
            self._finished.add(groups)

    def _place_in_queue(self, job: Job) -> tuple[int, float]:
        """Return what sorts jobs that come together: those of the next step first, and of these the longest."""
        turn = self._turns.turn_of(job.indices.start // self._size)
        return turn, -self._rollout.expected_length(job.prompts[0])

    def _judge(self) -> None:
        """Compute the rewards of groups as they finish, until the source is closed; several threads may.

        A reward that judges several responses at the same time, as a coroutine does, gets one group from each thread,
        the next step's first, so that a slow one holds up no other. At most a step's groups go to a reward model at
        once, so that those of later steps do not hold it up. Groups that wait for their rewards keep their place in the
        rule, so that rewards that are slower than the rollout slow it down.
        """
        while groups := self._finished.take(self._judged_at_once):
            samples = [sample for group in groups for sample in group.samples]
            generated = Generated(samples, RemoteBatch.joined([group.batch for group in groups]), {})
            with self._timers.phase("rewards"):
                done = judge(generated, self._rewards, self._reward_model)
            with self._changed:
                self._progress = time.perf_counter()
                for place, group in enumerate(groups):
                    own = done[place * self._size : (place + 1) * self._size]
                    self._judged[group.number // self._size] = Judged(own, group.batch, self._progress)
                self._changed.notify_all()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Run the work of a thread; hand what it raises to the main thread."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - `take` raises it
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def __enter__(self) -> Self:
        if self._rewards.has_coroutines:
            self._coroutines.enter_context(event_loop.beside())
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        self._finished.abandon()
        self._rollout.gate.end()
        self._coroutines.close()
        until = time.monotonic() + ENDING_S
        for thread in [*self._threads, *filter(None, [self._update])]:
            thread.join(max(0.0, until - time.monotonic()))
