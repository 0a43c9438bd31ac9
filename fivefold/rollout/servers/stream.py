"""Jobs that a server answers beside one another, for as long as its weights change.

    submit ─> asks ─> threads, one for each ask ─> answers ─> collect: jobs that are done
                 ^                                    └─ interrupted: tokens so far, with the version that sampled them
                 └── the prompt and the tokens so far, once the weights are new

Both servers keep no request over an update that has caches of other weights: they are told to abort, answer with what
they have, and are asked to go on from there. They read those tokens anew, which is what `recompute_kv_cache` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

import numpy as np

from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.servers.dialect import Answer, Ask
from fivefold.rollout.servers.room import asks_of
from fivefold.types import Completion

GRACE_S = 2.0
"""Seconds that answers may take to arrive after the server has aborted all of its requests."""

Complete = Callable[[Ask, SamplingParams], list[Answer]]


@dataclass(eq=False)
class _Part:
    """One completion: its request, and the answers to it so far."""

    job: int
    request: GenerationRequest
    answers: list[tuple[Answer, int]] = field(default_factory=list)
    """Answers with the versions of the weights that gave them; all but the last were aborted."""

    @property
    def n_tokens(self) -> int:
        return sum(len(answer.token_ids_T) for answer, _ in self.answers)

    def ask(self) -> Ask:
        """Return what to ask for, to go on from the tokens so far."""
        sampled = [int(token) for answer, _ in self.answers for token in answer.token_ids_T]
        # The same seed would draw the same random numbers again.
        seed = self.request.seed + len(sampled)
        return Ask((*self.request.token_ids, *sampled), 1, seed, self.request.wants_logprobs)

    def completion(self) -> Completion:
        """Return the whole completion; log-probs that were not asked for are NaN."""
        last, _ = self.answers[-1]
        assert last.finish_reason != "abort"
        tokens = [answer.token_ids_T for answer, _ in self.answers]
        logprobs = [
            np.full(len(answer.token_ids_T), np.nan, np.float32) if answer.logprobs_T is None else answer.logprobs_T
            for answer, _ in self.answers
        ]
        versions = [np.full(len(answer.token_ids_T), version, np.int32) for answer, version in self.answers]
        return Completion(
            np.concatenate(tokens), np.concatenate(logprobs), np.concatenate(versions), last.finish_reason
        )


@dataclass(eq=False)
class _Sent:
    """An ask on its way, for some completions."""

    ask: Ask
    sampling: SamplingParams
    parts: list[_Part]
    version: int


class ServerStream:
    """Jobs in progress on one server."""

    def __init__(self, complete: Complete, sampling: SamplingParams, *, most: int) -> None:
        """Begin without a job.

        Args:
            complete: asks the server, and returns its answers, some of which may be aborted.
            sampling: how tokens are chosen.
            most: most asks that are on their way at one time, and completions that one asks for.
        """
        self.sampling = sampling
        self._complete = complete
        self._most = most
        self._threads = ThreadPoolExecutor(most)
        self._jobs: dict[int, list[_Part]] = {}
        self._sent: dict[Future[list[Answer]], _Sent] = {}
        self._waiting: list[_Part] = []
        """Completions that were aborted, and go on at the next `collect`."""

    @property
    def n_running(self) -> int:
        """Number of jobs that are not done."""
        return len(self._jobs)

    def submit(self, number: int, requests: Sequence[GenerationRequest], version: int) -> None:
        """Ask for the completions of job `number`, from weights of version `version`."""
        parts = [_Part(number, request) for request in requests]
        self._jobs[number] = parts
        start = 0
        for ask in asks_of(requests, self.sampling, self._most):
            self._send(_Sent(ask, self.sampling, parts[start : start + ask.n], version))
            start += ask.n

    def collect(self, version: int, seconds: float) -> list[tuple[int, list[Completion]]]:
        """Ask on for what was aborted, and wait until a job is done, or `seconds` have passed. Returns what is done.

        Raises:
            RuntimeError: the server failed.
        """
        self._go_on(version)
        if not self._sent:
            return []
        answered, _ = wait(self._sent, seconds, FIRST_COMPLETED)
        for future in answered:
            self._note(self._sent.pop(future), future.result())
        done = [number for number, parts in self._jobs.items() if all(_is_whole(part) for part in parts)]
        return [(number, [part.completion() for part in self._jobs.pop(number)]) for number in done]

    def interrupted(self) -> None:
        """Take the answers of a server that has aborted all of its requests and holds back new ones.

        Asks that have not reached it yet are answered with the next weights.
        """
        for future in [future for future in self._sent if future.cancel()]:
            self._waiting += self._sent.pop(future).parts
        wait(self._sent, GRACE_S)

    def resumed(self, version: int) -> None:
        """Record that the server has weights of version `version`, and answers with them what it held back."""
        for future, sent in self._sent.items():
            if not future.done():
                sent.version = version

    def lose(self) -> list[int]:
        """Forget all jobs, whose server has died; return their numbers."""
        lost = list(self._jobs)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._threads = ThreadPoolExecutor(self._most)
        self._jobs, self._sent, self._waiting = {}, {}, []
        return lost

    def _send(self, sent: _Sent) -> None:
        self._sent[self._threads.submit(self._complete, sent.ask, sent.sampling)] = sent

    def _go_on(self, version: int) -> None:
        """Ask for the rest of each completion that was aborted."""
        waiting, self._waiting = self._waiting, []
        for part in waiting:
            n = part.n_tokens
            sampling = replace(
                self.sampling,
                max_new_tokens=self.sampling.max_new_tokens - n,
                min_new_tokens=max(0, self.sampling.min_new_tokens - n),
            )
            ask = part.ask()
            self._send(_Sent(ask if sampling.seeded else replace(ask, seed=None), sampling, [part], version))

    def _note(self, sent: _Sent, answers: Sequence[Answer]) -> None:
        for part, answer in zip(sent.parts, answers, strict=True):
            part.answers.append((answer, sent.version))
            if answer.finish_reason == "abort":
                self._waiting.append(part)


def _is_whole(part: _Part) -> bool:
    return bool(part.answers) and part.answers[-1][0].finish_reason != "abort"
