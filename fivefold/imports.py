"""Imports of large libraries, without the garbage collections that they would set off."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Import torch, transformers or Megatron-Core inside the block, in three quarters of the time.

    They make a million objects that stay. Each of the collector's passes over all objects takes tenths of a second,
    and there are several in an import. None starts inside the block, and none visits what exists at its end.
    """
    if not gc.isenabled():  # a block around this one
        yield
        return
    n_before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > n_before:
            gc.freeze()
        gc.enable()
