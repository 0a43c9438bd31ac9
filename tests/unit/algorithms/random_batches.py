"""Random ragged batches, small enough that a loop over their tokens is quick."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from fivefold.algorithms.loss import LossInputs
from fivefold.batch import Batch


@dataclass(frozen=True)
class Sampled:
    """A batch in float64 with the predictions of a policy for it."""

    batch: Batch
    logprobs_T: torch.Tensor
    entropy_T: torch.Tensor

    def inputs(self, indices: list[int] | None = None) -> LossInputs:
        """Return the inputs of a loss for the sequences at `indices`, or for all."""
        whole = self.batch.with_fields(logprobs=self.logprobs_T, entropy=self.entropy_T)
        part = whole if indices is None else whole.select(indices)
        predictions = {name: part.fields[name] for name in ("logprobs", "entropy")}
        fields = {name: value for name, value in part.fields.items() if name not in predictions}
        return LossInputs(predictions, part.mask_T, part.lengths, fields)


def sample(rng: random.Random) -> Sampled:
    """Draw up to four sequences, some without trained tokens, whose ratios are on both sides of every clip.

    All values of tokens that are not trained are NaN, in fields and in predictions.
    """
    lengths = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 4)))
    mask = [float(rng.random() < 0.7) for _ in range(sum(lengths))]
    spread = rng.choice([0.02, 0.3, 1.5])

    def values(scale: float) -> torch.Tensor:
        drawn = [rng.gauss(0, scale) if trained else float("nan") for trained in mask]
        return torch.tensor(drawn, dtype=torch.float64)

    logprobs_T = values(0.5) - 2.0
    of_sequence = [rng.gauss(0, 1) for _ in lengths]
    advantages = [a for a, n in zip(of_sequence, lengths, strict=True) for _ in range(n)]
    numbers = [float(i) for i, n in enumerate(lengths) for _ in range(n)]
    old_T = logprobs_T + values(spread)
    fields = {
        "advantages": torch.tensor(advantages, dtype=torch.float64)
        if rng.random() < 0.7
        else values(1.0),  # of each token, as GAE's are
        "old_logprobs": old_T,
        "rollout_logprobs": old_T + values(rng.choice([0.01, 0.5])),
        "ref_logprobs": logprobs_T + values(0.3),
        "entropy_changes": values(0.2),
        "sequence_number": torch.tensor(numbers, dtype=torch.float64),
    }
    tokens_T = torch.zeros(sum(lengths), dtype=torch.int64)
    batch = Batch(lengths, tokens_T, torch.tensor(mask, dtype=torch.float64), fields)
    return Sampled(batch, logprobs_T.requires_grad_(), values(1.0).abs().requires_grad_())


def random_split(rng: random.Random, n: int) -> list[list[int]]:
    """Return a random partition of n sequences into micro-batches, one of which is empty."""
    parts: list[list[int]] = [[] for _ in range(3)]
    for index in rng.sample(range(n), n):
        rng.choice(parts).append(index)
    return [*parts, []]
