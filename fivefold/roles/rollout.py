"""The driver's handle of the replicas that generate: their devices and deaths. Their weights: `weight_sync.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby

from fivefold.cluster.group import WorkerGroup
from fivefold.roles.rollout_worker import RolloutWorker
from fivefold.rollout.protocol import GenerationRequest, n_begun
from fivefold.types import Prompt, Sample


class Rollout:
    """The driver's handle of all replicas."""

    def __init__(self, group: WorkerGroup, shares_devices: bool, *, is_server: bool) -> None:
        self._group = group
        self.gate = Gate()
        """Open while the replicas can generate."""
        self.shares_devices = shares_devices
        self.is_server = is_server
        self._expected = ExpectedLengths()
        self.version: int | None = None
        """Version of the weights that the replicas have; None before the first, and while they sleep."""

    @cached_property
    def device_share(self) -> int | None:
        """Bytes of each of its devices that an awake replica takes; None: it takes what it needs at the time."""
        return max((share for share in self._group.call(RolloutWorker.device_share) if share is not None), default=None)

    @property
    def group(self) -> WorkerGroup:
        """The processes of the replicas."""
        return self._group

    def expected_length(self, prompt: Prompt) -> float:
        """Return the tokens that a server's completion of a prompt is expected to have; 0 of an embedded engine's.

        Prompts with the longest come first. An embedded engine's keep their order, on which its rounding depends.
        """
        return self._expected.of(prompt) if self.is_server else 0.0

    def learn_lengths(self, samples: Sequence[Sample]) -> None:
        """Expect later completions of the samples' prompts, which are side by side, to be as long."""
        self._expected.learn(samples)

    def can_generate(self) -> bool:
        """Return whether all replicas have weights; one whose server was started again has none before the next."""
        return all(self._group.control(RolloutWorker.can_generate))

    def unfinished(self) -> dict[int, list[GenerationRequest]]:
        """Return the requests of the jobs that replicas have begun, by the job's number, with their tokens so far.

        A job that one replica has lost may have continued on another, which then has more of its tokens.
        """
        found: dict[int, list[GenerationRequest]] = {}
        for jobs in self._group.call(RolloutWorker.unfinished):
            found |= {number: max(job, found.get(number, []), key=n_begun) for number, job in jobs.items()}
        return found

    def sleep(self) -> None:
        """Drop the weights and leave the devices to the actor."""
        self.version = None
        self.gate.close()
        self._group.call(RolloutWorker.sleep)

    def wake_weights(self) -> bool:
        """Take the device memory of the weights back; they come next, because `sleep` has dropped them.

        Returns False if a server has died while it slept; the others have theirs, and it waits for `revive`.
        """
        return all(self._group.call(RolloutWorker.wake_weights))

    def revive(self) -> None:
        """Start servers again that have died while they slept; they sleep on."""
        self._group.call(RolloutWorker.revive)

    def wake(self) -> None:
        """Take the rest of the device memory back, so that `generate` has its cache."""
        self._group.call(RolloutWorker.wake)
        self.gate.open()


class ExpectedLengths:
    """Expects of a prompt's completions that they are as long as the last ones were."""

    def __init__(self) -> None:
        self._learning = threading.Lock()
        self._lengths: dict[tuple[int, ...], float] = {}
        self._total = 0.0

    def of(self, prompt: Prompt) -> float:
        """Return the expected tokens of a completion; of a prompt without completions so far, the mean of all."""
        return self._lengths.get(prompt.key, self._total / max(1, len(self._lengths)))

    def learn(self, samples: Sequence[Sample]) -> None:
        """Remember the mean length of each prompt's samples, which are side by side; any thread may."""
        for key, group in groupby(samples, key=lambda sample: sample.prompt.key):
            lengths = [sample.n_sampled for sample in group]
            mean = sum(lengths) / len(lengths)
            with self._learning:
                self._total += mean - self._lengths.get(key, 0.0)
                self._lengths[key] = mean


class Gate:
    """Lets calls pass while it is open. `close` returns once no call is on its way."""

    def __init__(self) -> None:
        """Begin open."""
        self._changed = threading.Condition()
        self._is_open = True
        self._has_ended = False

    @property
    def is_open(self) -> bool:
        """Whether calls pass."""
        return self._is_open

    @contextmanager
    def passing(self) -> Iterator[bool]:
        """Wait until the gate is open, and keep it open inside the block. Yields False once the gate has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_open or self._has_ended)
            yield not self._has_ended

    def open(self) -> None:
        """Let calls pass."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let no call pass before `open`."""
        with self._changed:
            self._is_open = False

    def end(self) -> None:
        """Let those who wait go, because there are no more calls."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
