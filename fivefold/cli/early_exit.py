"""A command that has not come to its end never has the exit code 0, though code in its process may ask for that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def never_early_success(code: int) -> Iterator[None]:
    """Inside the block, an `os._exit(0)` of this process exits with `code`, and says so.

    A reward function or a library that it imports may call it, and a job scheduler would take the run as finished.
    Children that were forked inside the block exit as they like.
    """
    exit_now, process = os._exit, os.getpid()

    def guarded(status: int) -> None:
        # The system keeps the lowest 8 bits.
        if status & 0xFF == 0 and os.getpid() == process:
            message = (
                f"\nError: code in this process has called os._exit({status}) before the command came to its end: exit "
                f"code {code}. Look at reward functions and at what they import\n"
            )
            os.write(2, message.encode())
            exit_now(code)
        exit_now(status)

    os._exit = guarded  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = exit_now
