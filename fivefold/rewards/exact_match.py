"""Reward 1 for an answer that equals the ground truth, else 0."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any


@dataclass(frozen=True)
class ExactMatch:
    """Compares texts, surrounding white space aside.

        pattern=None                response " 42\\n"                 ground truth 42        1.0
        pattern="answer is (\\S+)"   response "The answer is 42"      ground truth 42        1.0
        numbers=True                response "1,000.0"               ground truth 1000      1.0

    A ground truth that is a list or tuple holds alternatives.
    """

    pattern: str | None = None
    """Regular expression that finds the answer in the response: its last match counts, and there its first group
    (without groups, all of it). A response without a match earns 0."""
    ignore_case: bool = False
    numbers: bool = False
    """Compare as decimal numbers where both sides are numbers, thousands separators aside."""

    def __post_init__(self) -> None:
        if self.pattern is None:
            return
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"reward.kwargs.pattern={self.pattern!r} is not a regular expression: {error}") from error

    def __call__(self, response: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]) -> float:
        answer = self._answer(response)
        if answer is None:
            return 0.0
        accepted = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
        return float(any(self._normal_form(answer) == self._normal_form(str(truth)) for truth in accepted))

    def _answer(self, response: str) -> str | None:
        if self.pattern is None:
            return response
        matches = list(re.finditer(self.pattern, response))
        if not matches:
            return None
        return matches[-1].group(1 if matches[-1].re.groups else 0)

    def _normal_form(self, text: str) -> str | Decimal:
        text = text.strip()
        if self.numbers:
            try:
                number = Decimal(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text))
            except InvalidOperation:
                pass
            else:
                if number.is_finite():
                    return number
        return text.casefold() if self.ignore_case else text
