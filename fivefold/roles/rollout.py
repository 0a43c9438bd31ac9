"""The driver's handle of the replicas that generate.

driver   prompts ─> requests ─> jobs in one queue ─> groups of samples (text, lengths), and the tokens by reference
replica  takes a job when it has room: requests ─> completions ─> trajectories ─> columns in the object store

A group reaches the driver as soon as all of its completions have ended.

A server's jobs are the groups of single prompts, longest-expected first. An embedded engine's are as many equal shares
as there are replicas, because its rounding depends on which requests are decoded together.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import groupby

from fivefold.cluster.group import Remote, WorkerGroup
from fivefold.observe.progress import counting
from fivefold.roles.actor import Actor
from fivefold.roles.gate import Gate
from fivefold.roles.responses import Generated, Group, Responses, generated, groups_of
from fivefold.roles.rollout_worker import Job, RolloutWorker
from fivefold.rollout.protocol import GenerationRequest, SamplingParams, group_requests, n_begun
from fivefold.types import Prompt, Sample
from fivefold.weights.offer import WeightOffer

Finished = Callable[[list[Group]], None]
"""Is told of groups as they finish."""


def ignore(groups: list[Group]) -> None:
    """Do nothing with groups that finish: the caller waits for all of them."""


class Rollout:
    """The driver's handle of all replicas."""

    def __init__(self, group: WorkerGroup, shares_devices: bool, *, is_server: bool) -> None:
        self._group = group
        self.gate = Gate()
        """Open while the replicas can generate."""
        self.shares_devices = shares_devices
        self._is_server = is_server
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

    def generate(
        self,
        prompts: Sequence[Prompt],
        n_samples: int,
        sampling: SamplingParams,
        key: tuple[int | str, ...],
        finished: Finished = ignore,
        renew: Callable[[], None] | None = None,
    ) -> Generated:
        """Generate `n_samples` completions of each prompt.

        Args:
            prompts: the prompts.
            n_samples: completions of each.
            sampling: how tokens are chosen.
            key: decides the random choices, together with a prompt's place and the sample's place in its group.
            finished: is told of each group once, and at least every second of no group; what it raises ends the wait.
            renew: is called when a server died and was started again, to give it weights if it has none; what it was
                answering is then asked for once more. None: a server that dies is an error.
        """
        asked = [prompt for prompt in prompts for _ in range(n_samples)]
        requests = group_requests([prompt.token_ids for prompt in prompts], n_samples, key, sampling.logprob_share)
        size = n_samples if self._is_server else math.ceil(len(requests) / len(self._group))
        jobs = [
            Job(range(start, end), asked[start:end], requests[start:end])
            for start in range(0, len(requests), size)
            for end in [min(start + size, len(requests))]
        ]
        jobs.sort(key=lambda job: -self.expected_length(job.prompts[0]))
        began = time.perf_counter()
        kept: list[list[tuple[Responses, Remote]]] = [[] for _ in range(len(self._group))]
        with counting("generating", len(requests)) as count:
            while jobs:
                done = set[int]()
                for results in self._group.deal(RolloutWorker.generate, jobs, sampling, n_samples, renew is not None):
                    groups = []
                    for rank, report, columns in results:
                        kept[rank].append((report, columns))
                        indices = groupby(sorted(report.indices_N.tolist()), key=lambda index: index // n_samples)
                        by_group = [[(index, asked[index]) for index in own] for _, own in indices]
                        groups += groups_of(by_group, report, columns)
                        count(len(report.indices_N))
                        done.update(report.indices_N.tolist())
                    finished(groups)
                jobs = [job for job in jobs if not done.issuperset(job.indices)]
                if jobs:
                    assert renew is not None, "jobs are lost only where that is allowed"
                    renew()
        result = generated(asked, kept, time.perf_counter() - began)
        self.learn_lengths(result.samples)
        return result

    def expected_length(self, prompt: Prompt) -> float:
        """Return the tokens that a server's completion of a prompt is expected to have; 0 of an embedded engine's.

        Prompts with the longest come first. An embedded engine's keep their order, on which its rounding depends.
        """
        return self._expected.of(prompt) if self._is_server else 0.0

    def learn_lengths(self, samples: Sequence[Sample]) -> None:
        """Expect later completions of the samples' prompts, which are side by side, to be as long."""
        self._expected.learn(samples)

    def can_generate(self) -> bool:
        """Return whether all replicas have weights; one whose server was started again has none before the next."""
        return all(self._group.control(RolloutWorker.can_generate))

    def unfinished(self) -> dict[int, list[GenerationRequest]]:
        """Return the jobs of a stream that replicas have begun, by their first index, with their tokens so far.

        One that a replica has lost may have gone on in another, which then has the more of its tokens.
        """
        found: dict[int, list[GenerationRequest]] = {}
        for jobs in self._group.call(RolloutWorker.unfinished):
            found |= {index: max(job, found.get(index, []), key=n_begun) for index, job in jobs.items()}
        return found

    def meet(self, actor: Actor) -> None:
        """Enter an NCCL group with the actor, if weights are about to come over one and a server is in none.

        That is so at the beginning, and when a server was started again, because it had died or shows here that it
        hangs; the others then leave theirs. Servers with requests stand still from here until they have the weights.
        """
        if not actor.sends_by_nccl or all(self._group.call(RolloutWorker.expect_transfer)):
            return
        [meeting, *_] = self._group.call(RolloutWorker.meeting)
        invitation = actor.open_link(meeting)
        entering = self._group.start(RolloutWorker.enter_link, invitation)
        actor.enter_link().wait()
        entering.wait()

    def take_weights(self, offer: WeightOffer) -> None:
        """Give every replica the weights that the actor offers, bucket by bucket."""
        self._group.feed(RolloutWorker.take_weights, offer.buckets, offer.version)
        offer.close()
        self.version = offer.version

    def stage_weights(self, offer: WeightOffer) -> None:
        """Give every replica the weights of the next `swap_weights`, while it generates."""
        self._group.feed_beside(RolloutWorker.stage_weights, offer.buckets, offer.version)
        offer.close()

    def swap_weights(self, version: int) -> None:
        """Let every replica go on with the weights that it was last given, which are of `version`."""
        self._group.call(RolloutWorker.swap_weights)
        self.version = version

    def sleep(self) -> None:
        """Drop the weights and leave the devices to the actor."""
        self.version = None
        self.gate.close()
        self._group.call(RolloutWorker.sleep)

    def wake_weights(self) -> bool:
        """Take the device memory of the weights back; call `take_weights` next, because `sleep` has dropped them.

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
        return self._lengths.get(prompt.token_ids, self._total / max(1, len(self._lengths)))

    def learn(self, samples: Sequence[Sample]) -> None:
        """Remember the mean length of each prompt's samples, which are side by side; any thread may."""
        for token_ids, group in groupby(samples, key=lambda sample: sample.prompt.token_ids):
            lengths = [sample.n_sampled for sample in group]
            mean = sum(lengths) / len(lengths)
            with self._learning:
                self._total += mean - self._lengths.get(token_ids, 0.0)
                self._lengths[token_ids] = mean
