"""Decides when a completion ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fivefold.rollout.protocol import SamplingParams
from fivefold.rollout.stop_texts import StopTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopRule:
    """Ends a completion after an end token or a stop token, or once its text contains a stop text.

    Nothing ends a completion before `min_new_tokens`: there, end and stop tokens are `forbidden`, and stop texts do not
    count. Completions need not be checked at every token: `ends` finds ends among several new tokens.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        end_token_ids: frozenset[int],
        tokenizer: PreTrainedTokenizerBase | None,
        device: torch.device,
    ) -> None:
        """Prepare the rule.

        Args:
            sampling: stop tokens, stop texts and the fewest tokens of a completion.
            end_token_ids: the model's own end-of-sequence tokens.
            tokenizer: decodes completions to look for stop texts; it may be None if there are no stop texts.
            device: device of the tokens.

        Raises:
            ValueError: stop texts without a tokenizer.
        """
        self._min_new_tokens = sampling.min_new_tokens
        self._ids = torch.tensor(sorted(end_token_ids | set(sampling.stop_token_ids)), dtype=torch.int64, device=device)
        self._texts = StopTexts(sampling.stop, tokenizer) if sampling.stop else None

    @property
    def window(self) -> int:
        """Number of last tokens that decide whether a completion ends with the very last one."""
        return 1 if self._texts is None else self._texts.window

    def forbidden(self, step: int) -> Tensor | None:
        """Return the token ids (int64) that must not be chosen as token number `step` (from 0); None: any may."""
        return self._ids if step < self._min_new_tokens and len(self._ids) else None

    def ends(self, tails_BW: Tensor, n_new: int, length: int) -> Tensor:
        """Return int64 [B]: the length at which each completion has ended; 0: it has not.

        Args:
            tails_BW: int64, the last `window` + `n_new` - 1 tokens of each completion, or all if there are fewer.
            n_new: number of last tokens that have not been checked yet.
            length: number of tokens of each completion.
        """
        hits_BN = torch.isin(tails_BW[:, -n_new:], self._ids)
        n_exempt = max(0, self._min_new_tokens - 1 - (length - n_new))
        if self._texts is not None and n_exempt < n_new:
            hits_BN |= self._texts.hits(tails_BW, n_new, n_exempt)
        first_B = hits_BN.int().argmax(dim=1)
        return torch.where(hits_BN.any(dim=1), length - n_new + 1 + first_B, 0)

    def has_ended(self, sampled: Sequence[int]) -> bool:
        """Return whether a completion ends with the last of its tokens."""
        tail = torch.tensor([sampled[-self.window :]], device=self._ids.device)
        return bool(sampled) and bool(self.ends(tail, 1, len(sampled)))
