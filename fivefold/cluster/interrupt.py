"""Signals: the first Ctrl-C or SIGTERM ends the run in order, the second at once; SIGCHLD is not ignored.

set-up          the first raises KeyboardInterrupt
training loop   the first asks for the end, and the loop ends after the step in progress
anywhere        the second kills this process and its children
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
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

    def end() -> None:
        _tell("Interrupted: ending all processes. Once more ends them without waiting.")
        raise KeyboardInterrupt

    with _handling(end):
        yield


class EndRequest:
    """Whether the run has been asked to end."""

    def __init__(self) -> None:
        self.made = False


@contextmanager
def ending_after_a_step() -> Iterator[EndRequest]:
    """Inside the block, the first SIGINT or SIGTERM makes the request; the next kills this process and its children.

    Only the main thread can handle signals; in another thread the block changes nothing.
    """
    request = EndRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask() -> None:
        request.made = True
        _tell("Asked to end: the run saves and ends after this step. Once more ends it at once.")

    with _handling(ask):
        yield request


@contextmanager
def _handling(first: Callable[[], None]) -> Iterator[None]:
    """Call `first` at the first SIGINT or SIGTERM inside the block; the next kills this process and its children."""
    count = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            _end_at_once()
        first()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(words: str) -> None:
    # print is not reentrant, and the signal may come in the middle of one.
    os.write(sys.stderr.fileno(), f"\n{words}\n".encode())


def _end_at_once() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(INTERRUPTED)
