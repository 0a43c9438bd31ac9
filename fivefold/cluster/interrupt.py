"""Signals: the first Ctrl-C, SIGTERM or SIGHUP ends the run in order, the second at once; SIGCHLD is not ignored.

setup           the first raises KeyboardInterrupt
training loop   the first asks for the end, and the loop ends after the step in progress
anywhere        the second kills this process and its children

SIGHUP means that the terminal was closed. Shell and kernel may both send it, so it never counts as the second signal.
If it is ignored, as under `nohup`, it stays ignored.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 130
"""Exit code: 128 + SIGINT, as in shells."""

SHOW_CURSOR = b"\x1b[?25h"


def keep_exit_statuses() -> None:
    """Stop ignoring SIGCHLD. While it is ignored, the kernel drops exit statuses, and every child seems to end with 0.

    A process may inherit this from a service manager or a container's first process, and Ray sets it in every process.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside the block, the first signal to end raises KeyboardInterrupt; the next kills this process and its children.

    It is for the main thread only, and wraps a whole command, because nothing inside may set other handlers.
    """
    # The handler needs psutil. It is imported before the handler is set, because a signal may come in the middle of
    # another import.
    import psutil  # noqa: F401

    def end() -> None:
        _tell("Interrupted: ending all processes. Once more ends them without waiting.")
        raise KeyboardInterrupt

    with _handling(end) as handler:
        yield
    if handler.count:
        # Python drops an exception that a handler raises inside one of Python's callbacks, for example at a fork.
        raise KeyboardInterrupt


class EndRequest:
    """Whether the run has been asked to end."""

    def __init__(self) -> None:
        self.made = False


@contextmanager
def ending_after_a_step() -> Iterator[EndRequest]:
    """Inside the block, the first signal makes the request; the next kills this process and its children.

    Only the main thread can handle signals. In another thread, the block changes nothing.
    """
    request = EndRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask() -> None:
        request.made = True
        _tell("Asked to end: the run saves and ends after this step. Once more ends it at once.")

    outer = signal.getsignal(signal.SIGTERM)
    request.made = isinstance(outer, _Handler) and outer.count > 0
    with _handling(ask):
        yield request


class _Handler:
    """Calls `first` at the first signal; the next kills this process and its children."""

    def __init__(self, first: Callable[[], None]) -> None:
        self._first = first
        self.count = 0
        """Number of signals so far."""
        self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]
        """Standard streams that are a terminal. A closed terminal no longer looks like one."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _silence(self._terminals)
            if self.count:
                return
        self.count += 1
        if self.count > 1:
            _end_at_once()
        self._first()


@contextmanager
def _handling(first: Callable[[], None]) -> Iterator[_Handler]:
    """Let a `_Handler` of `first` handle SIGINT and SIGTERM inside the block, and SIGHUP unless it is ignored."""
    handler = _Handler(first)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield handler
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _silence(streams: Sequence[int]) -> None:
    """Discard further output on standard streams: writing to a closed terminal is an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _tell(words: str) -> None:
    # Ctrl-C may have ended the reader of the output, too, as in `fivefold train ... 2>&1 | tee log`.
    with suppress(OSError):
        # print is not reentrant, and the signal may come in the middle of one.
        os.write(sys.stderr.fileno(), f"\n{words}\n".encode())


def _end_at_once() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    _show_cursors()
    _tell("Ended at once: what was not saved is lost.")
    os._exit(INTERRUPTED)


def _show_cursors() -> None:
    """Show the cursor, which a live status line hides, on each terminal among the standard streams."""
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return
    for stream in (1, 2):
        with suppress(OSError):
            if os.isatty(stream):
                os.write(stream, SHOW_CURSOR)
