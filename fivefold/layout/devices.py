"""Parses lists of devices: `0-31`, `0-3,8`, `[0, 2, 4]`, `list(range(0,32))`. No text is evaluated as Python.

`parse_devices` reads all of these forms. `device_text` prints the shortest one, which parses to the same list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from fivefold.config.limits import MOST_DEVICES
from fivefold.layout.errors import AllocationError

EXAMPLES = "write for example 0-31, [0, 2, 4] or list(range(0, 32))"
TERMS = re.compile(
    r"""\s*(?:
      list\(\s*(?P<listed>range\([^()]*\))\s*\)
    | (?P<range>range\([^()]*\))
    | \[(?P<list>[^\[\]]*)\]
    | (?P<span>\d+\s*-\s*\d+)
    | (?P<one>\d+)
    )\s*""",
    re.VERBOSE | re.ASCII,
)
SEPARATORS = "+,"


def parse_devices(text: str) -> tuple[int, ...]:
    """Return the device indices in `text`, in the order in which they are written; terms are joined with `,` or `+`.

    Raises:
        AllocationError: a text that is not a list of devices, an empty list, or a list that names a device twice.
    """
    devices: dict[int, None] = {}  # a dict keeps the order, and finds a device that is named twice
    position = 0
    while True:
        match = TERMS.match(text, position)
        if match is None:
            raise AllocationError("a list of devices is expected here", EXAMPLES, text, position)
        _check_sizes(match, text)
        _extend(devices, _term(match, text), text, match)
        position = match.end()
        if position == len(text):
            return tuple(devices)
        if text[position] not in SEPARATORS:
            raise AllocationError(f"`{text[position]}` does not belong here", EXAMPLES, text, position)
        position += 1


def device_text(devices: Sequence[int]) -> str:
    """Return the devices in their order, with neighbours joined: `0-3, 8`."""
    spans: list[list[int]] = []
    for device in devices:
        if spans and device == spans[-1][-1] + 1:
            spans[-1].append(device)
        else:
            spans.append([device])
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans)


def _check_sizes(match: re.Match[str], text: str) -> None:
    """Refuse a slip such as `range(0, 80000000000)` before the list is built."""
    for number in re.finditer(r"\d+", match.group(), re.ASCII):
        digits = number.group().lstrip("0")
        if len(digits) > len(str(MOST_DEVICES)) or int(digits or 0) > MOST_DEVICES:
            rule = f"there are at most {MOST_DEVICES:,} devices, numbered from 0"
            raise AllocationError(rule, EXAMPLES, text, match.start() + number.start())


def _extend(devices: dict[int, None], term: list[int], text: str, match: re.Match[str]) -> None:
    start = _start(match)
    if not term:
        raise AllocationError("this names no device", EXAMPLES, text, start)
    for device in term:
        if device in devices:
            raise AllocationError(f"device {device} is named twice", "name each device once", text, start)
        devices[device] = None


def _start(match: re.Match[str]) -> int:
    return match.start() + len(match.group()) - len(match.group().lstrip())


def _term(match: re.Match[str], text: str) -> list[int]:
    if match["one"] is not None:
        return [int(match["one"])]
    if match["span"] is not None:
        first, last = (int(end) for end in match["span"].split("-"))
        if last < first:
            raise AllocationError(
                f"the range {first}-{last} runs backwards", f"write {last}-{first}", text, _start(match)
            )
        return list(range(first, last + 1))
    if match["list"] is not None:
        return [device for item in _items(match, "list", text) for device in _list_item(item, match, text)]
    name = "range" if match["range"] is not None else "listed"
    bounds = _range_bounds(match, name, text)
    return list(range(*bounds))


def _items(match: re.Match[str], name: str, text: str) -> Iterator[str]:
    inner = match[name].strip().removesuffix(",")
    for item in inner.split(",") if inner else ():
        if not item.strip():
            raise AllocationError("a device is missing between two commas", EXAMPLES, text, match.start(name))
        yield item.strip()


def _list_item(item: str, match: re.Match[str], text: str) -> list[int]:
    inner = TERMS.fullmatch(item)
    if inner is None or (inner["one"] is None and inner["span"] is None):
        raise AllocationError(f"`{item}` is not a device number", EXAMPLES, text, text.index(item, match.start("list")))
    return _term(inner, item)


def _range_bounds(match: re.Match[str], name: str, text: str) -> tuple[int, ...]:
    inner = match[name].removeprefix("range(").removesuffix(")")
    bounds = [bound.strip() for bound in inner.split(",")]
    if not 1 <= len(bounds) <= 3 or not all(bound.isdecimal() and bound.isascii() for bound in bounds):
        raise AllocationError("range takes one to three whole numbers", "write range(0, 32)", text, match.start(name))
    if len(bounds) == 3 and int(bounds[2]) == 0:
        raise AllocationError("the step of a range is at least 1", "write range(0, 32, 2)", text, match.start(name))
    return tuple(int(bound) for bound in bounds)
