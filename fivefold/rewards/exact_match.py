"""The reward `exact_match`: 1 for an answer that equals the ground truth, else 0."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from fivefold.rewards.contract import QuickReward
from fivefold.rewards.reward import accepted_answers, as_text

ARTICLES = ("a", "an", "the")


@dataclass(frozen=True)
class ExactMatch(QuickReward):
    """Compares texts; white space around them does not count.

        pattern=None                response " 42\\n"                 ground truth 42        1.0
        pattern="answer is (\\S+)"   response "The answer is 42"      ground truth 42        1.0
        numbers=True                response "1,000.0"               ground truth 1000      1.0

    If the ground truth is a list or a tuple, any of its items is right.
    """

    pattern: str | None = None
    """Regular expression that finds the answer in the response. Its last match counts: the first group of it that takes
    part in the match, or all of it if there are no groups. A response without a match earns 0. None: the whole response
    is the answer."""
    ignore_case: bool = False
    """Whether upper and lower case are the same."""
    numbers: bool = False
    """Whether two numbers are compared as decimal numbers; thousands separators do not count."""
    plain_words: bool = False
    """Whether case, punctuation, the articles a, an and the, and white space do not count, as in SQuAD's evaluation."""
    minerva: bool = False
    """Whether short mathematical answers are compared in the form of Minerva's evaluation, as DAPO's reward does."""

    def __post_init__(self) -> None:
        if self.pattern is None:
            return
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"reward.kwargs.pattern={self.pattern!r} is not a regular expression: {error}") from error

    def __call__(self, response: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]) -> float:
        """Return 1.0 for a right answer and 0.0 for any other."""
        answer = self._answer(response)
        if answer is None:
            return 0.0
        forms = [form for truth in accepted_answers(ground_truth) for form in _forms(truth)]
        return float(any(self._normal_form(answer) == self._normal_form(form) for form in forms))

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Refuse a ground truth with which no answer can be compared.

        Raises:
            ValueError: it is neither a text, a number nor a list of them, or it is blank, as an empty response is.
        """
        accepted = accepted_answers(ground_truth)
        usable = [isinstance(truth, (str, int, float)) and bool(str(truth).strip()) for truth in accepted]
        if not usable or not all(usable):
            raise ValueError(
                f"the ground truth is {ground_truth!r}: give a text that is not blank, a number, or a list of them"
            )

    def _answer(self, response: str) -> str | None:
        if self.pattern is None:
            return response
        matches = list(re.finditer(self.pattern, response))
        if not matches:
            return None
        groups = matches[-1].groups()
        return next((group for group in groups if group is not None), None) if groups else matches[-1][0]

    def _normal_form(self, text: str) -> str | Decimal:
        text = text.strip()
        if self.minerva:
            from fivefold.rewards.minerva import minerva_form  # here, because few recipes need it

            text = minerva_form(text)
        if self.numbers:
            try:
                number = Decimal(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text))
            except InvalidOperation:
                pass
            else:
                if number.is_finite():
                    return number
        if self.plain_words:
            words = "".join(character for character in text.lower() if character not in string.punctuation).split()
            return " ".join(word for word in words if word not in ARTICLES)
        return text.casefold() if self.ignore_case else text


def _forms(truth: Any) -> list[str]:
    """Return how a right answer may be written. Tables make floats of whole numbers if a row of the column is empty."""
    whole = [str(int(truth))] if isinstance(truth, float) and truth.is_integer() else []
    return [as_text(truth), *whole]
