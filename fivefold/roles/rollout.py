"""The replicas that generate: the driver's handle of them, and the worker in each replica's process.

driver   prompts ─> requests ─> jobs in one queue ─> groups of samples (text, lengths), and the tokens by reference
replica  takes a job when it has room: requests ─> completions ─> trajectories ─> columns in the object store

A group reaches the driver as soon as all of its completions have ended.

A server's jobs are the groups of single prompts, longest-expected first. An embedded engine's are as many equal shares
as there are replicas, because its rounding depends on which requests are decoded together.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fivefold.bridge.hf_writer import save_hf
from fivefold.cluster.group import Remote, WorkerGroup
from fivefold.cluster.rendezvous import NODE, PLACE_ON_NODE, PROCESSES_ON_NODE
from fivefold.config.paths import resolve_model_path
from fivefold.engine.deterministic import make_deterministic
from fivefold.roles.actor import Actor
from fivefold.roles.gate import Gate
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.rollout.engines import build_engine, weights_device
from fivefold.rollout.protocol import GenerationRequest, SamplingParams, group_requests
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.tokenizer import load_tokenizer
from fivefold.sync.buckets import unpack
from fivefold.sync.folder import NodePlace
from fivefold.sync.nccl_link import Invitation, Meeting
from fivefold.sync.offer import WeightOffer
from fivefold.types import NOT_SAMPLED, Columns, Completion, FinishReason, Prompt, Sample, Trajectory

if TYPE_CHECKING:
    from fivefold.rollout.servers.engine import ServerEngine


@dataclass(frozen=True, eq=False)
class Generated:
    """Samples without rewards, those of one prompt side by side."""

    samples: list[Sample]
    batch: RemoteBatch
    """The same sequences, in the same order."""
    metrics: dict[str, float]
    """Load of the replicas: see docs/metrics.md."""


@dataclass(frozen=True, eq=False)
class Group:
    """Samples of one prompt, without rewards: all of them, or those that one replica was to generate."""

    number: int
    """Index of the first one's request among all requests of the call, or of the stream."""
    samples: list[Sample]
    batch: RemoteBatch
    """The same sequences, in the same order."""


Finished = Callable[[list[Group]], None]
"""Is told of groups as they finish."""


def ignore(groups: list[Group]) -> None:
    """Do nothing with groups that finish: the caller waits for all of them."""


@dataclass(frozen=True)
class Job:
    """Requests that one replica answers, and what it needs to know of their prompts."""

    indices: range
    """Index of each request among all requests of the call."""
    prompts: Sequence[Prompt]
    """The prompt of each request."""
    requests: Sequence[GenerationRequest]

    def split(self, size: int) -> dict[int, Job]:
        """Return the requests of each group that the job has, by the group's number; groups have `size` requests."""
        parts: dict[int, Job] = {}
        start = 0
        while start < len(self.indices):
            group = self.indices[start] // size
            part = slice(start, (group + 1) * size - self.indices.start)
            parts[group] = Job(self.indices[part], self.prompts[part], self.requests[part])
            start += len(parts[group].indices)
        return parts


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
    ) -> Generated:
        """Generate `n_samples` completions of each prompt.

        Args:
            prompts: the prompts.
            n_samples: completions of each.
            sampling: how tokens are chosen.
            key: decides the random choices, together with a prompt's place and the sample's place in its group.
            finished: is told of each group once, and at least every second of no group; what it raises ends the wait.
        """
        asked = [prompt for prompt in prompts for _ in range(n_samples)]
        requests = group_requests([prompt.token_ids for prompt in prompts], n_samples, key, sampling.logprob_share)
        size = n_samples if self._is_server else math.ceil(len(requests) / len(self._group))
        jobs = [
            Job(range(start, end), asked[start:end], requests[start:end])
            for start in range(0, len(requests), size)
            for end in [min(start + size, len(requests))]
        ]
        if self._is_server:
            jobs.sort(key=lambda job: -self._expected.of(job.prompts[0]))
        began = time.perf_counter()
        kept: list[list[tuple[Responses, Remote]]] = [[] for _ in range(len(self._group))]
        for results in self._group.deal(RolloutWorker.generate, jobs, sampling, n_samples):
            groups = []
            for rank, report, columns in results:
                kept[rank].append((report, columns))
                indices = groupby(sorted(report.indices_N.tolist()), key=lambda index: index // n_samples)
                groups += groups_of([[(index, asked[index]) for index in own] for _, own in indices], report, columns)
            finished(groups)
        result = generated(asked, kept, time.perf_counter() - began)
        self._expected.learn(result.samples)
        return result

    def unfinished(self) -> dict[int, list[GenerationRequest]]:
        """Return the jobs of a stream that replicas have begun, by their first index, with their tokens so far."""
        return {index: job for jobs in self._group.call(RolloutWorker.unfinished) for index, job in jobs.items()}

    def meet(self, actor: Actor) -> None:
        """Enter an NCCL group with the actor, over which weights then come."""
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

    def sleep(self) -> None:
        """Drop the weights and leave the devices to the actor."""
        self.version = None
        self.gate.close()
        self._group.call(RolloutWorker.sleep)

    def wake_weights(self) -> None:
        """Take the device memory of the weights back; call `take_weights` next, because `sleep` has dropped them."""
        self._group.call(RolloutWorker.wake_weights)

    def wake(self) -> None:
        """Take the rest of the device memory back, so that `generate` has its cache."""
        self._group.call(RolloutWorker.wake)
        self.gate.open()


class ExpectedLengths:
    """Expects of a prompt's completions that they are as long as the last ones were."""

    def __init__(self) -> None:
        self._lengths: dict[tuple[int, ...], float] = {}
        self._mean = 0.0

    def of(self, prompt: Prompt) -> float:
        """Return the expected tokens of a completion; of a prompt without completions so far, the mean of all."""
        return self._lengths.get(prompt.token_ids, self._mean)

    def learn(self, samples: Sequence[Sample]) -> None:
        """Remember the mean length of each prompt's samples, which are side by side."""
        for token_ids, group in groupby(samples, key=lambda sample: sample.prompt.token_ids):
            lengths = [sample.n_sampled for sample in group]
            self._lengths[token_ids] = sum(lengths) / len(lengths)
        if self._lengths:
            self._mean = sum(self._lengths.values()) / len(self._lengths)


@dataclass(frozen=True, eq=False)
class Responses:
    """What a replica reports of its N trajectories to the driver."""

    indices_N: npt.NDArray[np.int64]
    """Index of each among all requests of the call."""
    texts: list[str]
    """The sampled tokens of each, decoded without special tokens."""
    finish_reasons: list[FinishReason]
    lengths_N: npt.NDArray[np.int64]
    """Tokens of each trajectory."""
    sampled_N: npt.NDArray[np.int64]
    """Tokens of each trajectory that the policy sampled."""
    versions_N2: npt.NDArray[np.int64]
    """Oldest and newest version of the weights that sampled each trajectory."""
    busy_s: float
    """Seconds since the report before, or from the first job: until these completions were there."""
    n_running: int = 0
    """Requests of a stream that the replica has and has not answered."""
    lost: Mapping[int, Sequence[GenerationRequest]] = field(default_factory=dict)
    """Jobs of a stream that were lost with their server, by their first index: requests with their tokens so far."""
    has_weights: bool = True
    """Whether the replica may get further jobs before the next weights."""

    @staticmethod
    def of(
        indices: Sequence[int], trajectories: Sequence[Trajectory], texts: list[str], busy_s: float = 0.0
    ) -> Responses:
        """Return the report of `trajectories`, whose sampled tokens decode to `texts`."""
        sampled = [trajectory.versions_T[trajectory.mask_T] for trajectory in trajectories]
        return Responses(
            indices_N=np.array(indices, dtype=np.int64),
            texts=texts,
            finish_reasons=[trajectory.finish_reason for trajectory in trajectories],
            lengths_N=np.array([len(trajectory.tokens_T) for trajectory in trajectories], dtype=np.int64),
            sampled_N=np.array([len(versions) for versions in sampled], dtype=np.int64),
            versions_N2=np.array([_span(versions) for versions in sampled], dtype=np.int64).reshape(-1, 2),
            busy_s=busy_s,
        )


def _span(versions: npt.NDArray[np.int32]) -> tuple[int, int]:
    """Return the oldest and the newest of the versions; `NOT_SAMPLED` twice if nothing was sampled."""
    return (int(versions.min()), int(versions.max())) if len(versions) else (NOT_SAMPLED, NOT_SAMPLED)


def generated(asked: Sequence[Prompt], kept: Sequence[Sequence[tuple[Responses, Remote]]], seconds: float) -> Generated:
    """Combine the results of all replicas.

    Args:
        asked: the prompt of each request.
        kept: the reports of each replica, and the references to their columns.
        seconds: how long the call took.
    """
    samples, batch = samples_of(asked, [pair for pairs in kept for pair in pairs])
    return Generated(samples, batch, load_metrics([[report for report, _ in pairs] for pairs in kept], seconds))


def groups_of(asked: Sequence[Sequence[tuple[int, Prompt]]], report: Responses, columns: Remote) -> list[Group]:
    """Return the groups of one report.

    Args:
        asked: index and prompt of each request, by group, in ascending order.
        report: a replica's report of these requests.
        columns: the reference to its columns.
    """
    if not asked:
        return []
    samples, batch = samples_of([prompt for own in asked for _, prompt in own], [(report, columns)])
    groups, start = [], 0
    for own in asked:
        end = start + len(own)
        groups.append(Group(own[0][0], samples[start:end], batch.select(range(start, end))))
        start = end
    return groups


def samples_of(asked: Sequence[Prompt], kept: Sequence[tuple[Responses, Remote]]) -> tuple[list[Sample], RemoteBatch]:
    """Return the samples of some replicas' reports in the order of the requests, and the batch of their sequences.

    Args:
        asked: the prompt of each request of the reports, in order.
        kept: each replica's report, and the reference to its columns.
    """
    reports = [responses for responses, _ in kept]
    order_N = np.argsort(np.concatenate([responses.indices_N for responses in reports]))
    texts = [text for responses in reports for text in responses.texts]
    reasons = [reason for responses in reports for reason in responses.finish_reasons]
    lengths_N = np.concatenate([responses.lengths_N for responses in reports])[order_N]
    sampled_N = np.concatenate([responses.sampled_N for responses in reports])[order_N]
    versions_N2 = np.concatenate([responses.versions_N2 for responses in reports])[order_N]
    samples = [
        Sample(prompt, texts[index], reasons[index], length, n_sampled, (oldest, newest))
        for prompt, index, length, n_sampled, (oldest, newest) in zip(
            asked, order_N.tolist(), lengths_N.tolist(), sampled_N.tolist(), versions_N2.tolist(), strict=True
        )
    ]
    places = np.argsort(order_N)
    ends = np.cumsum([len(responses.texts) for responses in reports])
    pieces = [
        Piece(columns, places[end - len(responses.texts) : end])
        for (responses, columns), end in zip(kept, ends, strict=True)
        if responses.texts
    ]
    return samples, RemoteBatch(lengths_N, sampled_N, tuple(pieces))


def load_metrics(reports: Sequence[Sequence[Responses]], seconds: float) -> dict[str, float]:
    """Return how evenly the replicas, each with its reports, were loaded in a call that took `seconds`."""
    busy = [sum(report.busy_s for report in own) / seconds for own in reports]
    tokens = [float(sum(report.sampled_N.sum() for report in own)) for own in reports]
    return {
        "replica_busy/mean": sum(busy) / len(busy),
        "replica_busy/min": min(busy),
        "replica_tokens/min": min(tokens),
        "replica_tokens/max": max(tokens),
    }


class RolloutWorker:
    """One replica of the rollout engine."""

    def __init__(self, spec: ReplicaSpec) -> None:
        if spec.deterministic:
            make_deterministic()
        run = f"{spec.run}-{os.environ[NODE]}"
        place = NodePlace(run, int(os.environ[PLACE_ON_NODE]), int(os.environ[PROCESSES_ON_NODE]))
        save = partial(save_hf, config_source=spec.path, tokenizer_source=spec.tokenizer_path)
        self._device = weights_device(spec)
        self._route = spec.route
        self._n_devices = spec.tp * spec.pp
        self._engine = build_engine(spec, place, save)
        self._jobs: dict[int, Job] = {}
        """Jobs of a stream that are not done, by their first index."""
        self._tokenizer = load_tokenizer(resolve_model_path(spec.tokenizer_path))

    def generate(
        self, jobs: Iterator[Job], sampling: SamplingParams, group_size: int
    ) -> Iterator[tuple[Responses, Columns | None]]:
        """Generate one trajectory for each request of the jobs, each of which is taken when the engine has room.

        Args:
            jobs: the jobs.
            sampling: how tokens are chosen.
            group_size: number of neighbouring requests that are a group.

        Yields:
            The report on groups whose requests of a job have all been answered, and the columns of their trajectories.
        """
        taken: list[tuple[Job, dict[int, Job]]] = []
        """Each job, and its groups."""
        ended: dict[tuple[int, int], dict[int, Completion]] = defaultdict(dict)
        """Completions of groups that are not whole, by the index of their request; the keys are job and group."""
        since = 0.0

        def requests() -> Iterator[Sequence[GenerationRequest]]:
            nonlocal since
            for job in jobs:
                since = since or time.perf_counter()
                taken.append((job, job.split(group_size)))
                yield job.requests

        for number, completions in self._engine.generate_each(requests(), sampling):
            job, groups = taken[number]
            for place, completion in completions.items():
                index = job.indices[place]
                ended[number, index // group_size][index] = completion
            whole = [group for group in groups if len(ended[number, group]) == len(groups[group].indices)]
            answers = [(groups[group], ended.pop((number, group))) for group in whole]
            if answers:
                in_order = [(part, [own[index] for index in part.indices]) for part, own in answers]
                report, columns = self._reported(in_order, since)
                since += report.busy_s
                for group in whole:
                    del groups[group]
                yield report, columns

    def advance(
        self, jobs: Sequence[Job], sampling: SamplingParams, seconds: float
    ) -> tuple[Responses, Columns | None]:
        """Begin further jobs of a stream, and go on with all of them until one is done or about `seconds` have passed.

        Returns:
            The report on the jobs that are done, and the columns of their trajectories, as from `generate`.
        """
        began = time.perf_counter()
        for job in jobs:
            self._jobs[job.indices.start] = job
            self._engine.submit(job.indices.start, job.requests, sampling)
        done = self._engine.collect(seconds)
        report, columns = self._reported([(self._jobs.pop(number), answers) for number, answers in done], began)
        lost = self._engine.take_lost()
        for number in lost:
            del self._jobs[number]
        n_running, has_weights = self._engine.n_running, self._engine.has_weights
        return replace(report, n_running=n_running, lost=lost, has_weights=has_weights), columns

    def unfinished(self) -> dict[int, list[GenerationRequest]]:
        """Return the jobs of the stream that are not done, by their first index, with their tokens so far."""
        return self._engine.unfinished()

    def _reported(
        self, answers: Sequence[tuple[Job, list[Completion]]], began: float
    ) -> tuple[Responses, Columns | None]:
        """Return the report on jobs with their completions, and the columns of the trajectories."""
        indices: list[int] = []
        trajectories: list[Trajectory] = []
        texts: list[str] = []
        for job, completions in answers:
            indices += job.indices
            pairs = zip(job.prompts, completions, strict=True)
            trajectories += [Trajectory.single_turn(prompt, completion) for prompt, completion in pairs]
            token_ids = [completion.token_ids.tolist() for completion in completions]
            texts += self._tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        report = Responses.of(indices, trajectories, texts, time.perf_counter() - began)
        return report, Columns.of(trajectories) if trajectories else None

    def take_weights(self, buckets: Iterator[Any], version: int) -> None:
        """Replace all weights by those in `buckets`, whose version is `version`.

        The buckets are `Bucket`s with the weights, or with another transport than `folder` announcements of
        `DeviceBucket`s.
        """
        if self._route.transport == "folder":
            self._engine.update_weights(unpack(buckets, self._device), version)
        else:
            self._engine.load_buckets(buckets, version)

    def meeting(self) -> Meeting:
        """Return how the server enters an NCCL group."""
        return self._server().meeting

    def enter_link(self, invitation: Invitation) -> None:
        """Enter an NCCL group with the trainer; the processes of all replicas follow rank 0 in the replicas' order."""
        self._server().enter(invitation, 1 + int(os.environ["RANK"]) * self._n_devices)

    def sleep(self) -> None:
        """Drop the weights and leave the devices to the actor."""
        self._engine.sleep()

    def wake_weights(self) -> None:
        """Take the device memory of the weights back; they come with the next `take_weights`."""
        self._engine.wake_weights()

    def wake(self) -> None:
        """Take the rest of the device memory back."""
        self._engine.wake()

    def device_share(self) -> int | None:
        """Return the bytes of each of its devices that the awake engine takes; None: it settles that itself."""
        from fivefold.rollout.servers.engine import ServerEngine

        return self._engine.device_share if isinstance(self._engine, ServerEngine) else None

    def _server(self) -> ServerEngine:
        """Return the engine, which is a server: no other engine enters an NCCL group."""
        from fivefold.rollout.servers.engine import ServerEngine

        assert isinstance(self._engine, ServerEngine)
        return self._engine
