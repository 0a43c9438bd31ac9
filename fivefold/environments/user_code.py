"""Calls of a user's environment: in threads, so that a slow one holds up no other episode."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fivefold.config.user_code import load_user_object, one_process, user_traceback
from fivefold.environments.own_time import SPENT, OwnTime
from fivefold.types import Prompt

MOST_THREADS = 512
"""Most calls of synchronous functions at the same time; further ones wait. Agents wait for the model most of that time,
so that they may be many."""
_OTHER_CODE = (__file__, asyncio.__file__.removesuffix("__init__.py"), inspect.getfile(ThreadPoolExecutor))


class EnvironmentFailed(ValueError):
    """A user's environment raised an error, took too long, or returned something of another form."""

    def __init__(self, message: str, *, is_late: bool = False) -> None:
        super().__init__(message)
        self.is_late = is_late
        """Whether it took too long."""


class UserCalls:
    """Calls functions of a user's environment, each for at most so many seconds."""

    def __init__(self, key: str, name: str, timeout_s: float) -> None:
        """Prepare calls.

        Args:
            key: the recipe's key of the environment, for messages.
            name: its value.
            timeout_s: most seconds of a call.
        """
        self._what = f"{key}={name!r}"
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(MOST_THREADS, "environment")
        self._free = asyncio.Semaphore(MOST_THREADS)

    async def call(self, of: Prompt, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return what a function returns: a coroutine function's in the event loop, any other's in a thread.

        Args:
            of: the prompt of the episode.
            function: a function of the user's environment.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Raises:
            EnvironmentFailed: it raised an error, or took too long. The message names the prompt.
        """
        return await self.timed(OwnTime(self._timeout_s), of, function, *args, **kwargs)

    async def timed(self, own: OwnTime, of: Prompt, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Do the same as `call`, with a limit that does not count all time."""
        try:
            if inspect.iscoroutinefunction(function):
                async with own.limited():
                    with one_process(f"{self._what}: {function.__name__}"):
                        return await function(*args, **kwargs)
            async with self._free, own.limited():  # the wait for a thread does not count
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, self._in_one_process, function, args, kwargs)
        except TimeoutError as error:
            if not isinstance(error.__cause__, asyncio.CancelledError):
                raise self._raised(of, function, error) from error
            raise EnvironmentFailed(
                f"{self._where(of, function)} took longer than environment.timeout_s={self._timeout_s:g} s: let "
                "it end by itself before, or raise environment.timeout_s",
                is_late=True,
            ) from None
        except Exception as error:  # a user's code may raise anything; the run ends with it
            raise self._raised(of, function, error) from error
        finally:
            if (spent := SPENT.get()) is not None:
                spent.seconds += own.spent_s

    def _in_one_process(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with one_process(f"{self._what}: {function.__name__}"):
            return function(*args, **kwargs)

    def other_form(self, prompt: Prompt, function: Callable[..., Any], value: object, wanted: str) -> EnvironmentFailed:
        """Return the error that a function returned `value`, which is not as `wanted`."""
        return self.failed(prompt, function, f"returned {value!r:.200}: it must return {wanted}")

    def failed(self, prompt: Prompt, function: Callable[..., Any], what: str) -> EnvironmentFailed:
        """Return the error that a function did `what`."""
        return EnvironmentFailed(f"{self._where(prompt, function)} {what}")

    def _raised(self, prompt: Prompt, function: Callable[..., Any], error: Exception) -> EnvironmentFailed:
        return self.failed(prompt, function, f"failed:\n{user_traceback(error, _OTHER_CODE)}")

    def _where(self, prompt: Prompt, function: Callable[..., Any]) -> str:
        return f"{self._what}: {function.__name__}, in an episode of prompt {prompt.index + 1},"


def load_class(key: str, name: str, methods: Mapping[str, tuple[object, ...]]) -> type[Any]:
    """Import a user's class, and check its methods.

    Args:
        key: the recipe's key, for messages.
        name: `module:Class` or `file.py:Class`.
        methods: what each method is called with, besides `reset`'s values of a row.

    Raises:
        ValueError: there is no such class, it cannot be made without arguments, or a method is missing or takes other
            arguments.
    """
    found = load_user_object(key, name)
    if not inspect.isclass(found):
        raise ValueError(f"{key}={name!r} is a {type(found).__name__}: name a class")
    _check_signature(key, f"{name}()", found, ())
    for method, args in methods.items():
        function = getattr(found, method, None)
        if not callable(function):
            raise ValueError(f"{key}={name!r} has no method {method!r}: it needs {', '.join(methods)}")
        _check_signature(key, f"{name}.{method}", function, (None, *args))
    return found


def _check_signature(key: str, what: str, function: Callable[..., Any], args: tuple[object, ...]) -> None:
    signature = inspect.signature(function)
    named = {name: None for name in ROW if _takes(signature, name)} if what.endswith(".reset") else {}
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        raise ValueError(f"{key}: {what}{signature} cannot be called: {error}. See docs/agents.md") from error


ROW = ("prompt", "messages", "ground_truth", "data_source", "extra_info", "seed")
"""Values of a row that a method gets, each if it has an argument of that name."""


def row_arguments(function: Callable[..., Any], prompt: Prompt, seed: int) -> dict[str, Any]:
    """Return the values of a row, and the seed of an episode, for which a function has arguments."""
    signature = inspect.signature(function)
    values = {
        "prompt": prompt.text,
        "messages": [dict(message) for message in prompt.chat],
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
        "extra_info": prompt.extra_info,
        "seed": seed,
    }
    return {name: value for name, value in values.items() if _takes(signature, name)}


def _takes(signature: inspect.Signature, name: str) -> bool:
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds or name in signature.parameters
