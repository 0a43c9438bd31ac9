"""Pickles of objects whose classes belong to a server, which the trainer's environment may lack."""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def pickled(value: Any, *classes: type) -> bytes:
    """Return the pickle of `value`, in which each of `classes` is named by its `__module__`, installed or not."""
    with _findable(classes):
        return pickle.dumps(value)


@contextmanager
def _findable(classes: tuple[type, ...]) -> Iterator[None]:
    """Let pickle find the classes in the modules that they name, inside the block."""
    before = dict(sys.modules)
    for cls in classes:
        stand_in = types.ModuleType(cls.__module__)
        setattr(stand_in, cls.__name__, cls)
        parts = cls.__module__.split(".")
        for n in range(1, len(parts)):
            parent = ".".join(parts[:n])
            sys.modules.setdefault(parent, types.ModuleType(parent))
        sys.modules[cls.__module__] = stand_in
    try:
        yield
    finally:
        for name in sys.modules.keys() - before.keys():
            if any(cls.__module__.startswith(name) for cls in classes):
                del sys.modules[name]
        for cls in classes:
            if cls.__module__ in before:
                sys.modules[cls.__module__] = before[cls.__module__]
