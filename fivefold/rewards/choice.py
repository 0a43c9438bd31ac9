"""The reward `choice`: whether a response names the right letter of a question with several choices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fivefold.rewards.contract import GradedReward
from fivefold.rewards.reward import after_thoughts

BOX = re.compile(r"\\boxed\{([^}]+)\}")
CUE = "answer is"
"""What stands before an answer without a box, in any case."""


@dataclass(frozen=True)
class Choice(GradedReward):
    """Compares the first capital letter of the answer with the first character of the ground truth.

        response "so it is \\boxed{B}"      ground truth B     right
        response "The answer is B."         ground truth B     right_unboxed

    The answer is in the last box, else behind the last "answer is", else it is the whole response; thoughts up to the
    last `</think>` do not count.
    """

    right: float = 1.0
    """Reward of the right letter in a box."""
    right_unboxed: float = 1.0
    """Reward of the right letter without a box."""
    wrong: float = 0.0
    """Reward of another answer in a box."""
    wrong_unboxed: float = 0.0
    """Reward of another answer without a box."""

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Refuse a ground truth that no letter can equal.

        Raises:
            ValueError: it does not begin with a capital letter.
        """
        if not isinstance(ground_truth, str) or not ground_truth[:1].isupper():
            raise ValueError(f"the ground truth is {ground_truth!r}: give the letter of the right choice, such as B")

    def __call__(self, response: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]) -> float:
        """Return the reward of the letter that the response names."""
        text = after_thoughts(response)
        boxes = BOX.findall(text)
        answer = boxes[-1] if boxes else text[text.lower().rfind(CUE) + len(CUE) :] if CUE in text.lower() else text
        letter = next((character for character in answer if character.isupper()), None)
        if letter == ground_truth[0]:
            return self.right if boxes else self.right_unboxed
        return self.wrong if boxes else self.wrong_unboxed
