"""The samples of each step, from a stream that is at most a bounded number of weight versions ahead of it.

    weights_sent ──> prompts that are young enough (data/turns.py) ──> stream ──> take(step)

Step s trains the same prompts in the same order whatever the bound is, with the same seeds; what differs is which
weights sampled their tokens. The bound limits the number of groups that wait, so nothing is ever dropped. A sampler
that chooses by rewards does not know the rewards of the last `max_head_offpolicyness` steps when it chooses: always
exactly so many, so that its choice does not depend on which completions finish first.

With a bound of 0, a step's prompts are read and answered when the step is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from fivefold.checkpoints.store import EXPERIENCE, REPLAY_BUFFER
from fivefold.checkpoints.writer import StateOwner
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.sampler import EpochSampler, SamplerState
from fivefold.data.turns import Turns
from fivefold.experience.group import Group, groups_of
from fivefold.experience.rounds import with_signal
from fivefold.experience.samples import outcomes
from fivefold.experience.staleness import staleness_metrics
from fivefold.experience.stream import Stream
from fivefold.experience.waiting import Saved, WaitingGroups
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.responses import load_metrics
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.types import Prompt, Sample

if TYPE_CHECKING:
    from fivefold.experience.replay_buffer import ReplayBuffer


@dataclass(frozen=True, eq=False)
class Experience:
    """The samples that a step trains on."""

    samples: list[Sample]
    """Samples with their rewards, grouped by prompt."""
    batch: RemoteBatch
    """The same sequences, in the same order."""
    metrics: dict[str, float]
    """Metrics of the rollout."""
    greedy: Sequence[Sample] = ()
    """The greedy sample of each prompt, with its reward, if the advantage compares with it; they are not trained on."""
    n_again: int = 0
    """Number of samples, the last ones, that earlier steps have trained too."""

    @property
    def new(self) -> Sequence[Sample]:
        """The samples that no step has trained before."""
        return self.samples[: len(self.samples) - self.n_again]

    @property
    def groups(self) -> list[int]:
        """Index of each sample's prompt: samples with the same one are a group."""
        return [sample.prompt.index for sample in self.samples]


class Source:
    """Gives each step its samples: completions of the prompts that the sampler gives out, in their order."""

    def __init__(
        self,
        recipe: TrainRecipe,
        sampler: EpochSampler[Prompt],
        sampling: SamplingParams,
        stream: Stream,
        timers: PhaseTimers,
        *,
        first_step: int,
        last_step: int,
        saved: Saved | None = None,
        corrects: Callable[[], bool] = lambda: False,
        buffer: ReplayBuffer | None = None,
    ) -> None:
        """Begin with the prompts of `first_step`, and end with the prompts of `last_step`.

        Args:
            recipe: the recipe.
            sampler: gives out the prompts.
            sampling: how completions are sampled.
            stream: answers the prompts.
            timers: count the time in which a step waits for its samples.
            first_step: the first step.
            last_step: the last step.
            saved: samples of a checkpoint. Those are taken over that answer these prompts and are young enough.
            corrects: returns whether the next loss is corrected by the rollout's log-probs; it then needs all of them.
            buffer: gives each step groups to train again; None: every group is trained once.
        """
        self.stream = stream
        self._recipe = recipe
        self._sampler = sampler
        self._sampling = sampling
        self._timers = timers
        self._corrects = corrects
        self._buffer = buffer
        self._size = recipe.gconfig.n_samples
        self._age = recipe.rollout.max_head_offpolicyness
        self._turns = Turns(
            recipe.train_dataset.batch_size,
            self._age,
            first_turn=first_step - 1,
            last_turn=last_step - 1,
            max_running=recipe.rollout.max_concurrent_rollouts,
        )
        self._read: dict[int, list[Group]] = {}
        """Groups of the turns that have been read and not taken. The stream's lock guards them and the turns."""
        self._since = time.perf_counter()
        """When the last step was taken, or a synchronous one began."""
        self._work = stream.work
        """What each replica had done by then."""
        if stream.is_ahead:
            self._restore(saved or Saved(), first_step - 1)

    @property
    def owners(self) -> Mapping[str, StateOwner]:
        """What a checkpoint has besides the position in the data: groups that wait for their step or are answered, and
        those that may be trained again."""
        if not self.stream.is_ahead:
            return {}
        waiting = WaitingGroups(self._waiting, self._running)
        return {EXPERIENCE: waiting} if self._buffer is None else {EXPERIENCE: waiting, REPLAY_BUFFER: self._buffer}

    @property
    def sampler_state(self) -> SamplerState:
        """Position in the training data after the prompts that were taken."""
        with self.stream.changed:
            return self._sampler.state_dict(ahead=len(self._read))

    def weights_sent(self, version: int) -> None:
        """Let the prompts begin that are young enough with weights of `version`, which all replicas have."""
        self.stream.weights_sent(version)
        if self.stream.is_ahead:
            self._read_for(version)
            self._begin(version)

    def weights_follow(self, version: int, give: Callable[[], None]) -> None:
        """Call `give`, which gives all replicas weights of `version`, in a thread while the next step is trained.

        The prompts that they make young enough begin after it. What it raises ends the wait for the next samples.
        """
        self.stream.settle()
        self._read_for(version)

        def update() -> None:
            give()
            self.stream.weights_sent(version)
            self._begin(version)

        self.stream.update_beside(update)

    def take(self, step: int) -> Experience:
        """Return the experience of training step `step`, counted from 1; steps are taken in order.

        None of its tokens was sampled by weights older than `rollout.max_head_offpolicyness` allows.

        Raises:
            RunFailed: no group was finished within `scheduler.timeout_s`.
            ValueError: a reward function failed, or a judge scored no sample.
            WorkerError: a worker failed.
        """
        turn, began = step - 1, time.perf_counter()
        if not self.stream.is_ahead:
            self._measure_from(began)
            self._read_for(turn)
            self._begin(turn)
        groups = self._read[turn]
        with self._timers.phase("rollout") if self.stream.is_ahead else nullcontext():
            samples = self.stream.collect(groups)
        self.stream.check_scored(samples)
        with self.stream.changed:
            self._turns.take(turn)
            del self._read[turn]
        self._sampler.told(outcomes(samples))
        metrics = (
            self._waits(groups, samples, turn, began) if self.stream.is_ahead else self._load(self.stream.answered_at)
        )
        greedy: Sequence[Sample] = ()
        if self._recipe.actor.dynamic_sampling:
            groups, found = with_signal(self._recipe, groups, partial(self._next_round, turn))
            metrics = self._load(self.stream.answered_at) | found
        if self._recipe.actor.advantage == "remax":
            sampling = replace(self._sampling, greedy=True, seeded=False, logprob_share=0.0)
            key = (self._recipe.seed, "greedy", step)
            greedy = self._answered(groups_of([group.prompt for group in groups], 1, sampling, key, turn))
        if self._recipe.environment is not None:
            metrics["episode/failed"] = fmean(sample.has_failed for group in groups for sample in group.samples)
        groups = [group for group in groups if group.finished]
        samples = [sample for group in groups for sample in group.finished]
        batches = [group.finished_batch for group in groups]
        if self._buffer is None:
            return Experience(samples, RemoteBatch.joined(batches), metrics, greedy)
        chosen = self._buffer.choose(turn, {group.prompt.index for group in groups})
        self._buffer.add(groups, turn)
        again = [sample for each in chosen for sample in each.samples]
        batch = RemoteBatch.joined([*batches, *(each.batch for each in chosen)])
        metrics |= self._buffer.metrics(chosen, len(groups) + len(chosen), turn)
        metrics |= staleness_metrics([*samples, *again], version=turn)
        return Experience([*samples, *again], batch, metrics, n_again=len(again))

    def _next_round(self, turn: int, round_: int, seen: Set[int]) -> list[Group]:
        """Return the groups of a further round of a step, which has its own random choices, without prompts in `seen`.

        Each round reads a whole batch, so that the sampler stays at the beginning of one.
        """
        prompts = [prompt for prompt in self._sampler.next_batch() if prompt.index not in seen]
        key = (self._recipe.seed, "train", turn + 1, round_)
        groups = groups_of(prompts, self._size, self._sampling_now, key, turn)
        if prompts:
            self._measure_from(time.perf_counter())
        self._sampler.told(outcomes(self._answered(groups)))
        return groups

    def _answered(self, groups: Sequence[Group]) -> list[Sample]:
        """Return the samples of groups that are answered with the weights of now."""
        self.stream.submit(groups)
        return self.stream.collect(groups)

    @property
    def _sampling_now(self) -> SamplingParams:
        return replace(self._sampling, logprob_share=1.0) if self._corrects() else self._sampling

    def _measure_from(self, moment: float) -> None:
        self._since, self._work = moment, self.stream.work

    def _load(self, until: float) -> dict[str, float]:
        """Return the load of each replica from the moment of `_measure_from` on."""
        work = [done - before for done, before in zip(self.stream.work, self._work, strict=True)]
        return load_metrics(work, until - self._since)

    def _waits(self, groups: Sequence[Group], samples: Sequence[Sample], turn: int, began: float) -> dict[str, float]:
        """Return ages of samples, how long their groups waited, the replicas' load and how long each side was idle."""
        now = time.perf_counter()
        load, seconds = self._load(now), now - self._since
        self._measure_from(now)
        waits = [now - group.rewarded_at for group in groups]
        return {
            "staleness/wait_seconds": fmean(waits),
            "staleness/wait_seconds/max": max(waits),
            "idle/trainer": (now - began) / seconds,
            "idle/rollout": max(0.0, 1.0 - load["replica_busy/mean"]),
            **load,
            **staleness_metrics(samples, version=turn),
        }

    def _read_for(self, version: int) -> None:
        """Read the turns whose prompts may begin with weights of a version, those after the last step too.

        All at once, not as they begin: what a sampler knows before each turn is then the same in every run.
        """
        with self.stream.changed:
            for turn in range(version, version + 1 + self._age):
                if turn not in self._read:
                    key = (self._recipe.seed, "train", turn + 1)
                    self._read[turn] = groups_of(self._sampler.next_batch(), self._size, self._sampling_now, key, turn)

    def _begin(self, version: int) -> None:
        """Let the prompts begin that are young enough with weights of `version`."""
        with self.stream.changed:
            self._turns.version = version
            self._admit()

    def _admit(self) -> None:
        """Let prompts begin, as many as the rule allows."""
        groups = []
        while (number := self._turns.begin()) is not None:
            group = self._group(number)
            group.on_answered = partial(self._finish, number)
            groups.append(group)
        self.stream.submit(groups)

    def _finish(self, number: int) -> None:
        """Take note that a prompt is answered, which may let others begin."""
        self._turns.finish(number)
        self._admit()

    def _group(self, number: int) -> Group:
        """Return the group of a prompt, by its number in the order of the data."""
        turn = self._turns.turn_of(number)
        return self._read[turn][number - self._turns.prompts_of(turn).start]

    def _numbered(self) -> dict[int, Group]:
        """Return the groups that are read and not taken, by the number of their prompt."""
        return {number: self._group(number) for turn in self._read for number in self._turns.prompts_of(turn)}

    def _not_taken(self) -> dict[int, Group]:
        """Return the same groups, by the place of their prompt among those that are not taken.

        Unlike the number, the place does not depend on the batch size, which may change when a run continues.
        """
        numbered = self._numbered()
        first = min(numbered, default=0)
        return {number - first: group for number, group in numbered.items()}

    def _waiting(self) -> dict[int, Group]:
        with self.stream.changed:
            return {place: group for place, group in self._not_taken().items() if group.is_answered}

    def _running(self) -> dict[int, Sequence[GenerationRequest]]:
        """Return the requests of groups that are not answered, with their tokens up to the last weights."""
        so_far = self.stream.so_far()
        with self.stream.changed:
            return {
                place: so_far.get(group, group.requests)
                for place, group in self._not_taken().items()
                if not group.is_answered
            }

    def _restore(self, saved: Saved, turn: int) -> None:
        """Take over groups of a checkpoint after which step `turn` + 1 is the next."""
        waiting = {group.place: group for group in saved.groups}
        begun = {group.place: group for group in saved.begun}
        self._read_for(turn)
        restored = []
        for number, group in self._numbered().items():
            place = number - self._turns.prompts_of(turn).start
            oldest = self._turns.turn_of(number) - self._age
            if (whole := waiting.get(place)) and whole.fits(group) and whole.oldest >= oldest:
                group.add(whole.restored(group.prompt))
                restored.append(number)
            elif (part := begun.get(place)) and part.fits(group) and part.oldest >= oldest:
                group.requests = part.continued(group.requests)
        self._turns.restore(restored)
        self.stream.submit([self._group(number) for number in restored])
