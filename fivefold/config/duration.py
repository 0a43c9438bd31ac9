"""Durations of a recipe: a number of seconds, or a text such as `3h55m`."""

from __future__ import annotations

import re

UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
"""Seconds of each unit, in the order in which a text gives them."""
_TEXT = re.compile("".join(rf"(?:(?P<{unit}>[0-9]{{1,9}}(?:\.[0-9]{{1,9}})?){unit})?" for unit in UNITS))


def parse_duration(value: object) -> float:
    """Return the seconds of `3h55m`, `90m`, `45s`, `1d12h`, `1.5h` or of a plain number.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    match = _TEXT.fullmatch(value) if isinstance(value, str) and value else None
    if match is None:
        raise ValueError(
            f"{value!r:.60} is not a duration: write units from the largest to the smallest, such as 3h55m, 90m or "
            "45s, or a number of seconds"
        )
    return sum(float(match[unit] or 0) * seconds for unit, seconds in UNITS.items())
