"""Lists of devices: all forms that can be written, and texts that are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.layout.devices import device_text, parse_devices
from fivefold.layout.errors import AllocationError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("list(range(0,32))", tuple(range(32))),
        ("list( range( 0, 8, 2 ) )", (0, 2, 4, 6)),
        ("0-31", tuple(range(32))),
        ("[0, 2, 4,]", (0, 2, 4)),
        ("[0-2, 5]", (0, 1, 2, 5)),
        ("3,1,2", (3, 1, 2)),
        ("0-1, 4-5", (0, 1, 4, 5)),
        ("list(range(0,2)) + list(range(8,10))", (0, 1, 8, 9)),
        (" 7 ", (7,)),
    ],
)
def test_every_form_of_a_list_is_read(text: str, expected: tuple[int, ...]) -> None:
    assert parse_devices(text) == expected


@pytest.mark.parametrize(
    ("text", "position", "rule"),
    [
        ("", 0, "is expected"),
        ("__import__('os').system('true')", 0, "is expected"),
        ("list(range(0, n))", 5, "one to three whole numbers"),
        ("range(-1)", 0, "one to three whole numbers"),
        ("range(0, 8, 0)", 0, "step of a range"),
        ("range(4, 4)", 0, "names no device"),
        ("[0, x]", 4, "`x` is not a device"),
        ("[0,,1]", 1, "missing between two commas"),
        ("0-3, 2", 5, "device 2 is named twice"),
        ("5-2", 0, "runs backwards"),
        ("0-3,", 4, "is expected"),
        ("1.5", 1, "does not belong here"),
        ("0-32769", 2, "there are at most 32,768 devices, numbered from 0"),
        ("list(range(0, 80000000000))", 14, "there are at most 32,768 devices"),
        ("٣", 0, "is expected"),
    ],
)
def test_a_text_that_is_no_list_is_refused_with_its_place(text: str, position: int, rule: str) -> None:
    with pytest.raises(AllocationError) as caught:
        parse_devices(text)
    assert rule in caught.value.rule
    assert caught.value.position == position


@given(st.lists(st.integers(0, 60), min_size=1, unique=True))
def test_printed_lists_parse_to_the_same(devices: list[int]) -> None:
    assert parse_devices(device_text(devices)) == tuple(devices)


def test_neighbours_are_printed_together() -> None:
    assert device_text([0, 1, 2, 5, 4, 8, 9]) == "0-2, 5, 4, 8-9"
