"""The values of single tokens of the samples that a run logs: text, log-probs, advantages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from fivefold.observe.sample_parts import TokenValues
from fivefold.roles.remote_batch import RemoteBatch, read_columns

TRAINER = "old_logprobs"
REPLACEMENT = "\ufffd"
"""Stands in a token's text for bytes that are a part of a character."""
MOST_PARTS = 4
"""Most tokens that one character takes: its bytes in UTF-8."""


class TokenTexts:
    """Decodes single tokens, each of them once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[int, ...], str] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token; of a character that several tokens make, the first has it, the others none."""
        texts: list[str] = []
        while len(texts) < len(token_ids):
            texts += self._next(token_ids, len(texts))
        return texts

    def _next(self, token_ids: Sequence[int], start: int) -> list[str]:
        """Return the texts of the token at `start` and of those that make one character with it."""
        for length in range(1, min(MOST_PARTS, len(token_ids) - start) + 1):
            text = self._decoded(tuple(token_ids[start : start + length]))
            if REPLACEMENT not in text:
                return [text] + [""] * (length - 1)
        return [self._decoded((token_ids[start],))]

    def _decoded(self, token_ids: tuple[int, ...]) -> str:
        if token_ids not in self._known:
            [text] = self._tokenizer.batch_decode([list(token_ids)], clean_up_tokenization_spaces=False)
            self._known[token_ids] = text
        return self._known[token_ids]


def token_values(batch: RemoteBatch, n: int, texts: TokenTexts) -> list[TokenValues]:
    """Return the values of the sampled tokens of the first `n` sequences of a batch, before its update."""
    found = []
    for index, columns in enumerate(read_columns(batch, n)):
        mask = columns["mask"]
        advantages = columns.get("advantages")
        if advantages is None and "advantages" in batch.scalars:
            advantages = np.full(len(mask), batch.scalars["advantages"][index], np.float32)
        found.append(
            TokenValues(
                tokens=texts.of(columns["tokens"][mask].tolist()),
                rollout_logprobs=columns["rollout_logprobs"][mask],
                trainer_logprobs=_masked(columns.get(TRAINER), mask),
                advantages=_masked(advantages, mask),
                versions=columns["versions"][mask],
            )
        )
    return found


def _masked(values: npt.NDArray[np.float32] | None, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32] | None:
    return None if values is None else values[mask]
