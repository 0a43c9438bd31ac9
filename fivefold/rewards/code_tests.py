"""The tests of a programming task, as data sets write them, and whether a program passes one.

{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                   standard input and output
{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}        calls of a function, or a method of class Solution
{"asserts": ["assert add(1, 2) == 3"]}  {"test": "..."}       Python that runs after the program
"""

from __future__ import annotations

import json
import math
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Protocol

from fivefold.json_text import parsed
from fivefold.rewards.sandbox.runner import Result


class Runs(Protocol):
    """Runs a program in a sandbox; see `fivefold.rewards.sandbox.runner.run`."""

    def __call__(self, program: str, asks: Mapping[str, Any], stdin: str = "") -> Result:
        """Return what became of it."""


class CodeTest(Protocol):
    """One test of a task."""

    def passes(self, program: str, run: Runs) -> bool:
        """Return whether a program passes."""


@dataclass(frozen=True)
class OutputTest:
    """The program reads `stdin` and prints `expected`, white space at the ends of lines and of the text aside.

    Numbers on a line are compared by value. What is expected never enters the program's process.
    """

    stdin: str
    expected: str

    def passes(self, program: str, run: Runs) -> bool:
        """Return whether a program passes."""
        result = run(program, {"asks": "output"}, self.stdin)
        return result.is_complete and _same_text(result.output.decode(errors="replace"), self.expected)


@dataclass(frozen=True)
class ValueTest:
    """A function returns `expected` for `arguments`. What is expected never enters the program's process."""

    fn_name: str
    arguments: list[Any]
    expected: Any

    def passes(self, program: str, run: Runs) -> bool:
        """Return whether a program passes."""
        asks = {"asks": "value", "fn_name": self.fn_name, "argument": self.arguments}
        result = run(program, asks)
        if not result.is_complete:
            return False
        try:
            value = parsed(result.report)
        except ValueError:
            return False
        # Some data sets wrap the value in a list.
        wrapped = isinstance(self.expected, list) and len(self.expected) == 1
        return _same_value(value, self.expected) or (wrapped and _same_value(value, self.expected[0]))


@dataclass(frozen=True)
class AssertTest:
    """Python texts run after the program, in its process, and none of them raises an exception.

    A secret shows that all have run, so that neither printing nor exiting early passes.
    """

    texts: list[str]

    def passes(self, program: str, run: Runs) -> bool:
        """Return whether a program passes."""
        token = secrets.token_hex(16)
        result = run(program, {"asks": "asserts", "argument": self.texts, "token": token})
        return result.is_complete and result.report.decode(errors="replace") == token


def read_tests(ground_truth: Any) -> list[CodeTest]:
    """Return the tests of a ground truth: a mapping, or JSON of one.

    Raises:
        ValueError: it has another form, or no test.
    """
    truth = ground_truth
    if isinstance(truth, str):
        try:
            truth = parsed(truth)
        except ValueError as error:
            raise ValueError(f"the ground truth is no JSON ({error}): give {_FORMS}") from error
    if not isinstance(truth, Mapping):
        raise ValueError(f"the ground truth is a {type(truth).__name__}: give {_FORMS}")
    forms = [key for key in ("inputs", "asserts", "test") if truth.get(key) is not None]
    if len(forms) != 1:
        raise ValueError(f"the ground truth has the keys {sorted(truth)}: give {_FORMS}")
    tests = _pairs(truth) if forms == ["inputs"] else _texts(truth[forms[0]])
    if not tests:
        raise ValueError(f"the ground truth's {forms[0]} are empty, so every program would pass: drop the row")
    return tests


_FORMS = '{"inputs": [...], "outputs": [...]}, with "fn_name" for calls, {"asserts": [...]} or {"test": "..."}'


def _pairs(truth: Mapping[str, Any]) -> list[CodeTest]:
    inputs, outputs, fn_name = truth["inputs"], truth.get("outputs"), truth.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("the ground truth's inputs and outputs must be two lists of one length")
    if fn_name is None:
        if not all(isinstance(text, str) for text in (*inputs, *outputs)):
            raise ValueError("the ground truth's inputs and outputs must be texts, or fn_name must name a function")
        return [OutputTest(stdin, expected) for stdin, expected in zip(inputs, outputs, strict=True)]
    if not isinstance(fn_name, str) or not all(isinstance(arguments, list) for arguments in inputs):
        raise ValueError("with fn_name, each of the ground truth's inputs must be the list of a call's arguments")
    try:
        expected_values = json.loads(json.dumps(outputs))
        json.dumps(inputs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the ground truth's inputs and outputs must be values of JSON: {error}") from error
    return [ValueTest(fn_name, a, value) for a, value in zip(inputs, expected_values, strict=True)]


def _texts(texts: Any) -> list[CodeTest]:
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError("the ground truth's asserts or test must be Python text, or a list of such texts")
    for text in texts:
        try:
            compile(text, "test", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"the ground truth's test {text[:200]!r} is not Python: {error}") from error
    return [AssertTest(texts)] if texts else []


def _same_text(output: str, expected: str) -> bool:
    own, other = ([line.split() for line in text.strip().splitlines()] for text in (output, expected))
    return own == other or (
        len(own) == len(other)
        and all(len(a) == len(b) and all(map(_same_word, a, b)) for a, b in zip(own, other, strict=True))
    )


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    try:
        return Decimal(word) == Decimal(expected)
    except InvalidOperation:
        return False


def _same_value(value: Any, expected: Any) -> bool:
    """Return whether two values of JSON are the same; fractions may differ by rounding."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same_value(value[key], expected[key]) for key in expected)
    if isinstance(value, float) and isinstance(expected, (int, float)):
        # A program may return a number, and a test may expect an integer, that is too large for a float.
        return abs(expected) <= sys.float_info.max and math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9)
    return isinstance(value, bool) == isinstance(expected, bool) and value == expected
