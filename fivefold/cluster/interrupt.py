"""Signals: Ctrl-C and SIGTERM, of which the first ends the run in order and the second at once, and SIGCHLD."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit code: 128 + SIGINT, as shells have it."""


def keep_exit_statuses() -> None:
    """Undo an ignored SIGCHLD, with which the kernel forgets how a child ended: each seems to have ended with status 0.

    It may be inherited, from a service manager or a container's first process, and Ray sets it in every process.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise KeyboardInterrupt once; the next one kills this process and all below it.

    Only for the main thread, and only around a whole command: it is the program's last word on signals.
    """
    # The handler needs psutil. It is imported before the handler is set, because a signal may come in the middle of
    # another import.
    import psutil  # noqa: F401

    count = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            _end_at_once()
        # Not print: the signal may have come in the middle of one.
        os.write(sys.stderr.fileno(), b"\nInterrupted: ending all processes. Once more ends them without waiting.\n")
        raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_at_once() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(INTERRUPTED)
