"""Reward functions that users write: they are imported, and called as a reward is."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fivefold.config.paths import user_path
from fivefold.rewards.failure import explaining

_NO_NUMBER: Mapping[str, Callable[[object], bool]] = {
    "a generator function": inspect.isgeneratorfunction,
    "an asynchronous generator function": inspect.isasyncgenfunction,
}
"""Kinds of functions whose call returns no number, and how each is recognised."""


@dataclass(frozen=True)
class UserReward:
    """A user's function with its `reward.kwargs`."""

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]

    def __call__(
        self, response: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]
    ) -> float | Awaitable[float]:
        return self.function(response, ground_truth, data_source=data_source, extra_info=extra_info, **self.kwargs)

    @property
    def is_coroutine(self) -> bool:
        """Whether the function is a coroutine function, or an object whose `__call__` is one."""
        return _is_of_kind(self.function, inspect.iscoroutinefunction)


def load_user_reward(name: str, kwargs: Mapping[str, Any]) -> UserReward:
    """Import a user's function, and check that it can be called with the arguments of a reward.

    Args:
        name: `module:function` or `file.py:function`. A module is searched for among the installed ones first, and then
            in the working folder.
        kwargs: further keyword arguments of the function.

    Raises:
        ValueError: there is no such function, its module cannot be imported, the function returns no number, or it
            cannot be called with these arguments.
    """
    function = _load(name)
    _check_kind(name, function)
    _check_arguments(name, function, kwargs)
    return UserReward(function, kwargs)


def _load(name: str) -> Callable[..., Any]:
    place, _, function_name = name.rpartition(":")
    module = _load_file(name, place) if place.endswith(".py") or "/" in place else _load_module(name, place)
    if function_name not in vars(module):
        raise ValueError(f"reward.fn={name!r}: {module.__file__} defines no {function_name!r}")
    function = vars(module)[function_name]
    if not callable(function):
        raise ValueError(f"reward.fn={name!r} is a {type(function).__name__}, which cannot be called")
    return function


def _load_module(name: str, module_name: str) -> ModuleType:
    folder = _searched(Path.cwd())
    with explaining(lambda: f"reward.fn={name!r}: the import of its module failed"):
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            is_itself = error.name is not None and f"{module_name}.".startswith(f"{error.name}.")
            if not is_itself:
                raise
            missing = error.name
    raise ValueError(f"reward.fn={name!r}: there is no module {missing!r}, installed or in {folder}")


def _load_file(name: str, path: str) -> ModuleType:
    file = user_path(path).resolve()
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(
            f"reward.fn={name!r}: there is no Python file {file}: give the path of a file that ends in .py"
        )
    _searched(file.parent)
    _searched(Path.cwd())
    # The name has a prefix, so that a file called math.py does not take the place of the module math.
    module_name = f"reward_file_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    with explaining(lambda: f"reward.fn={name!r}: the import of its file failed"):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    return module


def _searched(folder: Path) -> str:
    """Add a folder to those in which modules are searched for; return it as a text.

    The folder is last, so that its files never hide an installed module. It stays on the path, because the user's
    module may import its neighbours later.
    """
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return str(folder)


def _check_kind(name: str, function: Callable[..., Any]) -> None:
    if inspect.isclass(function):
        raise ValueError(f"reward.fn={name!r} is a class, whose call returns no number: give a function or an object")
    for kind, is_kind in _NO_NUMBER.items():
        if _is_of_kind(function, is_kind):
            raise ValueError(
                f"reward.fn={name!r} is {kind}, whose call returns no number: use return in place of yield"
            )


def _is_of_kind(function: Callable[..., Any], is_kind: Callable[[object], bool]) -> bool:
    """Return whether a function, or the `__call__` of an object that is called like one, is of a kind."""
    return is_kind(function) or is_kind(function.__call__)  # type: ignore[operator]


def _check_arguments(name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reward.fn={name!r} has no signature that could be checked ({error}): call it from a function of your own"
        ) from error
    check_call(name, signature, kwargs)


def check_call(name: str, signature: inspect.Signature, kwargs: Mapping[str, Any]) -> None:
    """Check that a function of `signature` can be called as a reward is.

    Raises:
        ValueError: it takes other arguments.
    """
    if taken := sorted({"data_source", "extra_info"} & set(kwargs)):
        raise ValueError(f"reward.kwargs has {taken}, which each row of the data set gives: choose another name")
    try:
        signature.bind("response", "ground truth", data_source="", extra_info={}, **kwargs)
    except TypeError as error:
        arguments = ", ".join(["response", "ground_truth", "data_source=", "extra_info=", *(f"{k}=" for k in kwargs)])
        raise ValueError(
            f"reward.fn={name!r} has the signature {signature}, but it is called as fn({arguments}): {error}"
        ) from error
