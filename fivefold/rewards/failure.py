"""Errors of code that users write, as messages that show the place in it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fivefold.config.user_code import user_traceback
from fivefold.rewards.time_limit import OutOfTime

_OTHER_CODE = (f"{Path(__file__).parent}/", importlib.__file__, "<frozen importlib")
"""Beginnings of the file names of code that calls or imports a user's code."""


@contextmanager
def explaining(message: Callable[[], str], passes: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Turn what a user's code raises inside this context into a ValueError with `message` and its traceback.

    SystemExit is turned too: it would end a run without a word, and even with exit code 0. KeyboardInterrupt and
    `OutOfTime` pass, because the user's code does not raise them itself.

    Args:
        message: returns what failed, and on what. It is called only if something was raised.
        passes: returns whether other exceptions pass too.

    Raises:
        ValueError: whatever the block raised.
    """
    try:
        yield
    except (KeyboardInterrupt, OutOfTime):
        raise
    except BaseException as error:
        if passes():
            raise
        raise ValueError(f"{message()}:\n{user_traceback(error, _OTHER_CODE)}") from error
