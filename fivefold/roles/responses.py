"""What travels between the driver and the replicas: jobs there, reports on their completions back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from fivefold.batch import cuts_of
from fivefold.cluster.group import Remote
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.rollout.protocol import GenerationRequest, SamplingParams, ServerCounts
from fivefold.types import NOT_SAMPLED, Cuts, Effort, Episode, Move, Prompt, Sample, StopReason


@dataclass(frozen=True)
class Job:
    """Episodes of one prompt that one replica plays."""

    number: int
    """Identifies the job in its stream. Parts of a group on several replicas share it."""
    prompt: Prompt
    requests: Sequence[GenerationRequest]
    """The first request of each episode."""
    sampling: SamplingParams
    first: int = 0
    """Index of the first request in the prompt's group."""
    retries: int = 0
    """Times that its episodes may be played again whose environment fails."""
    failed_on: int | None = None
    """The replica on which they have failed."""

    def part(self, start: int, end: int) -> Job:
        """Return a job of the requests from `start` to `end`."""
        return replace(self, requests=self.requests[start:end], first=self.first + start)


@dataclass(frozen=True, eq=False)
class Answer:
    """The samples of one job, without rewards."""

    number: int
    """The job's number."""
    first: int
    """Index of the first sample in its group."""
    samples: list[Sample]
    batch: RemoteBatch
    """The same sequences, in the same order."""

    def part(self, start: int, end: int) -> Answer:
        """Return the samples from `start` to `end`."""
        return Answer(self.number, self.first + start, self.samples[start:end], self.batch.select(range(start, end)))


@dataclass(frozen=True, eq=False)
class Responses:
    """What a replica reports of its N episodes to the driver, job by job."""

    jobs: list[int]
    """Numbers of the jobs, all of whose episodes have ended."""
    texts: list[str]
    """The sampled tokens of each episode, decoded without special tokens."""
    finish_reasons: list[StopReason]
    lengths_N: npt.NDArray[np.int64]
    """Tokens of each episode."""
    sampled_N: npt.NDArray[np.int64]
    """Tokens of each episode that the policy sampled."""
    versions_N2: npt.NDArray[np.int64]
    """Oldest and newest version of the weights that sampled each episode."""
    rewards: list[Mapping[str, float]]
    """Rewards by name that each episode's environment gave."""
    turns: list[int]
    """Completions of each episode."""
    transcripts: list[str | None]
    """What logs show of each episode of several turns."""
    moves: list[Sequence[Move]]
    """The moves of each episode of several turns."""
    efforts: list[Effort]
    """What each episode took."""
    cuts: Cuts | None
    """Tokens of each sequence of each episode; None: each episode is one sequence."""
    busy_s: float
    """Seconds of work since the report before."""
    waited_s: float = 0.0
    """Seconds among them in which all of its episodes waited for their environments, and none for the engine."""
    n_running: int = 0
    """Episodes that the replica has begun and that have not ended."""
    lost: Mapping[int, Sequence[GenerationRequest]] = field(default_factory=dict)
    """Jobs that were lost with their server, by number: requests with their tokens so far."""
    has_weights: bool = True
    """Whether the replica may get further jobs before the next weights."""
    restarts: Sequence[str] = ()
    """Why its server was started again since the report before."""
    counts: ServerCounts = field(default_factory=ServerCounts)
    """What its server has counted since the report before."""

    @staticmethod
    def of(
        jobs: Sequence[int],
        episodes: Sequence[Episode],
        texts: list[str],
        busy_s: float = 0.0,
        transcripts: list[str | None] | None = None,
    ) -> Responses:
        """Return the report of `episodes`, whose sampled tokens decode to `texts`."""
        sampled = [episode.sampled_versions for episode in episodes]
        return Responses(
            jobs=list(jobs),
            texts=texts,
            finish_reasons=[episode.finish_reason for episode in episodes],
            lengths_N=np.array([episode.n_tokens for episode in episodes], dtype=np.int64),
            sampled_N=np.array([len(versions) for versions in sampled], dtype=np.int64),
            versions_N2=np.array([_span(versions) for versions in sampled], dtype=np.int64).reshape(-1, 2),
            rewards=[episode.rewards for episode in episodes],
            turns=[episode.n_turns for episode in episodes],
            transcripts=transcripts or [None] * len(episodes),
            moves=[episode.moves for episode in episodes],
            efforts=[episode.effort for episode in episodes],
            cuts=cuts_of(episodes),
            busy_s=busy_s,
        )


def _span(versions: npt.NDArray[np.int32]) -> tuple[int, int]:
    """Return the oldest and the newest of the versions; `NOT_SAMPLED` twice if nothing was sampled."""
    return (int(versions.min()), int(versions.max())) if len(versions) else (NOT_SAMPLED, NOT_SAMPLED)


def answers_of(jobs: Sequence[Job], report: Responses, columns: Remote) -> list[Answer]:
    """Return the answers of one report.

    Args:
        jobs: the jobs that the report names, in its order.
        report: a replica's report.
        columns: the reference to the columns of its episodes.
    """
    lengths, sampled, versions = (
        values.tolist() for values in (report.lengths_N, report.sampled_N, report.versions_N2)
    )
    n_sequences_N = [1] * len(lengths) if report.cuts is None else [len(row) for row in report.cuts]
    answers, start = [], 0
    for job in jobs:
        end = start + len(job.requests)
        own = slice(start, end)
        samples = [
            Sample(
                job.prompt,
                report.texts[index],
                report.finish_reasons[index],
                lengths[index],
                sampled[index],
                (oldest, newest),
                report.rewards[index],
                n_turns=report.turns[index],
                n_sequences=n_sequences_N[index],
                transcript=report.transcripts[index],
                moves=report.moves[index],
                effort=report.efforts[index],
            )
            for index, (oldest, newest) in enumerate(versions[own], start)
        ]
        place_N = np.full(len(report.texts), -1)
        place_N[own] = np.arange(end - start)
        batch = RemoteBatch(
            report.lengths_N[own],
            report.sampled_N[own],
            (Piece(columns, place_N),),
            cuts=None if report.cuts is None else report.cuts[own],
        )
        answers.append(Answer(job.number, job.first, samples, batch))
        start = end
    return answers


@dataclass(frozen=True)
class Work:
    """What one replica has done."""

    busy_s: float = 0.0
    """Seconds that it has worked."""
    waited_s: float = 0.0
    """Seconds among them in which all of its episodes waited for their environments."""
    n_tokens: int = 0
    """Tokens that it has sampled."""
    counts: ServerCounts = field(default_factory=ServerCounts)
    """What its server has counted."""

    @staticmethod
    def of(report: Responses) -> Work:
        """Return the work that a replica reports."""
        return Work(report.busy_s, report.waited_s, int(report.sampled_N.sum()), report.counts)

    def __add__(self, more: Work) -> Work:
        return Work(
            self.busy_s + more.busy_s,
            self.waited_s + more.waited_s,
            self.n_tokens + more.n_tokens,
            self.counts + more.counts,
        )

    def __sub__(self, earlier: Work) -> Work:
        return Work(
            self.busy_s - earlier.busy_s,
            self.waited_s - earlier.waited_s,
            self.n_tokens - earlier.n_tokens,
            self.counts - earlier.counts,
        )


def load_metrics(work: Sequence[Work], seconds: float) -> dict[str, float]:
    """Return how evenly the replicas were loaded, each with its work of so many `seconds`, and what servers counted."""
    busy = [own.busy_s / seconds for own in work]
    tokens = [float(own.n_tokens) for own in work]
    counts = sum((own.counts for own in work), ServerCounts())
    accepted = {"draft_acceptance": counts.accepted / counts.drafted} if counts.drafted else {}
    waited = sum(own.waited_s for own in work) / seconds / len(work)
    cached = {"prefix_cache_hits": counts.cached / counts.prompt} if counts.prompt else {}
    return {
        **accepted,
        **cached,
        **({"environment_wait": waited} if waited else {}),
        "replica_busy/mean": sum(busy) / len(busy),
        "replica_busy/min": min(busy),
        "replica_tokens/min": min(tokens),
        "replica_tokens/max": max(tokens),
    }
