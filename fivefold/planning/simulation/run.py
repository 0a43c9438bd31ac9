"""Simulates training with a look-ahead: which side waits for which, and how stale samples are.

    prompts ── Turns: which may begin ──> the replica with the fewest requests ──> groups that are finished
       ^                                                                                     │
       └────────── new weights <────── a step of the trainer <────── the groups of its turn ─┘
                   which may overlap the next step

A replica gets a group when it has fewer requests than slots. Requests without a slot wait for the next one to end.
Replicas decode all of their requests together, so the time of a token depends on their number. Nothing changes on a
replica between two completions, so the simulation steps from completion to completion. `fivefold.data.turns.Turns`
decides which prompts may begin, as in a run.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from random import Random
from typing import NamedTuple

from fivefold.data.turns import Turns
from fivefold.planning.simulation.lengths import Lengths

N_STEPS = 8
"""Training steps that are measured, after the warm-up in which the look-ahead fills up."""
N_WARM_UP = 8
"""Steps that are not measured; twice the look-ahead if that is more."""
NEARLY = 1e-6
"""Tokens by which rounding may change a replica's token count."""


@dataclass(frozen=True)
class OverlappedWeights:
    """New weights that arrive during the trainer's next step, one part after the other. Times are in seconds."""

    copy_seconds: float
    """Time in which the trainer copies them before its next step. Replicas decode."""
    staging_seconds: float
    """Time in which they travel. Replicas decode."""
    swap_seconds: float
    """Time in which all replicas pause for them."""


@dataclass(frozen=True)
class Setting:
    """A run to simulate. Times are in seconds."""

    batch_size: int
    """Prompts of a step."""
    group_size: int
    """Completions of a prompt."""
    n_replicas: int
    """Replicas that generate."""
    slots: int
    """Requests that a replica decodes at one time."""
    token_seconds: Sequence[float]
    """Time in which a replica decodes one token of each of n requests, at index n. The last entry holds for more."""
    train_seconds: float
    """Time of a training step without generation and new weights."""
    update_seconds: float
    """Time in which all replicas and the trainer pause for new weights."""
    overlapped: OverlappedWeights | None = None
    """How weights overlap the next step if there is a look-ahead; None: the trainer waits for the replicas."""
    max_age: int = 0
    """Most versions between the weights that sample a token and the weights that are trained on it."""
    shares_devices: bool = False
    """Whether trainer and replicas take turns on the same devices."""
    reread_seconds: float = 0.0
    """Time in which a replica reads one token of an interrupted request again; 0: keys and values are kept."""
    prompt_tokens: float = 0.0
    """Tokens of a prompt, which are read again as well."""
    logprob_seconds: float = 0.0
    """Extra time of a token for each request with a look-ahead, whose loss reads all log-probs."""
    max_running: int | None = None
    """Most prompts that run at one time; None: all that are fresh enough."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "group_size", "n_replicas", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if len(self.token_seconds) < 2 or min(self.token_seconds[1:]) <= 0:
            raise ValueError(
                "token_seconds needs a time above 0 for each number of requests, starting with 1 at index 1"
            )
        if self.max_age < 0 or min(self._times) < 0:
            raise ValueError(
                "max_age, train_seconds, update_seconds, logprob_seconds and reread_seconds must be at least 0"
            )
        if self.overlapped is not None and min(astuple(self.overlapped)) < 0:
            raise ValueError(f"{self.overlapped}: its times must be at least 0")
        if self.overlapped is not None and self.shares_devices:
            raise ValueError("overlapped needs replicas on separate devices: drop it, or shares_devices")

    @property
    def _times(self) -> tuple[float, ...]:
        return self.train_seconds, self.update_seconds, self.logprob_seconds, self.reread_seconds

    def least_seconds(self, mean_length: float) -> float:
        """Return a lower bound of the seconds of a step in the long run, whatever the age."""
        last = len(self.token_seconds) - 1
        fastest = min(self.token_seconds[min(n, last)] / n for n in range(1, self.slots + 1))
        generating = self.batch_size * self.group_size * mean_length * fastest / self.n_replicas
        own = self.train_seconds + self.update_seconds
        if self.shares_devices:
            return own + generating
        waiting = max(own, generating + self.update_seconds)
        if (overlapped := self.overlapped) is None:
            return waiting
        training = self.train_seconds + overlapped.copy_seconds
        return min(waiting, max(training, generating + overlapped.swap_seconds, sum(astuple(overlapped))))


@dataclass(frozen=True)
class Outcome:
    """What a simulated run measured over the steps after its warm-up."""

    seconds: float
    """Mean seconds of a step."""
    idle_trainer: float
    """Share of the time in which the trainer waits for samples."""
    idle_rollout: float
    """Share of the time in which a replica does not decode, on average over the replicas."""
    staleness_mean: float
    """Versions between a sample's oldest token and the weights that are trained on it, on average over samples."""
    staleness_max: int
    """The largest staleness."""
    finished: dict[int, float]
    """When the group of each trained prompt was finished, warm-up included."""


def simulate(setting: Setting, lengths: Lengths, *, n_steps: int = N_STEPS, seed: int = 0) -> Outcome:
    """Return what a run would measure.

    Prompts get the same lengths in every setting with groups of the same size.

    Args:
        setting: the run.
        lengths: distribution of the response lengths, which are drawn independently.
        n_steps: steps that are measured.
        seed: seed of the lengths.
    """
    return _Run(setting, lengths, n_steps, seed).outcome()


class _Request(NamedTuple):
    """A running completion. Requests are ordered by their ends."""

    end: float
    """Token count of its replica at which it finishes."""
    prompt: int
    length: int


class _Replica:
    """Decodes its requests together. Its token count grows by one whenever each of them has received a token."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._running: list[_Request] = []
        self._waiting: deque[tuple[int, int]] = deque()
        """Prompts and lengths of requests waiting for a slot."""
        self._count = 0.0
        self._now = 0.0
        self._resumes = 0.0
        """Time until which it pauses."""
        self._arrivals = [0.0]
        """Token count at which each version of the weights arrived."""
        self.busy = 0.0
        """Seconds that it has spent decoding."""

    @property
    def next_end(self) -> float:
        """Time at which its next completion finishes if nothing changes until then."""
        if not self._running:
            return math.inf
        return max(self._now, self._resumes) + (self._running[0].end - self._count) * self._token_seconds

    @property
    def _token_seconds(self) -> float:
        setting, n = self._setting, len(self._running)
        times = setting.token_seconds
        return times[min(n, len(times) - 1)] + (n * setting.logprob_seconds if setting.max_age else 0.0)

    def advance(self, now: float) -> None:
        """Decode until `now`. No completion ends before."""
        worked = now - max(self._now, self._resumes)
        if self._running and worked > 0:
            self._count += worked / self._token_seconds
            self.busy += worked
        self._now = max(self._now, now)

    def add(self, prompt: int, lengths: Sequence[int]) -> None:
        """Accept a group."""
        self._waiting.extend((prompt, length) for length in lengths)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._setting.slots:
            prompt, length = self._waiting.popleft()
            heapq.heappush(self._running, _Request(self._count + length, prompt, length))

    def end_next(self) -> tuple[int, int]:
        """Finish the next completion. Returns its prompt, and the version that sampled its first token."""
        self.advance(self.next_end)
        done = heapq.heappop(self._running)
        self._count = done.end
        self._fill()
        return done.prompt, bisect_right(self._arrivals, done.end - done.length + NEARLY) - 1

    def take_weights(self, until: float) -> None:
        """Pause until the next version of the weights has arrived, then read all running requests again."""
        setting = self._setting
        tokens = sum(self._count - (each.end - each.length) + setting.prompt_tokens for each in self._running)
        self._resumes = until + tokens * setting.reread_seconds
        self._arrivals.append(self._count)


class _Run:
    """One simulated run."""

    def __init__(self, setting: Setting, lengths: Lengths, n_steps: int, seed: int) -> None:
        self._setting = setting
        self._warm_up = max(N_WARM_UP, 2 * setting.max_age)
        self._n_turns = self._warm_up + n_steps
        # Prompts continue after the last trained turn, so that the last steps are like all others.
        last = self._n_turns + setting.max_age
        self._turns = Turns(
            setting.batch_size, setting.max_age, first_turn=0, last_turn=last, max_running=setting.max_running
        )
        random = Random(seed)
        n_prompts = (last + 1) * setting.batch_size
        self._lengths = [lengths.draw(random, setting.group_size) for _ in range(n_prompts)]
        self._replicas = [_Replica(setting) for _ in range(setting.n_replicas)]
        self._loads = [0] * setting.n_replicas
        """Unfinished requests of each replica."""
        self._by_load = [(0, rank) for rank in range(setting.n_replicas)]
        """A heap of the replicas by load. Outdated loads are dropped when they come up."""
        self._queue: deque[int] = deque()
        """Prompts that may begin, but for which no replica has had room."""
        self._left: dict[int, int] = {}
        """Unfinished requests of each running prompt."""
        self._unfinished = [setting.batch_size] * (last + 1)
        """Unfinished prompts of each turn."""
        self._ages: list[list[int]] = [[] for _ in range(last + 1)]
        """Staleness of the first token of each finished request, by turn."""
        self._ends: list[tuple[float, int]] = []
        """Announced ends of completions with their replica. Outdated ones are dropped when they come up."""
        self._announced = [math.inf] * setting.n_replicas
        self._coming: deque[tuple[float, Callable[[float], None]]] = deque()
        """Next events of weights that overlap training, and when they happen."""
        self._finished: dict[int, float] = {}

    def outcome(self) -> Outcome:
        """Run all turns, and measure the ones after the warm-up."""
        now = waited = began = busy_before = 0.0
        self._admit(now)
        for turn in range(self._n_turns):
            if turn == self._warm_up:
                waited, began, busy_before = 0.0, now, self._busy(now)
            ready = self._run_until_finished(turn, now)
            waited += ready - now
            now = self._train(turn, ready)
        seconds = now - began
        rollout = (self._busy(now) - busy_before) / self._setting.n_replicas
        ages = [age for turn in range(self._warm_up, self._n_turns) for age in self._ages[turn]]
        trained = self._n_turns * self._setting.batch_size
        return Outcome(
            seconds=seconds / (self._n_turns - self._warm_up),
            idle_trainer=waited / seconds,
            idle_rollout=1.0 - rollout / seconds,
            staleness_mean=sum(ages) / len(ages),
            staleness_max=max(ages),
            finished={prompt: time for prompt, time in self._finished.items() if prompt < trained},
        )

    def _train(self, turn: int, now: float) -> float:
        """Train the groups of a turn, send the weights, and return the time at which the trainer is free."""
        setting = self._setting
        self._turns.take(turn)
        trained = now + setting.train_seconds
        if setting.shares_devices:
            self._advance_all(now)
        else:
            self._run_until(trained)
        if setting.overlapped is not None and setting.max_age > 0:
            return self._send_overlapped(turn + 1, trained, setting.overlapped)
        end = trained + setting.update_seconds
        self._pause_all(end)
        self._have_weights(turn + 1, end)
        return end

    def _send_overlapped(self, version: int, now: float, overlapped: OverlappedWeights) -> float:
        """Send weights during the next step, after earlier ones. Returns the time at which the trainer has a copy."""
        while self._coming:
            now = max(now, self._next_event())
        copied = now + overlapped.copy_seconds
        swap = copied + overlapped.staging_seconds
        end = swap + overlapped.swap_seconds
        self._coming.append((swap, lambda _: self._pause_all(end)))
        self._coming.append((end, lambda time: self._have_weights(version, time)))
        self._run_until(copied)
        return copied

    def _pause_all(self, end: float) -> None:
        """Pause all replicas until they have new weights at `end`."""
        for rank, replica in enumerate(self._replicas):
            replica.take_weights(end)
            self._announce_end(rank)

    def _have_weights(self, version: int, now: float) -> None:
        self._turns.version = version
        self._admit(now)

    def _run_until_finished(self, turn: int, now: float) -> float:
        """Generate until all groups of a turn are finished. Returns that time, which is not before `now`."""
        while self._unfinished[turn]:
            now = max(now, self._next_event())
        self._run_until(now)
        return now

    def _run_until(self, now: float) -> None:
        while min(self._first_end(), self._next_coming()) <= now:
            self._next_event()
        self._advance_all(now)

    def _next_coming(self) -> float:
        """Return the time of the next event of overlapping weights; infinity if there is none."""
        return self._coming[0][0] if self._coming else math.inf

    def _next_event(self) -> float:
        """Process the next event, the end of a completion or one of new weights. Returns its time."""
        if self._next_coming() >= self._first_end():
            return self._end_next()
        time, happen = self._coming.popleft()
        self._advance_all(time)
        happen(time)
        return time

    def _advance_all(self, now: float) -> None:
        for replica in self._replicas:
            replica.advance(now)

    def _busy(self, now: float) -> float:
        self._advance_all(now)
        return sum(replica.busy for replica in self._replicas)

    def _first_end(self) -> float:
        """Return when the next completion ends; infinity if none is running."""
        while self._ends and self._ends[0][0] != self._announced[self._ends[0][1]]:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else math.inf

    def _announce_end(self, rank: int) -> None:
        self._announced[rank] = self._replicas[rank].next_end
        if self._announced[rank] < math.inf:
            heapq.heappush(self._ends, (self._announced[rank], rank))

    def _end_next(self) -> float:
        """Finish the next completion. Returns its time."""
        now = self._first_end()
        assert now < math.inf, "no completion runs, though the trainer waits for one"
        _, rank = heapq.heappop(self._ends)
        prompt, version = self._replicas[rank].end_next()
        turn = self._turns.turn_of(prompt)
        self._ages[turn].append(turn - version)
        self._left[prompt] -= 1
        self._add_load(rank, -1)
        if not self._left[prompt]:
            del self._left[prompt]
            self._turns.finish(prompt)
            self._finished[prompt] = now
            self._unfinished[turn] -= 1
        self._admit(now)
        self._announce_end(rank)
        return now

    def _admit(self, now: float) -> None:
        """Begin as many prompts as the rule and the replicas allow."""
        while (prompt := self._turns.begin()) is not None:
            self._queue.append(prompt)
        size, slots = self._setting.group_size, self._setting.slots
        changed = set()
        while self._queue and self._loads[rank := self._least_loaded()] < slots:
            prompt = self._queue.popleft()
            self._replicas[rank].advance(now)
            self._left[prompt] = size
            self._add_load(rank, size)
            self._replicas[rank].add(prompt, self._lengths[prompt])
            changed.add(rank)
        for rank in changed:
            self._announce_end(rank)

    def _add_load(self, rank: int, n: int) -> None:
        self._loads[rank] += n
        heapq.heappush(self._by_load, (self._loads[rank], rank))

    def _least_loaded(self) -> int:
        """Return the replica with the fewest requests; the first of several."""
        while self._by_load[0][0] != self._loads[self._by_load[0][1]]:
            heapq.heappop(self._by_load)
        return self._by_load[0][1]
