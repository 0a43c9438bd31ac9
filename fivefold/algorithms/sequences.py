"""The tokens of a ragged batch, whose sequences are laid end to end without padding: sums and means over sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fivefold.algorithms.kl import bounded_exp


@dataclass(frozen=True)
class Sequences:
    """S sequences with T tokens in all; some tokens are trained."""

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

    def turns(self) -> Sequences:
        """Return the runs of trained tokens as sequences: what the policy sampled without an answer in between."""
        trained_T = self.mask_T.bool()
        follows_T = torch.zeros_like(trained_T)
        follows_T[1:] = trained_T[:-1] & (self.sequence_T[1:] == self.sequence_T[:-1])
        starts_T = trained_T & ~follows_T
        return Sequences(self.mask_T, (starts_T.cumsum(0) - 1).clamp(min=0), max(1, int(starts_T.sum())))

    def sum(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return [S]: the sum of the values on each sequence's trained tokens; all values must be finite."""
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


@dataclass(frozen=True)
class PolicyTokens:
    """T tokens of whole sequences. All values are 0 on tokens that are not trained."""

    logprobs_T: torch.Tensor
    """log p of each token under the current weights, with gradient."""
    old_logprobs_T: torch.Tensor
    """log p_old of each token, under the weights at the beginning of the step."""
    advantages_T: torch.Tensor
    sequences: Sequences
    fields: Mapping[str, torch.Tensor]
    """All fields of the batch, by name; on tokens that are not trained they may be NaN."""

    @property
    def trained_T(self) -> torch.Tensor:
        """bool [T]: whether each token is trained."""
        return self.sequences.mask_T.bool()

    @property
    def log_ratio_T(self) -> torch.Tensor:
        """log p - log p_old, with gradient."""
        return self.logprobs_T - self.old_logprobs_T

    @property
    def ratio_T(self) -> torch.Tensor:
        """p / p_old, with gradient; bounded, so that sums stay finite."""
        return bounded_exp(self.log_ratio_T)
