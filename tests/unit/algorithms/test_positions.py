"""Entropies by the quarter of a sequence, token by token."""

from __future__ import annotations

import random

import pytest
import torch

from fivefold.algorithms.metrics import merge_metrics, metric_values
from fivefold.algorithms.policy_loss import N_PARTS, PART, entropy_by_part
from fivefold.algorithms.sequences import Sequences


def test_entropies_are_summed_over_the_quarter_of_each_trained_token() -> None:
    rng = random.Random(4)
    for _ in range(200):
        lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 6))]
        masks = [[float(rng.random() < 0.7) for _ in range(length)] for length in lengths]
        entropies = [[rng.random() for _ in range(length)] for length in lengths]
        sums, counts = [0.0] * N_PARTS, [0] * N_PARTS
        for mask, values in zip(masks, entropies, strict=True):
            trained = [value for value, is_trained in zip(values, mask, strict=True) if is_trained]
            for place, value in enumerate(trained):
                sums[4 * place // len(trained)] += value
                counts[4 * place // len(trained)] += 1
        mask_T, entropy_T = (torch.tensor([x for row in rows for x in row]) for rows in (masks, entropies))
        metrics = entropy_by_part(entropy_T, Sequences.of(mask_T, lengths))
        parts = [metrics[f"{PART}/{i + 1}"] for i in range(N_PARTS)]
        assert [float(part.sum) for part in parts] == pytest.approx(sums, abs=1e-5)
        assert [float(part.weight) for part in parts] == counts


def test_the_entropy_of_a_quarter_is_a_mean_over_its_tokens() -> None:
    """Of 3 trained tokens, the first two quarters have 2 and 1; 2 updates differ in their entropies."""
    sequences = Sequences.of(torch.ones(2), [2])
    updates = [entropy_by_part(torch.tensor(row), sequences) for row in ([0.25, 1.0], [0.75, 2.0])]
    assert metric_values(merge_metrics(updates)) == {f"{PART}/1": 0.5, f"{PART}/3": 1.5}
