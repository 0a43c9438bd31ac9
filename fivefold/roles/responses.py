"""What replicas report of their completions, and the samples that the driver makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fivefold.cluster.group import Remote
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.rollout.protocol import GenerationRequest
from fivefold.types import NOT_SAMPLED, FinishReason, Prompt, Sample, Trajectory


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
    work = [Work.of([report for report, _ in pairs]) for pairs in kept]
    return Generated(samples, batch, load_metrics(work, seconds))


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


@dataclass(frozen=True)
class Work:
    """What one replica has done."""

    busy_s: float = 0.0
    """Seconds that it has worked."""
    n_tokens: int = 0
    """Tokens that it has sampled."""

    @staticmethod
    def of(reports: Sequence[Responses]) -> Work:
        """Return the work that a replica reports."""
        return Work(sum(report.busy_s for report in reports), sum(int(report.sampled_N.sum()) for report in reports))

    def __add__(self, more: Work) -> Work:
        return Work(self.busy_s + more.busy_s, self.n_tokens + more.n_tokens)

    def __sub__(self, earlier: Work) -> Work:
        return Work(self.busy_s - earlier.busy_s, self.n_tokens - earlier.n_tokens)


def load_metrics(work: Sequence[Work], seconds: float) -> dict[str, float]:
    """Return how evenly the replicas were loaded, each with its work of so many `seconds`."""
    busy = [own.busy_s / seconds for own in work]
    tokens = [float(own.n_tokens) for own in work]
    return {
        "replica_busy/mean": sum(busy) / len(busy),
        "replica_busy/min": min(busy),
        "replica_tokens/min": min(tokens),
        "replica_tokens/max": max(tokens),
    }
