"""Objects of code that users write: a recipe names them, and they are imported from a module or a file."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from fivefold.config.paths import user_path

_OTHER_CODE = (__file__, importlib.__file__, "<frozen importlib")
"""Beginnings of the file names of code that imports a user's code."""


def load_user_object(key: str, name: str, folder: Path | None = None) -> Any:
    """Import what a recipe names.

    Args:
        key: the recipe's key, for messages.
        name: `module:object` or `file.py:object`. A module is searched for among the installed ones first, and then in
            `folder`.
        folder: where modules and relative paths are searched for; None: the working folder.

    Raises:
        ValueError: there is no such object, or its module cannot be imported.
    """
    place, _, object_name = name.rpartition(":")
    folder = Path.cwd() if folder is None else folder
    is_file = place.endswith(".py") or "/" in place
    module = _load_file(key, name, place, folder) if is_file else _load_module(key, name, place, folder)
    if object_name not in vars(module):
        raise ValueError(f"{key}={name!r}: {module.__file__} defines no {object_name!r}")
    return vars(module)[object_name]


def user_traceback(error: BaseException, other_code: Sequence[str]) -> str:
    """Return the traceback of an error, from the first line of the user's code on.

    Args:
        error: what the user's code raised.
        other_code: beginnings of the file names of code that called it.
    """
    shown = traceback.TracebackException.from_exception(error)
    shown.stack = traceback.StackSummary.from_list(
        [frame for frame in shown.stack if not frame.filename.startswith(tuple(other_code))]
    )
    text = "".join(shown.format(chain=False)).rstrip()
    # With this heading, the message would look like a bug of Fivefold.
    return text.removeprefix("Traceback (most recent call last):\n")


@contextmanager
def one_process(what: str) -> Iterator[None]:
    """End a child process that code inside the block has forked, and in which it comes to its end.

    The child would continue as a second run in the same folder.

    Args:
        what: names the code, for the message.
    """
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            message = f"{what} has forked a process, and has returned or failed in it: end the child by os._exit\n"
            os.write(2, message.encode())
            os._exit(1)


def _load_module(key: str, name: str, module_name: str, folder: Path) -> ModuleType:
    searched = _searched(folder)
    try:
        return importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # The module's own imports may fail in the same way; its message then shows where.
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            raise _import_failed(f"{key}={name!r}: the import of its module failed", error) from error
    raise ValueError(f"{key}={name!r}: there is no module {missing!r}, installed or in {searched}")


def _load_file(key: str, name: str, path: str, folder: Path) -> ModuleType:
    file = (folder / user_path(path)).resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"{key}={name!r}: there is no Python file {file}: give the path of a file that ends in .py")
    _searched(file.parent)
    _searched(folder)
    # The name has a prefix, so that a file called math.py does not take the place of the module math.
    module_name = f"user_file_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _import_failed(f"{key}={name!r}: the import of its file failed", error) from error
    return module


def _import_failed(message: str, error: BaseException) -> ValueError:
    # SystemExit is turned into an error too: it would end a run without a word, and even with exit code 0.
    return ValueError(f"{message}:\n{user_traceback(error, _OTHER_CODE)}")


def _searched(folder: Path) -> str:
    """Add a folder to those in which modules are searched for; return it as a text.

    The folder is last, so that its files never hide an installed module. It stays on the path, because the user's
    module may import its neighbours later.
    """
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return str(folder)
