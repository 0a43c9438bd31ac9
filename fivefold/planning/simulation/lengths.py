"""Distributions of response lengths as equally likely values, from a run's samples or from a few numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import NormalDist, fmean

from fivefold.json_text import parsed

N_QUANTILES = 1000
"""Number of values that describe a distribution given by a few numbers."""
SIGMA = 1.0
"""Standard deviation of the logarithm of lengths if only their mean is given."""
OF_EPISODES = ("turns", "read")
"""Fields of `Lengths` that numbers on the command line may set."""
SAMPLES = "samples.jsonl"
"""The file in a run's folder with a line for each logged sample."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of response lengths, in tokens."""

    values: tuple[int, ...]
    """Equally likely numbers of sampled tokens, over all turns of an episode."""
    turns: float = 1.0
    """Mean number of turns."""
    read: float = 0.0
    """Mean number of tokens that the environment writes between two turns, such as the results of tools."""

    def __post_init__(self) -> None:
        if not self.values or min(self.values) < 1:
            raise ValueError(
                f"response lengths: {len(self.values)} values, the smallest is {min(self.values, default=None)}; "
                "there must be at least one, and each must be at least 1"
            )

    @cached_property
    def mean(self) -> float:
        """Mean length, in tokens."""
        return fmean(self.values)

    @cached_property
    def longest(self) -> int:
        """The largest length, in tokens."""
        return max(self.values)

    @cached_property
    def mean_progress(self) -> float:
        """Mean number of tokens that a response has while it is generated, averaged over all of its tokens."""
        return fmean(value * value for value in self.values) / (2 * self.mean)

    @property
    def given(self) -> float:
        """Mean number of tokens of an episode that its environment writes."""
        return (self.turns - 1) * self.read

    def at_most(self, limit: int) -> Lengths:
        """Return the distribution of responses cut off after `limit` tokens."""
        return replace(self, values=tuple(min(value, limit) for value in self.values))

    def draw(self, random: Random, n: int) -> list[int]:
        """Return `n` independent lengths."""
        return random.choices(self.values, k=n)


def parse_lengths(text: str) -> Lengths:
    """Parse response lengths from the command line.

    Args:
        text: the folder of a run with `samples.jsonl`, or such a file; `mean=4000,max=32768`, a log-normal distribution
            cut off at the maximum; or percentiles such as `p50=3000,p90=9000,p99=20000,max=32768`, with linear
            interpolation in between. `turns=8,read=300` adds an episode's mean number of turns, and the tokens that it
            reads between two.

    Raises:
        ValueError: the text is none of these, or the file has no lengths.
    """
    if "=" not in text or Path(text).exists():
        return _measured(Path(text))
    numbers = _numbers(text)
    episode = {name: numbers.pop(name) for name in OF_EPISODES if name in numbers}
    if "read" in episode and "turns" not in episode:
        raise ValueError(f"--lengths {text}: read is what is read between two turns; add their number as turns")
    return replace(_sampled(text, numbers), turns=episode.get("turns", 1.0), read=episode.get("read", 0.0))


def _sampled(text: str, numbers: dict[str, float]) -> Lengths:
    """Return the numbers of tokens that are sampled."""
    longest = numbers.pop("max", None)
    if longest is None:
        raise ValueError(f"--lengths {text}: max is missing; add the longest response, such as max=32768")
    if set(numbers) == {"mean"}:
        return log_normal(numbers["mean"], longest)
    if numbers and all(name.startswith("p") for name in numbers):
        return _from_percentiles(text, numbers, longest)
    raise ValueError(
        f"--lengths {text}: give mean and max, or percentiles and max, such as p50=3000,p90=9000,max=32768"
    )


def log_normal(mean: float, longest: float) -> Lengths:
    """Return a log-normal distribution with standard deviation `SIGMA` of the logarithm, cut off at `longest`.

    `mean` is the mean after the cut.

    Raises:
        ValueError: the mean is below 1 or not below `longest`.
    """
    if not 1 <= mean < longest:
        raise ValueError(f"--lengths mean={mean:g},max={longest:g}: the mean must be at least 1 and below max")
    normal = NormalDist(0.0, SIGMA)
    shape = [math.exp(normal.inv_cdf((index + 0.5) / N_QUANTILES)) for index in range(N_QUANTILES)]
    low, high = 0.0, longest / shape[0]
    for _ in range(60):
        middle = (low + high) / 2
        reached = fmean(min(max(middle * value, 1.0), longest) for value in shape)
        low, high = (middle, high) if reached < mean else (low, middle)
    return Lengths(tuple(round(min(max(high * value, 1.0), longest)) for value in shape))


def _numbers(text: str) -> dict[str, float]:
    """Return the numbers of `a=1,b=2` by name."""
    numbers: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        is_known = name in ("mean", "max", *OF_EPISODES) or (name.startswith("p") and _percentile(name) is not None)
        if not is_known or not number >= 1 or not math.isfinite(number) or name in numbers:
            raise ValueError(
                f"--lengths: {part.strip()!r} is not a length; write mean, max, turns, read or a percentile such as "
                "p90, once, each with a number that is at least 1, such as p50=3000,p90=9000,max=32768"
            )
        numbers[name] = number
    return numbers


def _percentile(name: str) -> float | None:
    """Return the share below a percentile such as `p99.5`; None if it is not between 0 and 100."""
    try:
        share = float(name[1:]) / 100
    except ValueError:
        return None
    return share if 0 < share < 1 else None


def _from_percentiles(text: str, percentiles: Mapping[str, float], longest: float) -> Lengths:
    shares = {share: value for name, value in percentiles.items() if (share := _percentile(name)) is not None}
    points = [(0.0, 1.0), *sorted(shares.items()), (1.0, longest)]
    if any(low[1] > high[1] for low, high in pairwise(points)):
        raise ValueError(f"--lengths {text}: a higher percentile has a smaller length; they must not fall")
    return Lengths(tuple(_between(points, (index + 0.5) / N_QUANTILES) for index in range(N_QUANTILES)))


def _between(points: Sequence[tuple[float, float]], share: float) -> int:
    """Return the length below which `share` of all lengths are, interpolated linearly."""
    (left, low), (right, high) = next(pair for pair in pairwise(points) if pair[1][0] >= share)
    return round(low + (high - low) * (share - left) / (right - left))


def _measured(path: Path) -> Lengths:
    """Return the lengths of a run's logged samples, and of episodes their turns."""
    file = path / SAMPLES if path.is_dir() else path
    try:
        rows = [parsed(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        lengths = [int(row["n_tokens"]) for row in rows]
        turns = [int(row.get("n_turns", 1)) for row in rows]
    except OSError as error:
        raise ValueError(
            f"--lengths {path} cannot be read ({error.strerror}); give the folder of a run that has {SAMPLES}, or "
            "numbers such as mean=4000,max=32768"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"--lengths {file}: a line is not a sample with n_tokens, as runs write {SAMPLES}") from error
    return Lengths(tuple(length for length in lengths if length > 0), fmean(turns) if turns else 1.0)
