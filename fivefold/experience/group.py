"""A group: the completions of one prompt, from their requests to their rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fivefold.observe.progress import Count
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.responses import Answer, Job
from fivefold.rollout.protocol import GenerationRequest, SamplingParams, group_requests
from fivefold.types import Prompt, Sample


@dataclass(eq=False)
class Group:
    """The completions of one prompt."""

    prompt: Prompt
    requests: Sequence[GenerationRequest]
    """One for each completion, with the tokens that it has already."""
    sampling: SamplingParams
    place: tuple[int, int] = (0, 0)
    """Step that trains the group, counted from 0, and place among the groups of the step: lower ones begin first."""
    answers: list[Answer] = field(default_factory=list)
    """What replicas have answered, each a part of the group."""
    values: list[dict[str, float]] | None = None
    """Rewards of each sample by name, except for rewards from a reward model; None: they are not computed."""
    rewarded: list[Sample] | None = None
    """The samples with all rewards; None: some are missing."""
    rewarded_at: float = 0.0
    """Time on `time.perf_counter` from which they are there."""
    count: Count = lambda n: None
    """Is called with the number of completions in each answer."""
    on_answered: Callable[[], None] = lambda: None
    """Is called when the last completion has ended."""

    @property
    def finished(self) -> list[Sample]:
        """The samples with all rewards, without those that failed."""
        return [sample for sample in self.rewarded or () if not sample.has_failed]

    @property
    def failures(self) -> list[str]:
        """What failed, of each sample that did, as far as the group is answered."""
        return [str(sample.transcript) for sample in self.samples if sample.has_failed]

    @property
    def n_answered(self) -> int:
        """Number of completions that have ended."""
        return sum(len(answer.samples) for answer in self.answers)

    @property
    def is_answered(self) -> bool:
        """Whether all completions have ended."""
        return self.n_answered == len(self.requests)

    @property
    def samples(self) -> list[Sample]:
        """The samples without rewards."""
        return [sample for answer in self.answers for sample in answer.samples]

    @property
    def batch(self) -> RemoteBatch:
        """The sequences of the samples, in the same order."""
        return RemoteBatch.joined([answer.batch for answer in self.answers])

    @property
    def finished_batch(self) -> RemoteBatch:
        """The sequences of `finished`, in the same order."""
        places = [place for place, sample in enumerate(self.samples) if not sample.has_failed]
        return self.batch if len(places) == len(self.requests) else self.batch.select(places)

    def is_whole(self, requests: Sequence[GenerationRequest]) -> bool:
        """Return whether there is a request for each completion, and not only for some that are played again."""
        return len(requests) == len(self.requests)

    def resume(self, job: Job) -> None:
        """Take the tokens over that the completions of a job have so far."""
        end = job.first + len(job.requests)
        self.requests = [*self.requests[: job.first], *job.requests, *self.requests[end:]]

    def add(self, answer: Answer) -> None:
        """Add a part of the group."""
        self.answers = sorted([*self.answers, answer], key=lambda part: part.first)
        self.count(len(answer.samples))


def groups_of(
    prompts: Sequence[Prompt], n_samples: int, sampling: SamplingParams, key: tuple[int | str, ...], step: int = 0
) -> list[Group]:
    """Return a group of `n_samples` completions for each prompt of a step; see `group_requests` for `key`."""
    requests = group_requests([prompt.token_ids for prompt in prompts], n_samples, key, sampling.logprob_share)
    return [
        Group(prompt, requests[row * n_samples : (row + 1) * n_samples], sampling, (step, row))
        for row, prompt in enumerate(prompts)
    ]
