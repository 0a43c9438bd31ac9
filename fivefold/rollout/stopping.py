"""When a completion ends."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fivefold.rollout.protocol import SamplingParams


class StopRule:
    """Ends a completion after an end token or a stop token, or once its text contains a stop text.

    Nothing stops a completion before `min_new_tokens`: end and stop tokens are `forbidden` there, and stop texts are
    not looked for.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        end_token_ids: frozenset[int],
        tokenizer: PreTrainedTokenizerBase | None,
        device: torch.device,
    ) -> None:
        self._min_new_tokens = sampling.min_new_tokens
        self._ids = torch.tensor(sorted(end_token_ids | set(sampling.stop_token_ids)), dtype=torch.int64, device=device)
        self._texts = _StopTexts(sampling.stop, tokenizer) if sampling.stop else None

    @property
    def window(self) -> int:
        """How many of a completion's last tokens `hits` needs to see."""
        return 1 if self._texts is None else self._texts.window

    def forbidden(self, step: int) -> Tensor | None:
        """Token ids that must not be chosen as the completion's token number `step` (from 0)."""
        return self._ids if step < self._min_new_tokens and len(self._ids) else None

    def hits(self, tails_BW: Tensor, step: int) -> Tensor:
        """bool [B]: which completions end with token number `step`.

        Args:
            tails_BW: int64, the last `window` tokens of each completion, or all of them if there are fewer.
        """
        hits_B = torch.isin(tails_BW[:, -1], self._ids)
        if self._texts is None or step + 1 < self._min_new_tokens:
            return hits_B
        return hits_B | self._texts.hits(tails_BW)


class _StopTexts:
    """Looks for stop texts in the completion alone, special tokens spelled out. The token that completes one stays."""

    def __init__(self, texts: tuple[str, ...], tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is None:
            raise ValueError(
                f"stop={list(texts)} needs a tokenizer to read the completions, and this engine has none: "
                "put the tokenizer's files beside the model, or use stop_token_ids"
            )
        self._texts = texts
        self._tokenizer = tokenizer
        # A token adds at least one byte of text, so a text that the newest token completes lies within as many tokens
        # as it has bytes. One more in front takes the decoder's trimming of a leading space.
        self.window = 1 + max(len(text.encode()) for text in texts)

    def hits(self, tails_BW: Tensor) -> Tensor:
        tails = self._tokenizer.batch_decode(
            tails_BW.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        found = [any(text in tail for text in self._texts) for tail in tails]
        return torch.tensor(found, device=tails_BW.device)
