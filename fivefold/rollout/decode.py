"""The decode loop. Requests that begin together are a wave; the rows of all waves share one batch and one cache.

prompts ──prefill, each distinct prompt once──> logits ─┬─> choose a token ──> every few: stop? ──> running rows ────┐
                                                        └──────────────── one forward for all of them <──────────────┘

    wave 1   p p p r r r r r r         rows are aligned at their last token, so that waves join at any time
    wave 2         p p r r r r
    wave 3             p p p p
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fivefold.rollout.forward import AfterPrompts, Tokens, forward_token, prefill, windows_of
from fivefold.rollout.kv_cache import RowCache
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.routes import RouteRecorder, WaveRoutes
from fivefold.rollout.sampling import choose_tokens, uniform_numbers
from fivefold.rollout.stopping import StopRule
from fivefold.types import Completion

if TYPE_CHECKING:
    from fivefold.rollout.vision import Images, Sight
    from fivefold.vision.tower import VisionTower

_COMPACT_SHARE = 8
"""Finished rows leave the batch once they are 1/8 of it: copying the cache costs about as much as keeping them."""
_MOST_UNSEEN = 8
"""Most tokens that are sampled before the host asks which rows have ended, for which it waits for the device."""
_UNSEEN_SHARE = 16
"""The host also asks once 1/16 of a row's tokens are new, so that short completions have few tokens behind the end."""


class Wave:
    """Requests that begin together; the longest prompts come first, and equal prompts side by side.

    Samples are kept by request, as [N, T]. A finished row stays in the batch and is ignored until the next compaction.
    It may have some tokens behind its end, because the host asks for ends only every few tokens.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParams,
        stop: StopRule,
        device: torch.device,
        *,
        records_routes: bool = False,
    ) -> None:
        """Begin without a token.

        Args:
            requests: the requests.
            sampling: how tokens are chosen.
            stop: when completions end.
            device: device of the model.
            records_routes: whether completions tell the experts of their tokens.
        """
        self.requests = requests
        self._sampling = sampling
        self._stop = stop
        n, most = len(requests), sampling.max_new_tokens
        self._uniforms = uniform_numbers([request.seed for request in requests], most).to(device)
        self._tokens = torch.zeros(n, most, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(n, most, dtype=torch.float32, device=device)
        self._lengths = torch.zeros(n, dtype=torch.int64, device=device)
        """Tokens of each completion; 0 while it is running."""
        self._versions: list[int] = []
        """Version of the weights that sampled each token, which all rows have in common."""
        self._seen: Tensor | None = None
        """bool [N, vocabulary]: the tokens that each request and its completion have; None: no penalty looks at it."""
        self._request_B = torch.arange(n, device=device)
        """int64: index of each row's request."""
        self._is_running_B = torch.ones(n, dtype=torch.bool, device=device)
        self._n_seen = 0
        self._open = set(range(n))
        """Indices of the requests whose completions `take_ended` has not returned."""
        self.n_rows = n
        self.n_running = n
        """Number of rows that were running when the host asked last."""
        self.position_B = torch.empty(0, dtype=torch.int64)
        """int64: position of each row's next token."""
        self.padding_B: Tensor | None = None
        """int64: number of masked columns at the left of each row; None: no row has any."""
        self.width = 0
        """Columns of the longest row."""
        self.logits_BV = torch.empty(0)
        """Logits of each row's next token."""
        self.version = 0
        """Version of the weights that computed `logits_BV`."""
        self.routes = WaveRoutes(n, most) if records_routes else None

    @property
    def length(self) -> int:
        """Number of tokens that were sampled for each row."""
        return len(self._versions)

    @property
    def is_done(self) -> bool:
        """Whether no row continues."""
        return self.n_running == 0 or self.length == self._sampling.max_new_tokens

    def sample(self) -> Tensor:
        """Choose the next token of each row; return them, int64 [B]."""
        step = self.length
        uniforms_B = self._uniforms[self._request_B, step]
        seen_BV = self._seen_tokens()
        forbidden = self._stop.forbidden(step)
        tokens_B, logprobs_B = choose_tokens(self.logits_BV, uniforms_B, self._sampling, forbidden, seen_BV)
        if self._seen is not None:
            self._seen[self._request_B, tokens_B] = True
        self._tokens[self._request_B, step] = tokens_B
        self._logprobs[self._request_B, step] = logprobs_B
        self._versions.append(self.version)
        return tokens_B

    def _seen_tokens(self) -> Tensor | None:
        """Return which tokens each row's prompt and completion have; None if there is no penalty on them."""
        if self._sampling.repetition_penalty == 1.0:
            return None
        if self._seen is None:
            self._seen = torch.zeros(len(self.requests), self.logits_BV.shape[1], dtype=torch.bool)
            for row_V, request in zip(self._seen, self.requests, strict=True):
                row_V[list(request.token_ids)] = True
            self._seen = self._seen.to(self.logits_BV.device)
        return self._seen[self._request_B]

    def record(self, routes_BLK: Tensor) -> None:
        """Keep the routes of the token that each row has sampled last."""
        assert self.routes is not None, "the wave was begun without routes"
        self.routes.add_sampled(self._request_B, self.length - 1, routes_BLK)

    def check(self) -> bool:
        """End the rows that their new tokens have ended, if it is time to ask for them. Returns whether it was.

        Raises:
            RuntimeError: logits that are not finite.
        """
        length = self.length
        n_new = length - self._n_seen
        is_last = length == self._sampling.max_new_tokens
        if not is_last and n_new < min(_MOST_UNSEEN, 1 + (length - 1) // _UNSEEN_SHARE):
            return False
        tails_BW = self._tokens[self._request_B, max(0, self._n_seen + 1 - self._stop.window) : length]
        ends_B = self._stop.ends(tails_BW, n_new, length) * self._is_running_B
        self._lengths[self._request_B] += ends_B
        self._is_running_B &= ends_B == 0
        n_not_finite = (~self._logprobs[self._request_B, self._n_seen : length].isfinite()).sum()
        # Both numbers come to the host in one transfer, for which it waits once.
        self.n_running, n_bad = torch.stack([self._is_running_B.sum(), n_not_finite]).tolist()
        if n_bad:
            raise RuntimeError(
                "the rollout model gave logits that are not finite (NaN or infinite): its weights or activations have "
                "overflowed. Check the last update's gradient norm, or set rollout.dtype=float32"
            )
        self._n_seen = length
        return True

    def running(self) -> Tensor:
        """Return the indices of the rows that continue, int64."""
        return self._is_running_B.nonzero().squeeze(1)

    def keep(self, rows: Tensor) -> None:
        """Drop all rows except those at the indices `rows`. Their logits have been used, or are computed again."""
        self._request_B, self._is_running_B = self._request_B[rows], self._is_running_B[rows]
        self.position_B = self.position_B[rows]
        self.padding_B = None if self.padding_B is None else self.padding_B[rows]
        self.n_rows = len(rows)

    def shift(self, columns: int) -> None:
        """Put `columns` masked columns in front of every row; a negative number takes away that many."""
        if columns:
            before_B = torch.zeros_like(self.position_B) if self.padding_B is None else self.padding_B
            self.padding_B = before_B + columns

    def sequences(self) -> list[Tokens]:
        """Return the tokens of each row: its prompt, and what was sampled."""
        sampled = self._tokens[self._request_B, : self.length].tolist()
        prompts = [self.requests[index].token_ids for index in self._request_B.tolist()]
        return [(*prompt, *tokens) for prompt, tokens in zip(prompts, sampled, strict=True)]

    @property
    def images(self) -> list[Images]:
        """The images of each row, all of them in its prompt."""
        return [self.requests[index].images for index in self._request_B.tolist()]

    @property
    def is_taken(self) -> bool:
        """Whether `take_ended` has returned all completions."""
        return not self._open

    def take_ended(self) -> dict[int, Completion]:
        """Return the completions that have ended since the last call, by the index of their request."""
        # At the limit, those end too that no token has ended.
        at_limit = self.length == self._sampling.max_new_tokens
        lengths = self._lengths.tolist()
        ended = sorted(index for index in self._open if lengths[index] or at_limit)
        self._open.difference_update(ended)
        return dict(zip(ended, self._completions(ended), strict=True)) if ended else {}

    def _completions(self, rows: Sequence[int]) -> list[Completion]:
        tokens = self._tokens[rows].to(torch.int32).cpu().numpy()
        logprobs = self._logprobs[rows].cpu().numpy()
        versions = np.array(self._versions, dtype=np.int32)
        return [
            Completion(
                row[: n or None],
                values[: n or None],
                versions[: n or None],
                "stop" if n else "length",
                None if self.routes is None else self.routes.of(index, n or self.length),
            )
            for index, row, values, n in zip(rows, tokens, logprobs, self._lengths[rows].tolist(), strict=True)
        ]


class Decoder:
    """The waves in progress, and their cache."""

    def __init__(
        self, model: PreTrainedModel, recorder: RouteRecorder | None = None, tower: VisionTower | None = None
    ) -> None:
        """Begin without a wave. With a `recorder`, waves record the routes of their tokens; `tower` sees images."""
        self._model = model
        self._tower = tower
        self._recorder = recorder
        self._cache: RowCache | None = None
        self.waves: list[Wave] = []

    @property
    def n_rows(self) -> int:
        """Rows of the batch, those included that have ended since the last compaction."""
        return sum(wave.n_rows for wave in self.waves)

    def begin(self, wave: Wave, version: int) -> None:
        """Compute the prompts of a wave with weights of version `version`, and let its rows join the batch."""
        cache = self._filled(wave, version)
        if self._cache is not None and self.waves:
            shift = cache.length - self._cache.length
            for other in self.waves:
                other.shift(max(0, shift))
            wave.shift(max(0, -shift))
            self._cache.join(cache)
        else:
            self._cache = cache
        self.waves.append(wave)

    def forget(self) -> None:
        """Drop keys, values and logits of all rows; `recompute` brings them back."""
        self._cache = None
        for wave in self.waves:
            wave.logits_BV = wave.logits_BV.new_empty(0)

    def recompute(self, version: int) -> None:
        """Compute keys, values and logits of all rows again, with weights of version `version`."""
        self._cache = None
        waves, self.waves = self.waves, []
        for wave in waves:
            wave.keep(wave.running())
            wave.padding_B = None
            self.begin(wave, version)

    def step(self, version: int) -> list[Wave]:
        """Sample a token in every row, and compute the logits of the next ones with weights of version `version`.

        Returns:
            The waves some of whose completions may have ended. Those that are done leave the batch.

        Raises:
            RuntimeError: logits that are not finite.
        """
        tokens = [wave.sample() for wave in self.waves]
        checked = [wave for wave in self.waves if wave.check()]
        if checked:
            tokens = self._compact(tokens)
        if self.waves:
            self._forward(torch.cat(tokens) if len(tokens) > 1 else tokens[0], version)
        return checked

    def _filled(self, wave: Wave, version: int) -> RowCache:
        """Compute what the rows of a wave have so far; return its keys and values."""
        sequences = wave.sequences()
        longest = max(map(len, sequences))
        cache = RowCache(len(sequences), longest, windows_of(self._model.config))
        images = wave.images if any(request.images for request in wave.requests) else []
        sight = self._sight(images) if images else None
        wave.logits_BV = prefill(self._model, cache, sequences, self._recording(wave), sight)
        lengths_B = torch.tensor([len(sequence) for sequence in sequences], device=self._model.device)
        wave.position_B = lengths_B if sight is None else lengths_B - sight.saved.to(lengths_B.device)
        wave.padding_B = longest - lengths_B if len(sequences[-1]) < longest else None
        wave.width, wave.version = longest, version
        return cache

    def _sight(self, images: list[Images]) -> Sight:
        from fivefold.rollout.vision import Sight  # by requests that have images

        assert self._tower is not None, "this model sees no images"
        return Sight(self._tower, images)

    def _recording(self, wave: Wave) -> AfterPrompts | None:
        """Return what keeps the routes of a wave's prompts; where they are computed again, the first ones stay."""
        recorder, routes = self._recorder, wave.routes
        if recorder is None or routes is None:
            return None
        is_first = not routes.has_prompts

        def keep(start: int, prompts: list[Tokens], source: list[int]) -> None:
            taken = recorder.take().unflatten(0, (len(prompts), -1))
            if is_first:
                routes.add_prompts(start, taken, [len(prompt) for prompt in prompts], source)

        return keep

    def _compact(self, tokens: list[Tensor]) -> list[Tensor]:
        """Drop waves that are done, and the finished rows of the others if there are enough of them."""
        assert self._cache is not None
        n_rows = self.n_rows
        n_finished = n_rows - sum(wave.n_running for wave in self.waves if not wave.is_done)
        none_is_done = not any(wave.is_done for wave in self.waves)
        if none_is_done and n_finished * _COMPACT_SHARE < n_rows:
            return tokens
        kept, kept_tokens, start = [], [], 0
        for wave, tokens_B in zip(self.waves, tokens, strict=True):
            if not wave.is_done:
                rows = wave.running()
                kept.append(start + rows)
                kept_tokens.append(tokens_B[rows])
            start += wave.n_rows
            if not wave.is_done:
                wave.keep(rows)
        self.waves = [wave for wave in self.waves if not wave.is_done]
        if not self.waves:
            self._cache = None
            return []
        self._cache.keep(torch.cat(kept) if len(kept) > 1 else kept[0])
        if unused := self._cache.length - max(wave.width for wave in self.waves):
            self._cache.cut_left(unused)
            for wave in self.waves:
                wave.shift(-unused)
        return kept_tokens

    def _forward(self, tokens_B: Tensor, version: int) -> None:
        assert self._cache is not None
        position_B = _joined([wave.position_B for wave in self.waves])
        padding_B = None
        if any(wave.padding_B is not None for wave in self.waves):
            padding_B = _joined(
                [torch.zeros_like(w.position_B) if w.padding_B is None else w.padding_B for w in self.waves]
            )
        logits_BV = forward_token(self._model, self._cache, tokens_B, position_B, padding_B)
        routes_BLK = None if self._recorder is None else self._recorder.take()
        start = 0
        for wave in self.waves:
            if routes_BLK is not None:
                wave.record(routes_BLK[start : start + wave.n_rows])
            wave.logits_BV = logits_BV[start : start + wave.n_rows]
            wave.position_B = wave.position_B + 1
            wave.width += 1
            wave.version = version
            start += wave.n_rows


def _joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]
