"""Ground truths of the built-in rewards."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any


def accepted_answers(ground_truth: Any) -> Sequence[Any]:
    """Return the right answers: the items of a list or a tuple, each of them right, or the ground truth alone."""
    return ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]


def as_text(truth: Any) -> str:
    """Return a right answer as a response writes it: a float without an exponent, `0.00001` and not `1e-05`."""
    return format(Decimal(str(truth)), "f") if isinstance(truth, float) else str(truth)
