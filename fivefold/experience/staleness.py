"""Metrics of staleness: how many versions older than the trained weights a step's samples are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from fivefold.types import Sample


def staleness_metrics(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Return how old samples are, in versions between their oldest token and the weights that are trained on them.

    For each age that some samples have, there are `staleness/share/<age>`, `staleness/reward/<age>` and
    `staleness/response_length/<age>`: their share, mean reward and mean length.

    Args:
        samples: the samples of a step.
        version: version of the weights that the step begins with.
    """
    by_age: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.n_sampled:
            by_age[version - sample.versions[0]].append(sample)
    ages = [age for age, own in by_age.items() for _ in own]
    mixed = sum(sample.versions[0] < sample.versions[1] for sample in samples)
    return {
        "staleness/mean": fmean(ages) if ages else 0.0,
        "staleness/max": float(max(ages, default=0)),
        "staleness/mixed": mixed / len(samples),
        **{f"staleness/share/{age}": len(own) / len(samples) for age, own in by_age.items()},
        **{f"staleness/reward/{age}": fmean(sample.reward for sample in own) for age, own in by_age.items()},
        **{f"staleness/response_length/{age}": fmean(each.n_sampled for each in own) for age, own in by_age.items()},
    }
