"""Finds the reward function that a recipe names, and computes the rewards of completions with it."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter

from fivefold.config.schema import RewardConfig
from fivefold.rewards.exact_match import ExactMatch
from fivefold.rewards.math_reward import MathReward
from fivefold.rewards.time_limit import OutOfTime, time_limit
from fivefold.types import Prompt

Result = TypeVar("Result")

BUILT_IN: Mapping[str, type[ExactMatch] | type[MathReward]] = {"exact_match": ExactMatch, "math": MathReward}


class Reward(Protocol):
    """Judges one response.

    A user's own function has this signature, with `reward.kwargs` as further keyword arguments:

        def word_count(response, ground_truth, *, data_source, extra_info, target=10):
            return -abs(len(response.split()) - target)
    """

    def __call__(self, response: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]) -> float:
        """Return the reward of one response.

        Args:
            response: the completion, decoded without special tokens.
            ground_truth: the ground truth of the prompt in the data set.
            data_source: name of the data set or task that the prompt comes from.
            extra_info: the `extra_info` of the prompt in the data set.

        Returns:
            A finite number; higher is better.
        """


@dataclass(frozen=True)
class UserReward:
    """A user's function with its `reward.kwargs`."""

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]

    def __call__(self, response: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]) -> float:
        return self.function(response, ground_truth, data_source=data_source, extra_info=extra_info, **self.kwargs)


@dataclass(frozen=True)
class NamedReward:
    """A reward with its name, which errors mention."""

    name: str
    reward: Reward
    timeout_s: float | None = None
    """Most seconds that all rewards of a step may take; None: no limit."""

    @property
    def n_at_once(self) -> int:
        """Number of responses to judge at the same time: 1 for a user's function, which may not be thread-safe."""
        return self.reward.n_at_once if isinstance(self.reward, MathReward) else 1

    def judge(self, prompt: Prompt, response: str) -> float:
        """Return the reward of one response.

        Raises:
            ValueError: the function returned something else than a finite number.
            Exception: the function's own exception, with a note that names the function and the prompt.
        """
        try:
            value = self.reward(
                response, prompt.ground_truth, data_source=prompt.data_source, extra_info=prompt.extra_info
            )
        except OutOfTime as error:
            error.add_note(f"at {_describe(prompt, response)}")
            raise
        except Exception as error:
            error.add_note(f"raised by the reward function {self.name!r} on {_describe(prompt, response)}")
            raise
        number = _as_number(value)
        if number is None or not math.isfinite(number):
            raise ValueError(
                f"the reward function {self.name!r} returned {value!r} on {_describe(prompt, response)}: "
                "it must return a finite number"
            )
        return number


def resolve_reward(config: RewardConfig, timeout_s: float | None = None) -> NamedReward:
    """Return the reward that a recipe names: `exact_match`, `math`, or a user's `module:function`.

    A module is searched for among the installed ones first, and then in the working folder.

    Args:
        config: the recipe's `reward` section.
        timeout_s: `scheduler.timeout_s`, the most seconds that all rewards of a step may take; None: no limit.

    Raises:
        ValueError: there is no such function, or it cannot be called with the arguments of `Reward`.
    """
    if config.fn in BUILT_IN:
        kind = BUILT_IN[config.fn]
        known = sorted(field.name for field in fields(kind))
        if unknown := sorted(set(config.kwargs) - set(known)):
            raise ValueError(f"reward.kwargs has {unknown}, but the reward {config.fn!r} takes {known}")
        return NamedReward(config.fn, TypeAdapter(kind).validate_python(config.kwargs), timeout_s)
    function = _import(config.fn)
    try:
        inspect.signature(function).bind("response", "ground truth", data_source="", extra_info={}, **config.kwargs)
    except TypeError as error:
        arguments = ", ".join(
            ["response", "ground_truth", "data_source=", "extra_info=", *(f"{key}=" for key in config.kwargs)]
        )
        raise ValueError(
            f"reward.fn={config.fn!r} has the signature {inspect.signature(function)}, but it is called as "
            f"fn({arguments}): {error}"
        ) from error
    return NamedReward(config.fn, UserReward(function, config.kwargs), timeout_s)


def compute_rewards(reward: NamedReward, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """Return one reward for each response, in their order.

    Args:
        reward: the reward.
        prompts: the prompt of each response.
        responses: the completions, decoded without special tokens.

    Raises:
        ValueError: not one prompt for each response, or rewards that took longer than `reward.timeout_s`. Only on the
            main thread is there a limit.
        Exception: see `NamedReward.judge`.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts and {len(responses)} responses: give the prompt of each response")
    try:
        with time_limit(reward.timeout_s):
            return _in_threads(reward.judge, reward.n_at_once, prompts, responses)
    except OutOfTime as error:
        where = "".join(f", and was {note}" for note in getattr(error, "__notes__", ()))
        raise ValueError(
            f"the reward function {reward.name!r} took longer than scheduler.timeout_s={reward.timeout_s:g} s for "
            f"{len(responses)} responses{where}. Give it a limit of its own, or raise scheduler.timeout_s"
        ) from error


def check_ground_truths(reward: NamedReward, prompts: Sequence[Prompt]) -> None:
    """Refuse, before a run, ground truths with which the reward cannot compare answers.

    A user's function is not asked: it alone knows which ground truths it accepts.

    Raises:
        ValueError: a ground truth that cannot be compared, with its prompt.
    """
    check = reward.reward.check_ground_truth if isinstance(reward.reward, (ExactMatch, MathReward)) else None
    if check is None:
        return
    # Many data sets have few distinct answers: each is checked once, at its first prompt.
    first = {repr(prompt.ground_truth): prompt for prompt in reversed(prompts)}

    def check_one(prompt: Prompt) -> None:
        try:
            check(prompt.ground_truth)
        except ValueError as error:
            raise ValueError(
                f"prompt {prompt.index} ({prompt.text[-200:]!r}): the reward {reward.name!r} cannot judge its answers: "
                f"{error}"
            ) from error

    _in_threads(check_one, reward.n_at_once, list(first.values())[::-1])


def _in_threads(function: Callable[..., Result], n_threads: int, *arguments: Sequence[Any]) -> list[Result]:
    """Return `function` of each set of arguments, in order; after the first exception, the rest is not called."""
    if n_threads == 1:
        return list(map(function, *arguments))
    with ThreadPoolExecutor(n_threads) as pool:
        return list(pool.map(function, *arguments))


def _import(name: str) -> Callable[..., Any]:
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"reward.fn={name!r} is neither one of {sorted(BUILT_IN)} nor of the form module:function")
    folder = str(Path.cwd())
    if folder not in sys.path:
        # The folder is last, so that its files never hide an installed module. It stays on the path, because the module
        # may import its neighbours later.
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"reward.fn={name!r}: there is no module {error.name!r}, installed or in {folder}") from error
    if function_name not in vars(module):
        raise ValueError(f"reward.fn={name!r}: {module.__file__} defines no {function_name!r}")
    function = vars(module)[function_name]
    if not callable(function):
        raise ValueError(f"reward.fn={name!r} is a {type(function).__name__}, which cannot be called")
    return function


def _as_number(value: object) -> float | None:
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # tensors of several elements raise RuntimeError
        return None


def _describe(prompt: Prompt, response: str) -> str:
    source = f"data_source {prompt.data_source!r}, ground truth {prompt.ground_truth!r}"
    return f"prompt {prompt.index} ({source}), response {response[:200]!r}"
