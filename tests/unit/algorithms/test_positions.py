"""Entropies by the quarter of a sequence, token by token."""

from __future__ import annotations

import random

import pytest
import torch

from fivefold.algorithms.measures import N_PARTS, PART, SHARE, entropy_by_part
from fivefold.algorithms.sequences import Sequences
from fivefold.roles.trainer_worker import UpdateResult
from fivefold.update.updates import average_updates


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
        assert [float(metrics[f"{PART}/{i + 1}"]) for i in range(N_PARTS)] == pytest.approx(sums, abs=1e-5)
        assert [float(metrics[f"{SHARE}/{i + 1}"]) for i in range(N_PARTS)] == counts


def test_the_entropy_of_a_quarter_is_a_mean_over_its_tokens() -> None:
    """Metrics of an update are sums divided by all 8 trained tokens; the second quarter has none here."""
    parts = {f"{PART}/1": 3.0 / 8, f"{SHARE}/1": 6 / 8, f"{PART}/2": 0.0, f"{SHARE}/2": 0.0}
    averages = average_updates([UpdateResult({"lr": 1.0, **parts}, skipped=False)] * 2)
    assert averages[f"{PART}/1"] == pytest.approx(0.5)
    assert not {f"{PART}/2", f"{SHARE}/1", f"{SHARE}/2"} & averages.keys()
