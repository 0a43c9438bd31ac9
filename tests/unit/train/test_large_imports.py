"""Garbage collections wait for the end of large imports, and then leave out what has been imported."""

from __future__ import annotations

import gc
import importlib
import sys

import pytest

from fivefold.imports import large_imports


@pytest.fixture
def freezes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the collector was on, at each time that what exists was kept out of its passes."""
    times: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: times.append(gc.isenabled()))
    return times


def test_nothing_is_collected_inside_and_what_was_imported_stays_out(
    freezes: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with large_imports():
        assert not gc.isenabled()
        with large_imports():
            importlib.import_module("colorsys")
        assert not gc.isenabled(), "the end of an inner block"
        assert freezes == []
    assert gc.isenabled()
    assert freezes == [False]


def test_a_block_that_imports_nothing_or_fails_leaves_the_collector_as_it_was(freezes: list[bool]) -> None:
    def fail() -> None:
        with large_imports():
            raise ImportError("no such library")

    with pytest.raises(ImportError, match="no such library"):
        fail()
    assert gc.isenabled()
    assert freezes == []
