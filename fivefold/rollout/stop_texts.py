"""Stop texts: at which sampled token one of them is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopTexts:
    """Looks for stop texts in completions, with special tokens spelled out. The token that completes a text is kept."""

    def __init__(self, texts: tuple[str, ...], tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is None:
            raise ValueError(
                f"stop={list(texts)} needs a tokenizer to read the completions, and this engine has none: "
                "put the tokenizer's files next to the model, or use stop_token_ids"
            )
        self._texts = texts
        self._tokenizer = tokenizer
        # A token adds at least one byte of text, so a text that the last token completes lies within as many tokens as
        # it has bytes. One more token stands in front because the decoder trims a leading space.
        self.window = 1 + max(len(text.encode()) for text in texts)

    def hits(self, tails_BW: Tensor, n_new: int, n_exempt: int) -> Tensor:
        """Return bool [B, n_new]: which of the last `n_new` tokens complete a text. The first `n_exempt` never do."""
        tails = tails_BW.tolist()
        found = torch.zeros(len(tails), n_new, dtype=torch.bool)
        # Few tails hold a text at all, and only in those is its end searched for.
        for row, text in enumerate(self._decode(tails)):
            if any(stop in text for stop in self._texts):
                found[row] = torch.tensor(self._completing(tails[row], n_new))
        found[:, :n_exempt] = False
        return found.to(tails_BW.device)

    def _decode(self, tails: list[list[int]]) -> list[str]:
        return self._tokenizer.batch_decode(tails, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _completing(self, tail: list[int], n_new: int) -> list[bool]:
        """Return which of the last `n_new` tokens complete a text: with such a token, a text is found further right."""
        ends = range(len(tail) - n_new + 1, len(tail) + 1)
        starts = [max(0, end - self.window) for end in ends]
        with_it = self._decode([tail[start:end] for start, end in zip(starts, ends, strict=True)])
        without = self._decode([tail[start : end - 1] for start, end in zip(starts, ends, strict=True)])
        return [
            any(after.rfind(stop) > before.rfind(stop) for stop in self._texts)
            for after, before in zip(with_it, without, strict=True)
        ]
