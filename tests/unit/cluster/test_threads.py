"""The threads of a worker process, as the environment of the driver has them."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.cluster.nodes import Node
from fivefold.cluster.role import Role, _threads
from fivefold.layout.placement import Device


def threads() -> int:
    strategy: Any = None
    role = Role("actor", [Device(0, 0), Device(0, 1)], object, ())
    return _threads(role, Node(0, "127.0.0.1", (), 8, None, 0, strategy))


@pytest.mark.parametrize(("value", "wanted"), [("3", 3), (" 3 ", 3), ("3,2", 3), ("", 4), (" ", 4)])
def test_an_empty_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch, value: str, wanted: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert threads() == wanted


@pytest.mark.parametrize("value", ["abc", "4.0", "0", "-1"])
def test_a_number_that_cannot_be_is_refused_by_its_variable(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(ValueError, match=f"OMP_NUM_THREADS='{value}' in the environment must be a whole number"):
        threads()
