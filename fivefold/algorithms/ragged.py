"""Sums and means over the sequences of a ragged batch: sequences laid end to end, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sequences:
    """S sequences of T tokens in all, some of which are trained."""

    mask_T: torch.Tensor
    """Floating point [T]: 1 on trained tokens, else 0."""
    sequence_T: torch.Tensor
    """int64 [T]: the sequence that each token belongs to, numbered from 0."""
    n: int
    """S, the number of sequences."""

    @staticmethod
    def of(mask_T: torch.Tensor, lengths: Sequence[int]) -> Sequences:
        """Return the sequences whose numbers of tokens are `lengths`, which sum to T."""
        lengths_S = torch.tensor(lengths, dtype=torch.int64, device=mask_T.device)
        numbers_S = torch.arange(len(lengths), device=mask_T.device)
        return Sequences(
            mask_T, torch.repeat_interleave(numbers_S, lengths_S, output_size=mask_T.numel()), len(lengths)
        )

    def sum(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return [S]: the sum of the values on each sequence's trained tokens; those of others must be finite."""
        return values_T.new_zeros(self.n).index_add(0, self.sequence_T, values_T * self.mask_T)

    def mean(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return [S]: the mean of the values on each sequence's trained tokens; 0 for a sequence without any."""
        return self.sum(values_T) / self.counts_S.clamp(min=1)

    def largest(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return [S]: the largest value on each sequence's trained tokens; 0 for a sequence without any."""
        least_T = torch.where(self.mask_T.bool(), values_T, torch.full_like(values_T, -torch.inf))
        most_S = values_T.new_full((self.n,), -torch.inf).scatter_reduce(0, self.sequence_T, least_T, "amax")
        return torch.where(most_S.isfinite(), most_S, torch.zeros_like(most_S))

    def spread(self, values_S: torch.Tensor) -> torch.Tensor:
        """Return [T]: the value of each token's sequence."""
        return values_S[self.sequence_T]

    @property
    def counts_S(self) -> torch.Tensor:
        """Floating point [S]: trained tokens of each sequence."""
        return self.mask_T.new_zeros(self.n).index_add(0, self.sequence_T, self.mask_T)
