"""Jobs that the embedded engine answers beside one another, for as long as its weights change.

submit ─> requests wait ─> a wave of them joins the batch when rows are free ─> tokens ─> collect: jobs that are done
                                     new weights ─> keys and values are kept, or computed anew ─┘
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, takewhile

import torch
from transformers import PreTrainedModel

from fivefold.rollout.attention import rollout_kernels
from fivefold.rollout.decode import Decoder, Wave
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.stopping import StopRule
from fivefold.types import Completion

_JOIN_SHARE = 8
"""Requests join the batch once 1/8 of its rows are free: to compute prompts and copy the cache has a price."""


@dataclass
class _Job:
    requests: Sequence[GenerationRequest]
    sampling: SamplingParams
    done: dict[int, Completion] = field(default_factory=dict)
    """Completions by the index of their request."""

    @property
    def is_done(self) -> bool:
        return len(self.done) == len(self.requests)


@dataclass
class _Begun:
    """A wave with, for each of its requests, its job and its index there."""

    wave: Wave
    places: list[tuple[int, int]]


class EmbeddedStream:
    """Jobs in progress on one model. Completions carry, for each token, the version that sampled it."""

    def __init__(
        self,
        model: PreTrainedModel,
        stop_rule: Callable[[SamplingParams], StopRule],
        *,
        max_rows: int,
        recomputes: bool,
    ) -> None:
        """Begin without a job.

        Args:
            model: the model, whose weights may change between calls.
            stop_rule: returns when completions of a sampling end.
            max_rows: most rows that are decoded at one time.
            recomputes: whether new weights compute the keys and values of all tokens again; otherwise rows continue
                with those of the weights before.
        """
        self._model = model
        self._stop_rule = cache(stop_rule)
        self._max_rows = max_rows
        self._recomputes = recomputes
        self._decoder = Decoder(model)
        self._version: int | None = None
        """Version of the weights that computed the cache; None: it has been forgotten."""
        self._jobs: dict[int, _Job] = {}
        self._waiting: deque[tuple[int, int]] = deque()
        """Job and index of the requests that have not begun."""
        self._begun: list[_Begun] = []

    @property
    def n_running(self) -> int:
        """Number of requests that are not answered."""
        return sum(len(job.requests) - len(job.done) for job in self._jobs.values())

    def submit(self, number: int, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> None:
        """Begin to answer the requests of job `number` when rows are free."""
        self._stop_rule(sampling)  # it may refuse the sampling
        self._jobs[number] = _Job(requests, sampling)
        self._waiting += ((number, index) for index in range(len(requests)))

    def forget(self) -> None:
        """Free the keys and values of all rows, which the next `collect` computes anew."""
        self._decoder.forget()
        self._version = None

    def collect(self, version: int, seconds: float) -> list[tuple[int, list[Completion]]]:
        """Go on with weights of version `version` until a job is done, or about `seconds` have passed.

        Returns:
            Each job that is done, by its number, with its completions in the order of the requests.

        Raises:
            RuntimeError: logits that are not finite.
        """
        deadline = time.monotonic() + seconds
        done: list[tuple[int, list[Completion]]] = []
        with torch.inference_mode(), rollout_kernels():
            if self._begun and self._version != version and (self._recomputes or self._version is None):
                self._decoder.recompute(version)
            self._version = version
            while self._jobs and not done and time.monotonic() < deadline:
                self._join(version)
                checked = self._decoder.step(version)
                for begun in self._begun if checked else ():
                    self._note(begun)
                self._begun = [begun for begun in self._begun if not begun.wave.is_taken]
                done = self._take_done()
        return done

    def _join(self, version: int) -> None:
        """Let waiting requests join the batch if enough of its rows are free, or if it would be empty."""
        free = self._max_rows - self._decoder.n_rows
        if not self._waiting or (free < min(len(self._waiting), max(1, self._max_rows // _JOIN_SHARE))):
            return
        sampling = self._jobs[self._waiting[0][0]].sampling
        alike = takewhile(lambda place: self._jobs[place[0]].sampling == sampling, islice(self._waiting, free))
        places = [self._waiting.popleft() for _ in list(alike)]
        asked = [(self._jobs[number].requests[index], (number, index)) for number, index in places]
        # Long prompts first, so that memory runs out at once or never; equal ones side by side, so that each is
        # computed once.
        asked.sort(key=lambda pair: (-len(pair[0].token_ids), pair[0].token_ids))
        wave = Wave([request for request, _ in asked], sampling, self._stop_rule(sampling), self._model.device)
        self._decoder.begin(wave, version)
        self._begun.append(_Begun(wave, [place for _, place in asked]))

    def _note(self, begun: _Begun) -> None:
        """Take over the completions of a wave that have ended."""
        for index, completion in begun.wave.take_ended().items():
            number, place = begun.places[index]
            self._jobs[number].done[place] = completion

    def _take_done(self) -> list[tuple[int, list[Completion]]]:
        numbers = [number for number, job in self._jobs.items() if job.is_done]
        jobs = [(number, self._jobs.pop(number)) for number in numbers]
        return [(number, [job.done[index] for index in range(len(job.requests))]) for number, job in jobs]
