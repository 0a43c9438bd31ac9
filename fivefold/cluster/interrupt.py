"""Signals: the first Ctrl-C or SIGTERM ends the run in order, the second at once; SIGCHLD is not ignored."""

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
    """Stop ignoring SIGCHLD. While it is ignored, the kernel drops exit statuses, and every child seems to end with 0.

    A process may inherit this from a service manager or a container's first process, and Ray sets it in every process.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside the block, the first SIGINT or SIGTERM raises KeyboardInterrupt; the next kills this process and children.

    It is for the main thread only, and wraps a whole command, because nothing inside may set other handlers.
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
        # print is not reentrant, and the signal may come in the middle of one.
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
