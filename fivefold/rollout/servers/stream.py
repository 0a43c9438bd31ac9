"""Requests that a server answers in parallel, while its weights may change.

    submit ─> requests wait ─> threads, one for each request ─> answers ─> collect: completions
                    ^                                              └─ interrupted: tokens so far, with their version
                    └── the prompt and the tokens so far, once the weights are new

When weights change, a server aborts its requests, answers with what it has, and is asked for the rest: it reads the
tokens so far again, with the new weights, as `recompute_kv_cache` says. With `recompute_kv_cache: false` it holds its
requests instead (`engine.py`), and an answer has the versions of its tokens.

Tokens arrive with an answer, and are lost with a server that dies before it. So a completion may be asked for in chunks
of at most so many tokens; the server then reads those before the chunk out of its cache of prefixes.

To the server, the tokens so far are a part of the prompt, in which it looks for no stop text. So texts that begin in
one answer and end in the next are looked for here, and what was sampled after them is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fivefold.rollout.protocol import Begun, GenerationRequest, SamplingParams
from fivefold.rollout.servers.dialect import Answer, AnswerEnd, Ask, AskedRoutes
from fivefold.rollout.stopping import StopRule
from fivefold.routes import padded_routes, route_dtype
from fivefold.types import Completion, FinishReason

GRACE_S = 2.0
"""Seconds that answers may take to arrive after the server has aborted all of its requests."""


@dataclass(eq=False)
class _Part:
    """One completion: its request, and the answers to it so far."""

    number: int
    request: GenerationRequest
    sampling: SamplingParams
    stop: StopRule
    asked_routes: AskedRoutes | None = None
    """None: the experts of tokens are not asked for."""
    answers: list[Begun] = field(default_factory=list)
    """What each answer has added; all but the last were aborted."""
    routes: list[npt.NDArray[Any]] = field(default_factory=list)
    """The experts of tokens from the prompt's first on, as the answers have told them: of each token those with which
    it was computed first."""

    def __post_init__(self) -> None:
        if self.request.begun is not None:  # what it has from another server
            self.answers.append(self.request.begun)

    @property
    def n_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def n_routes(self) -> int:
        """Tokens whose experts are known."""
        return sum(map(len, self.routes))

    @property
    def is_whole(self) -> bool:
        return bool(self.answers) and self.answers[-1].finish_reason is not None

    @property
    def sampled(self) -> list[int]:
        """The tokens so far."""
        return [int(token) for answer in self.answers for token in answer.token_ids]

    def ask(self) -> Ask:
        """Return what to ask for, to continue from the tokens so far."""
        sampled = self.sampled
        # The same seed would draw the same random numbers again.
        seed = self.request.seed + len(sampled) if self.sampling.seeded else None
        routes = self.asked_routes and replace(self.asked_routes, first=self.n_routes)
        return Ask((*self.request.token_ids, *sampled), seed, self.request.wants_logprobs, routes, self.request.images)

    def rest(self, most_tokens: int | None) -> SamplingParams:
        """Return how the next tokens are sampled, `most_tokens` of them at most."""
        n = self.n_tokens
        left = self.sampling.max_new_tokens - n
        most = left if most_tokens is None else min(most_tokens, left)
        least = min(most, max(0, self.sampling.min_new_tokens - n))
        return replace(self.sampling, max_new_tokens=most, min_new_tokens=least)

    def completion(self) -> Completion:
        """Return the whole completion; log-probs that were not asked for are NaN."""
        whole = Begun.joined(self.answers)
        assert whole.finish_reason is not None
        n_tokens = len(self.request.token_ids) + len(whole.token_ids)
        asked = self.asked_routes
        routes = None
        if asked is not None and self.routes:
            routes = padded_routes(self.routes, n_tokens, route_dtype(asked.n_experts))
        return Completion(whole.token_ids, whole.logprobs, whole.versions, whole.finish_reason, routes)

    def so_far(self) -> GenerationRequest:
        """Return the request with what its completion has so far."""
        return replace(self.request, begun=Begun.joined(self.answers) if self.answers else None)


@dataclass(eq=False)
class _Sent:
    """An ask on its way."""

    part: _Part
    version: int
    """Version of the weights that the server had when it was asked, or when it was interrupted last."""
    next_version: int | None = None
    """Version of the weights with which it has gone on since, without an answer; None: it has not."""
    has_arrived: bool = False
    """Whether the reply is there, though it may not have been read."""
    was_interrupted: bool = False

    def interrupt(self) -> None:
        """Record that the server is about to be interrupted. What it had held back before, it has by now."""
        self.was_interrupted = True
        if self.next_version is not None and not self.has_arrived:
            self.version, self.next_version = self.next_version, None

    def go_on(self, version: int) -> None:
        """Record that the interrupted server is about to continue, with weights of `version`."""
        if not self.has_arrived:
            self.next_version = version

    def _sampled_by(self, reason: AnswerEnd) -> int:
        """Return the version of the weights that sampled an answer which ended for `reason`.

        One that the interruption aborted may arrive long after it; one that the server had held back is not aborted.
        """
        return self.version if self.next_version is None or reason == "abort" else self.next_version

    def note(self, answer: Answer) -> None:
        """Add an answer to the completion.

        Raises:
            RuntimeError: the server has aborted it before its first token, without being interrupted.
        """
        if answer.finish_reason == "abort" and not len(answer.token_ids_T) and not self.was_interrupted:
            # It would do so again, for ever.
            raise RuntimeError(f"the server ended a completion with {answer.finish_reason!r}: it is not whole")
        most_tokens, stop = self.part.sampling.max_new_tokens, self.part.stop
        before, new, logprobs_T = self.part.sampled, answer.token_ids_T.tolist(), answer.logprobs_T
        n = _end_across(before, new, stop) or len(new)
        is_end = n < len(new) or answer.finish_reason == "stop"
        reason: FinishReason | None = "stop" if is_end else _reason_to_end([*before, *new], most_tokens, stop)
        versions_T = answer.versions_T
        if versions_T is None:
            versions_T = np.full(len(new), self._sampled_by(answer.finish_reason), np.int32)
        if answer.routes is not None:
            # What was sampled last is never fed to the model, nor is what is dropped.
            most_rows = len(self.part.request.token_ids) + len(before) + n - 1 - self.part.n_routes
            self.part.routes.append(answer.routes[:most_rows])
        self.part.answers.append(
            Begun(
                answer.token_ids_T[:n],
                np.full(n, np.nan, np.float32) if logprobs_T is None else logprobs_T[:n],
                versions_T[:n],
                reason,
            )
        )


def _reason_to_end(sampled: list[int], most_tokens: int, stop: StopRule) -> FinishReason | None:
    """Return why a completion ends with its last token so far, which the server has not noticed; None: it does not.

    SGLang samples one more token of what it aborts, and does not look at that, nor at the last one of a chunk.
    """
    if stop.has_ended(sampled):
        return "stop"
    return "length" if len(sampled) >= most_tokens else None


def _end_across(before: list[int], new: list[int], stop: StopRule) -> int:
    """Return the number of `new` tokens up to the one that ends a completion by a text that begins `before`; 0: none.

    The server itself has found the texts among the new tokens, which end with the last one.
    """
    # A text that begins before the new tokens ends with one of so many.
    n_new = min(len(new), stop.window - 1)
    if not before or not n_new:
        return 0
    tail = [*before[-(stop.window - 1) :], *new[:n_new]]
    length = int(stop.ends(torch.tensor([tail]), n_new, len(before) + n_new))
    return max(0, length - len(before))


class ServerStream:
    """Requests in progress on one server."""

    def __init__(
        self,
        send: Callable[[Ask, SamplingParams], bytes],
        read: Callable[[bytes, Ask], Answer],
        stop_rule: Callable[[SamplingParams], StopRule],
        *,
        most: int,
        most_tokens: int | None = None,
        routes: AskedRoutes | None = None,
    ) -> None:
        """Begin without a request.

        Args:
            send: asks the server, and returns its reply.
            read: returns the answer of a reply, which may be aborted.
            stop_rule: returns when completions of a sampling end.
            most: most asks that are on their way at one time.
            most_tokens: most tokens that are asked for at one time; None: all of a completion.
            routes: what is asked of the experts of tokens; None: nothing.
        """
        self._stop_rule = cache(stop_rule)
        self._send = send
        self._read = read
        self._reading = threading.Lock()
        """One reply is read at a time, so that the arrival of others is not late for it."""
        self._most = most
        self._most_tokens = most_tokens
        self._routes = routes
        self._threads = ThreadPoolExecutor(most)
        self._parts: dict[int, _Part] = {}
        """The completions that `collect` has not returned, by number."""
        self._sent: dict[Future[Answer], _Sent] = {}
        self._waiting: list[_Part] = []
        """Completions that have not begun or were aborted, and that the next `collect` asks for."""

    @property
    def n_running(self) -> int:
        """Number of requests that `collect` has not returned."""
        return len(self._parts)

    def submit(self, number: int, request: GenerationRequest, sampling: SamplingParams) -> None:
        """Take request `number`, which the next `collect` asks for."""
        self._parts[number] = part = _Part(number, request, sampling, self._stop_rule(sampling), self._routes)
        if not part.is_whole:
            self._waiting.append(part)

    def collect(self, version: int, seconds: float) -> list[tuple[int, Completion]]:
        """Ask for what waits, and wait until a request is answered, or `seconds` have passed.

        Returns:
            The completion of each request that is answered, with the request's number.

        Raises:
            RuntimeError: the server failed.
        """
        # What was aborted is noted before anything is asked for, because it goes before requests that have not begun.
        self.note_answers()
        self._go_on(version)
        if not (done := self._take_done()):
            wait(self._sent, seconds, FIRST_COMPLETED)
            self.note_answers()
            done = self._take_done()
            self._go_on(version)
        return done

    def hold(self) -> None:
        """Keep back what has not been asked for, so that it does not take the place of what is about to be aborted."""
        for future in [future for future in self._sent if future.cancel()]:
            self._waiting.append(self._sent.pop(future).part)
        for sent in self._sent.values():
            sent.interrupt()

    def interrupted(self) -> None:
        """Take the answers of a server that has aborted all of its requests and holds back new ones.

        Asks that have not reached it yet are answered once it continues.
        """
        wait(self._sent, GRACE_S)
        self._read_arrived()

    def _read_arrived(self) -> None:
        """Wait until the replies that are there have been read, which takes many long ones seconds."""
        wait([future for future, sent in self._sent.items() if sent.has_arrived])

    def resumed(self, version: int) -> None:
        """Record that an interrupted server is about to continue with what it held back, with weights of `version`."""
        for sent in self._sent.values():
            sent.go_on(version)

    def unfinished(self) -> dict[int, GenerationRequest]:
        """Return all requests with the tokens that have arrived."""
        return {number: part.so_far() for number, part in self._parts.items()}

    def lose(self) -> dict[int, GenerationRequest]:
        """Forget all requests, whose server has died; return them with the tokens that have arrived."""
        self._read_arrived()
        for future, sent in self._sent.items():
            if future.done() and not future.cancelled() and future.exception() is None:
                sent.note(future.result())
        lost = self.unfinished()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._threads = ThreadPoolExecutor(self._most)
        self._parts, self._sent, self._waiting = {}, {}, []
        return lost

    def _go_on(self, version: int) -> None:
        """Ask for the rest of each completion that waits, in the order of their numbers."""
        waiting, self._waiting = self._waiting, []
        for part in sorted(waiting, key=lambda part: part.number):
            sent = _Sent(part, version)
            self._sent[self._threads.submit(self._answer, sent, part.ask(), part.rest(self._most_tokens))] = sent

    def _answer(self, sent: _Sent, ask: Ask, sampling: SamplingParams) -> Answer:
        """Ask the server, in a thread of the pool."""
        reply = self._send(ask, sampling)
        sent.has_arrived = True
        with self._reading:
            return self._read(reply, ask)

    def note_answers(self) -> None:
        """Take over the answers that have come.

        Raises:
            RuntimeError: the server failed.
        """
        for future in [future for future in self._sent if future.done()]:
            sent = self._sent.pop(future)
            sent.note(future.result())
            if not sent.part.is_whole:
                self._waiting.append(sent.part)

    def _take_done(self) -> list[tuple[int, Completion]]:
        done = [part for part in self._parts.values() if part.is_whole]
        for part in done:
            del self._parts[part.number]
        return [(part.number, part.completion()) for part in done]
