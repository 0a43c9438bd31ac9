"""Garbage collections wait for the end of large imports, and then leave out what has been imported."""

from __future__ import annotations

import gc
import importlib
import sys

import pytest

from fivefold.imports import large_imports


def test_nothing_is_collected_inside_and_what_was_imported_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    before = gc.get_freeze_count()
    with large_imports():
        assert not gc.isenabled()
        with large_imports():
            importlib.import_module("colorsys")
        assert not gc.isenabled(), "the end of an inner block"
        assert gc.get_freeze_count() == before
    assert gc.isenabled()
    assert gc.get_freeze_count() > before


def test_a_block_that_imports_nothing_or_fails_leaves_the_collector_as_it_was() -> None:
    before = gc.get_freeze_count()

    def fail() -> None:
        with large_imports():
            raise ImportError("no such library")

    with pytest.raises(ImportError, match="no such library"):
        fail()
    assert gc.isenabled()
    assert gc.get_freeze_count() == before
