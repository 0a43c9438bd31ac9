"""The shell's tests, `[ "$A" = 1 ]`, as far as they are about texts and numbers."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

NUMBER = re.compile(r"-?\d+")
COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


def holds(words: Sequence[str]) -> bool | None:
    """Return whether a test holds; None if that depends on more than its words, such as on a file.

    Args:
        words: the words between the brackets of `[ ... ]`, or a single test of `[[ ... ]]`, variables filled in.
    """
    match words:
        case ["!", *rest]:
            inner = holds(rest)
            return None if inner is None else not inner
        case ["-n", text] | [text]:
            return bool(text)
        case ["-z", text]:
            return not text
        case [left, "=" | "==", right]:
            return fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatchcase(left, right)
        case [left, sign, right] if sign in COMPARISONS and NUMBER.fullmatch(left) and NUMBER.fullmatch(right):
            return COMPARISONS[sign](int(left), int(right))
    return None
