"""A limit on the time of a function that is not ours."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNAL = signal.SIGUSR2
"""Not SIGALRM: reward functions use it for limits of their own, as math-verify does."""


class OutOfTime(BaseException):
    """Raised inside `time_limit`, wherever the main thread is. No `except Exception` of a reward function takes it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Inside, the main thread is interrupted by `OutOfTime` after `seconds`; None: never.

    A signal interrupts what waits (sleep, network, locks) and Python code, but no call into C that neither lets go of
    the interpreter nor looks for signals. Only the main thread has signals: on another one there is no limit.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    main, lock, is_over = threading.get_ident(), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not is_over:
                signal.pthread_kill(main, _SIGNAL)

    before = signal.signal(_SIGNAL, _raise)
    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        try:
            with lock:
                is_over = True
        finally:
            # A signal that has just come raises here, before the handler is gone.
            signal.signal(_SIGNAL, before)


def _raise(number: int, frame: FrameType | None) -> None:
    raise OutOfTime
