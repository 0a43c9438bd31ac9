"""Requests that the embedded engine answers in parallel, while its weights may change.

submit ─> requests wait ─> a wave of them joins the batch when rows are free ─> tokens ─> collect: completions
                                    new weights ─> keys and values are kept, or computed again ─┘
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice, takewhile
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from fivefold.rollout.decode import Decoder, Wave
from fivefold.rollout.forward import rollout_kernels
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.routes import RouteRecorder
from fivefold.rollout.stopping import StopRule
from fivefold.types import Completion

if TYPE_CHECKING:
    from fivefold.vision.tower import VisionTower

_JOIN_SHARE = 8
"""Requests join the batch once 1/8 of its rows are free: to compute prompts and copy the cache has a price."""


@dataclass
class _Begun:
    """A wave, with the number of each of its requests."""

    wave: Wave
    numbers: list[int]


class EmbeddedStream:
    """Requests in progress on one model. Completions carry, for each token, the version that sampled it."""

    def __init__(
        self,
        model: PreTrainedModel,
        stop_rule: Callable[[SamplingParams], StopRule],
        *,
        max_rows: int,
        recomputes: bool,
        recorder: RouteRecorder | None = None,
        tower: VisionTower | None = None,
    ) -> None:
        """Begin without a request.

        Args:
            model: the model, whose weights may change between calls.
            stop_rule: returns when completions of a sampling end.
            max_rows: most rows that are decoded at one time.
            recomputes: whether new weights compute the keys and values of all tokens again; otherwise rows continue
                with the keys and values of the weights before.
            recorder: records the experts of tokens; None: completions do not tell them.
            tower: sees the images of prompts; None: the model reads text alone.
        """
        self._model = model
        self._stop_rule = cache(stop_rule)
        self._max_rows = max_rows
        self._recomputes = recomputes
        self._records_routes = recorder is not None
        self._decoder = Decoder(model, recorder, tower)
        self._version: int | None = None
        """Version of the weights that computed the cache; None: it has been forgotten."""
        self._open: dict[int, tuple[GenerationRequest, SamplingParams]] = {}
        """The requests that are not answered, by number."""
        self._waiting: deque[int] = deque()
        """Numbers of the requests among them that have not begun."""
        self._begun: list[_Begun] = []

    @property
    def n_running(self) -> int:
        """Number of requests that are not answered."""
        return len(self._open)

    def submit(self, number: int, request: GenerationRequest, sampling: SamplingParams) -> None:
        """Begin to answer request `number` when rows are free."""
        self._stop_rule(sampling)  # it may refuse the sampling
        self._open[number] = request, sampling
        self._waiting.append(number)

    def forget(self) -> None:
        """Free the keys and values of all rows, which the next `collect` computes again."""
        self._decoder.forget()
        self._version = None

    def collect(self, version: int, seconds: float) -> list[tuple[int, Completion]]:
        """Decode with weights of version `version` until a request is answered, or about `seconds` have passed.

        Returns:
            The completions of the requests that are answered, in the order of their numbers.

        Raises:
            RuntimeError: logits that are not finite.
        """
        deadline = time.monotonic() + seconds
        done: list[tuple[int, Completion]] = []
        with torch.inference_mode(), rollout_kernels():
            if self._begun and self._version != version and (self._recomputes or self._version is None):
                self._decoder.recompute(version)
            self._version = version
            while self._open and not done and time.monotonic() < deadline:
                self._join(version)
                if self._decoder.step(version):
                    done = self._take_ended()
        return done

    def _join(self, version: int) -> None:
        """Let waiting requests join the batch if enough of its rows are free, or if it would be empty."""
        free = self._max_rows - self._decoder.n_rows
        if not self._waiting or (free < min(len(self._waiting), max(1, self._max_rows // _JOIN_SHARE))):
            return
        _, sampling = self._open[self._waiting[0]]
        alike = takewhile(lambda number: self._open[number][1] == sampling, islice(self._waiting, free))
        asked = [(number, self._open[number][0]) for number in alike]
        for _ in asked:
            self._waiting.popleft()
        # Long prompts first, so that memory runs out at once or never; equal ones side by side, so that each is
        # computed once.
        asked.sort(key=lambda pair: (-len(pair[1].token_ids), pair[1].key))
        requests, stop = [request for _, request in asked], self._stop_rule(sampling)
        wave = Wave(requests, sampling, stop, self._model.device, records_routes=self._records_routes)
        self._decoder.begin(wave, version)
        self._begun.append(_Begun(wave, [number for number, _ in asked]))

    def _take_ended(self) -> list[tuple[int, Completion]]:
        """Return the completions that have ended, in the order of their numbers."""
        done = [
            (begun.numbers[index], completion)
            for begun in self._begun
            for index, completion in begun.wave.take_ended().items()
        ]
        self._begun = [begun for begun in self._begun if not begun.wave.is_taken]
        for number, _ in done:
            del self._open[number]
        return sorted(done, key=lambda pair: pair[0])
