"""Sums and differences of numbers with three or four digits: the task of recipes/calculator.yaml.

    4711+3892-160        8443

The small models that ship cannot add such numbers in their heads. The recipe's tool does one operation, so three
numbers take two calls. A hash of its text decides whether a chain is held out; no demonstration shows a held-out one.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "test"]
HELD_OUT_SHARE = 0.1
"""Share of all chains that are held out."""


@dataclass(frozen=True)
class Chain:
    """Numbers that are added and subtracted from left to right; no result is negative."""

    text: str

    @property
    def steps(self) -> list[tuple[str, str]]:
        """Each operation with two numbers, and its result."""
        first, *rest = re.findall(r"[+-]?\d+", self.text)
        found = []
        for term in rest:
            operation, first = f"{first}{term}", str(int(first) + int(term))
            found.append((operation, first))
        return found

    @property
    def answer(self) -> str:
        """The result of the last operation."""
        return self.steps[-1][1]

    @property
    def split(self) -> Split:
        """The split that the chain belongs to."""
        digest = hashlib.blake2b(self.text.encode(), digest_size=8).digest()
        return "test" if int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64 else "train"


def chains(split: Split, rng: random.Random) -> Iterator[Chain]:
    """Yield random chains of a split without end, of two and of three numbers equally often."""
    while True:
        total = _number(rng)
        text = str(total)
        for _ in range(rng.choice((1, 2))):
            number = _number(rng)
            sign = "-" if number <= total and rng.random() < 0.5 else "+"
            text += f"{sign}{number}"
            total += number if sign == "+" else -number
        if (chain := Chain(text)).split == split:
            yield chain


def _number(rng: random.Random) -> int:
    return rng.randint(100, 999) if rng.random() < 0.5 else rng.randint(1000, 9999)


def chain_rows(split: Split, n_rows: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Yield distinct chains as questions, in the common schema of verifiable rewards."""
    distinct: dict[Chain, None] = {}
    source = chains(split, random.Random(f"chains-{split}-{seed}"))
    while len(distinct) < n_rows:
        distinct.setdefault(next(source))
    for chain in distinct:
        yield {
            "data_source": f"calculator/{len(chain.steps) + 1}",
            "prompt": [{"role": "user", "content": chain.text}],
            "reward_model": {"style": "rule", "ground_truth": chain.answer},
        }
