"""The decode loop over one wave of requests, which share a batch.

prompts ──prefill, each distinct prompt once──> logits ─┬─> choose a token ──> every few: stop? ──> rows that go on ─┐
                                                        └──────────────── one forward for all of them <──────────────┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fivefold.rollout.kv_cache import RowCache
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.sampling import choose_tokens, uniform_numbers
from fivefold.rollout.stopping import StopRule
from fivefold.types import Completion

_PREFILL_TOKENS = 16384
"""Most prompt tokens, padding included, in one forward; this bounds the activations of long prompts."""
_COMPACT_SHARE = 8
"""Finished rows leave the batch once they are 1/8 of it: copying the cache costs about as much as keeping them."""
_MOST_UNSEEN = 8
"""Most tokens that are sampled before the host asks which rows have ended, for which it waits for the device."""
_UNSEEN_SHARE = 16
"""The host also asks once 1/16 of a row's tokens are new, so that short completions have few tokens behind the end."""


@dataclass
class _Rows:
    """The rows of the batch, as tensors [B]. A finished row stays and is ignored until the next compaction."""

    request: Tensor
    """int64: index in the wave of the row's request."""
    position: Tensor
    """int64: position of the row's next token."""
    padding: Tensor | None
    """int64: number of masked columns at the left of the row; None: no row has any."""
    is_running: Tensor
    """bool: whether the row's completion goes on."""

    def select(self, rows: Tensor) -> _Rows:
        """Return the rows at the indices `rows`."""
        padding = None if self.padding is None else self.padding[rows]
        return _Rows(self.request[rows], self.position[rows], padding, self.is_running[rows])


class _Record:
    """The samples of the wave, by request: tokens and log-probs [N, T], lengths [N] (0 while running).

    A row may have some tokens behind its end, because the host asks for ends only every few tokens; `finished` cuts
    them off.
    """

    def __init__(self, n_requests: int, max_new_tokens: int, device: torch.device) -> None:
        self.tokens = torch.zeros(n_requests, max_new_tokens, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(n_requests, max_new_tokens, dtype=torch.float32, device=device)
        self.lengths = torch.zeros(n_requests, dtype=torch.int64, device=device)

    def finished(self, version: int) -> list[Completion]:
        """Return the completions, in the order of the requests. Their arrays share the memory of the wave's."""
        tokens, logprobs = self.tokens.to(torch.int32).cpu().numpy(), self.logprobs.cpu().numpy()
        return [
            Completion.of(row[: n or None], values[: n or None], "stop" if n else "length", version)
            for row, values, n in zip(tokens, logprobs, self.lengths.tolist(), strict=True)
        ]


def decode_wave(
    model: PreTrainedModel,
    requests: Sequence[GenerationRequest],
    sampling: SamplingParams,
    stop: StopRule,
    version: int,
) -> list[Completion]:
    """Answer all requests in one batch; the longest prompts come first, and equal prompts side by side.

    Args:
        model: the model.
        requests: the requests.
        sampling: how tokens are chosen.
        stop: when completions end.
        version: version of the model's weights.

    Raises:
        RuntimeError: logits that are not finite.
    """
    device = model.device
    lengths = torch.tensor([len(request.token_ids) for request in requests], device=device)
    prompt_length = len(requests[0].token_ids)
    rows = _Rows(
        request=torch.arange(len(requests), device=device),
        position=lengths,
        padding=prompt_length - lengths if len(requests[-1].token_ids) < prompt_length else None,
        is_running=torch.ones(len(requests), dtype=torch.bool, device=device),
    )
    cache = RowCache(len(requests), prompt_length)
    logits_BV = _prefill(model, cache, requests)
    uniforms = uniform_numbers([request.seed for request in requests], sampling.max_new_tokens).to(device)
    record = _Record(len(requests), sampling.max_new_tokens, device)
    n_seen = 0
    for step in range(sampling.max_new_tokens):
        tokens_B, logprobs_B = choose_tokens(logits_BV, uniforms[rows.request, step], sampling, stop.forbidden(step))
        record.tokens[rows.request, step] = tokens_B
        record.logprobs[rows.request, step] = logprobs_B
        is_last = step + 1 == sampling.max_new_tokens
        if is_last or step + 1 - n_seen >= min(_MOST_UNSEEN, 1 + step // _UNSEEN_SHARE):
            n_running = _end_rows(record, rows, stop, n_seen, step + 1)
            n_seen = step + 1
            if n_running == 0 or is_last:
                break
            rows, tokens_B = _compact(rows, tokens_B, n_running, cache)
        logits_BV = _forward_token(model, cache, rows, tokens_B)
    return record.finished(version)


def _end_rows(record: _Record, rows: _Rows, stop: StopRule, n_seen: int, length: int) -> int:
    """End the rows that a token between `n_seen` and `length` has ended; return how many go on."""
    n_new = length - n_seen
    tails_BW = record.tokens[rows.request, max(0, n_seen + 1 - stop.window) : length]
    ends_B = stop.ends(tails_BW, n_new, length) * rows.is_running
    record.lengths[rows.request] += ends_B
    rows.is_running &= ends_B == 0
    n_not_finite = (~record.logprobs[rows.request, n_seen:length].isfinite()).sum()
    # Both numbers come to the host in one transfer, for which it waits once.
    n_running, n_bad = torch.stack([rows.is_running.sum(), n_not_finite]).tolist()
    if n_bad:
        raise RuntimeError(
            "the rollout model gave logits that are not finite (NaN or infinite): its weights or activations have "
            "overflowed. Check the last update's gradient norm, or set rollout.dtype=float32"
        )
    return int(n_running)


def _prefill(model: PreTrainedModel, cache: RowCache, requests: Sequence[GenerationRequest]) -> Tensor:
    """Fill the cache with the prompts; return the logits [B, V] of the token after each prompt."""
    logits = []
    for start, stop, prompts, source in _prefill_batches(requests):
        source_B = torch.tensor(source, device=model.device)
        cache.begin_prompts(slice(start, stop), source_B)
        logits.append(_forward_prompts(model, cache, prompts)[source_B])
    return torch.cat(logits)


def _prefill_batches(
    requests: Sequence[GenerationRequest],
) -> Iterator[tuple[int, int, list[tuple[int, ...]], list[int]]]:
    """Yield (first row, row behind the last, distinct prompts, each row's index among them), in the order of rows."""
    start = 0
    prompts: list[tuple[int, ...]] = []
    source: list[int] = []
    for row, request in enumerate(requests):
        if not prompts or request.token_ids != prompts[-1]:
            if prompts and len(prompts[0]) * (len(prompts) + 1) > _PREFILL_TOKENS:
                yield start, row, prompts, source
                start, prompts, source = row, [], []
            prompts.append(request.token_ids)
        source.append(len(prompts) - 1)
    yield start, len(requests), prompts, source


def _forward_prompts(model: PreTrainedModel, cache: RowCache, prompts: list[tuple[int, ...]]) -> Tensor:
    """Return the logits [U, V] of the token after each of U distinct prompts."""
    width = len(prompts[0])
    padding_U1 = torch.tensor([[width - len(prompt)] for prompt in prompts], device=model.device)
    tokens_UP = torch.tensor([(0,) * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    columns_P = torch.arange(width, device=model.device)
    is_ragged = len(prompts[-1]) < width
    return _last_logits(
        model,
        cache,
        tokens_UP,
        (columns_P - padding_U1).clamp_(min=0),
        _prompt_mask(columns_P, padding_U1) if is_ragged else None,
    )


def _prompt_mask(columns_P: Tensor, padding_U1: Tensor) -> Tensor:
    """Return bool [U, 1, P, P]: causal, without padding. Padding sees itself, because a softmax over nothing is NaN."""
    is_token_UP = columns_P >= padding_U1
    is_past_PP = columns_P[:, None] >= columns_P
    is_self_PP = columns_P[:, None] == columns_P
    return ((is_past_PP & is_token_UP[:, None, :]) | is_self_PP).unsqueeze(1)


def _forward_token(model: PreTrainedModel, cache: RowCache, rows: _Rows, tokens_B: Tensor) -> Tensor:
    """Feed one token to every row; return the logits [B, V] of the next ones."""
    cache.begin_token()
    mask = None
    if rows.padding is not None:
        columns = torch.arange(cache.length, device=model.device)
        mask = (columns >= rows.padding[:, None])[:, None, None, :]
    logits_BV = _last_logits(model, cache, tokens_B[:, None], rows.position[:, None], mask)
    rows.position = rows.position + 1
    return logits_BV


def _last_logits(
    model: PreTrainedModel, cache: RowCache, tokens: Tensor, positions: Tensor, mask: Tensor | None
) -> Tensor:
    output = model(
        input_ids=tokens,
        position_ids=positions,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits[:, -1]
    return logits


def _compact(rows: _Rows, tokens_B: Tensor, n_running: int, cache: RowCache) -> tuple[_Rows, Tensor]:
    """Drop the finished rows from the batch and the cache, if there are enough of them."""
    n_finished = len(tokens_B) - n_running
    if n_finished * _COMPACT_SHARE < len(tokens_B):
        return rows, tokens_B
    running = rows.is_running.nonzero().squeeze(1)
    cache.keep(running)
    return rows.select(running), tokens_B[running]
