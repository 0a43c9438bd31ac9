"""A time limit for functions that users write."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNAL = signal.SIGUSR2
"""This is not SIGALRM, because reward functions use that for their own time limits, as math-verify does."""


class OutOfTime(BaseException):
    """The time of `time_limit` is over. An `except Exception` of a reward function does not catch it."""


@contextmanager
def time_limit(seconds: float | None, more_s: Callable[[], float] = lambda: 0.0) -> Iterator[None]:
    """Interrupt the main thread with `OutOfTime` after `seconds` inside this context; None: never.

    When they have passed, `more_s` is asked for how many seconds to wait further; 0 or less: for none.

    A signal interrupts Python code and waiting (sleep, network, locks), but no call into C that neither releases the
    interpreter nor checks for signals. Only the main thread gets signals, so on other threads there is no limit.

    Raises:
        OutOfTime: the time is over.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    main, lock, ended = threading.get_ident(), threading.Lock(), threading.Event()

    def interrupt() -> None:
        while (further_s := more_s()) > 0:
            if ended.wait(further_s):
                return
        with lock:
            if not ended.is_set():
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
                ended.set()
        finally:
            # A signal that arrives just now raises here, while its handler is still set.
            signal.signal(_SIGNAL, before)


def _raise(number: int, frame: FrameType | None) -> None:
    raise OutOfTime
