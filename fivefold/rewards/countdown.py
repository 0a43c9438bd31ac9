"""The reward `countdown`: whether an expression reaches a number with given numbers, each used once."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from fivefold.rewards.contract import GradedReward
from fivefold.rewards.reward import after_thoughts

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MOST_CHARACTERS = 500
"""Longest expression that is read."""
OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


@dataclass(frozen=True)
class Countdown(GradedReward):
    """Computes the last expression between answer tags, exactly.

        response "<answer>(44 + 19) + 35</answer>"    ground truth {"target": 98, "numbers": [44, 19, 35]}    right

    An expression has whole numbers, + - * /, and parentheses. Thoughts up to the last `</think>` do not count.
    """

    right: float = 1.0
    """Reward of an expression with the target's value that uses each number once."""
    tagged: float = 0.1
    """Reward of any other answer in tags."""
    untagged: float = 0.0
    """Reward of a response without an answer in tags."""

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Refuse a ground truth without a target or numbers.

        Raises:
            ValueError: it is neither a mapping nor JSON with both.
        """
        _task(ground_truth)

    def __call__(self, response: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]) -> float:
        """Return the reward of the last answer."""
        target, numbers = _task(ground_truth)
        answers = ANSWER.findall(after_thoughts(response))
        if not answers:
            return self.untagged
        used: list[int] = []
        try:
            is_right = len(answers[-1]) <= MOST_CHARACTERS and _value(answers[-1], used) == target
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return self.tagged
        return self.right if is_right and sorted(used) == numbers else self.tagged


def _task(ground_truth: Any) -> tuple[Fraction, list[int]]:
    """Return the target and the numbers in order.

    Raises:
        ValueError: a ground truth of another form.
    """
    try:
        task = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        return Fraction(task["target"]), sorted(int(number) for number in task["numbers"])
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f'the ground truth is {ground_truth!r:.80}: give {{"target": 98, "numbers": [44, 19, 35]}}, or JSON'
        ) from error


def _value(text: str, used: list[int]) -> Fraction:
    """Return the value of an expression, and add its numbers to `used`.

    Raises:
        SyntaxError, ValueError, ZeroDivisionError, RecursionError: it is no expression of whole numbers, or has no
            value.
    """
    return _of_node(ast.parse(" ".join(text.split()), mode="eval").body, used)


def _of_node(node: ast.expr, used: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int() as number) if type(number) is int:
            used.append(number)
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_of_node(left, used), _of_node(right, used))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_of_node(operand, used)
        case _:
            raise ValueError("no expression of whole numbers")
