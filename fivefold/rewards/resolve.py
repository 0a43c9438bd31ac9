"""From the recipe's `reward` section to a function, and from completions to rewards."""

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

    A function of your own has this signature, with `reward.kwargs` as further keyword arguments:

        def word_count(response, ground_truth, *, data_source, extra_info, target=10):
            return -abs(len(response.split()) - target)
    """

    def __call__(self, response: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]) -> float:
        """
        Args:
            response: the completion, decoded without special tokens.
            ground_truth: what the data set holds for the prompt.
            data_source: name of the data set or task the prompt comes from.
            extra_info: the data set's `extra_info`.

        Returns:
            A finite number; higher is better.
        """


@dataclass(frozen=True)
class UserReward:
    """A function of the user's with `reward.kwargs` bound to it."""

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]

    def __call__(self, response: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]) -> float:
        return self.function(response, ground_truth, data_source=data_source, extra_info=extra_info, **self.kwargs)


@dataclass(frozen=True)
class NamedReward:
    """A reward and the name that errors call it by."""

    name: str
    reward: Reward
    timeout_s: float | None = None
    """Most seconds that all rewards of a step may take; None: no limit."""

    @property
    def n_at_once(self) -> int:
        """How many responses may be judged at the same time. A function of the user's need not be safe for threads."""
        return self.reward.n_at_once if isinstance(self.reward, MathReward) else 1

    def judge(self, prompt: Prompt, response: str) -> float:
        """The reward of one response.

        Raises:
            ValueError: the function returned something else than a finite number.
            Exception: whatever the function raised, with a note that names function and prompt.
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
    """The reward that a recipe names: `exact_match`, `math`, or a `module:function` of the user's.

    Modules are looked for among the installed ones, then in the working folder.

    Args:
        timeout_s: `scheduler.timeout_s`, the most seconds that all rewards of a step may take; None: no limit.

    Raises:
        ValueError: no such function, or one that cannot be called as `Reward` asks.
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
    """One reward for each response, in their order; `prompts` holds the prompt that each answers.

    Raises:
        ValueError: they took longer than `reward.timeout_s` (on the main thread; elsewhere there is no limit).
        Exception: what `NamedReward.judge` raises.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts and {len(responses)} responses: give the prompt of each response")
    try:
        with time_limit(reward.timeout_s):
            return _in_threads(reward.judge, reward.n_at_once, prompts, responses)
    except OutOfTime as error:
        where = "".join(f", being {note}" for note in getattr(error, "__notes__", ()))
        raise ValueError(
            f"the reward function {reward.name!r} took longer than scheduler.timeout_s={reward.timeout_s:g} s for "
            f"{len(responses)} responses{where}. Give it a limit of its own, or raise scheduler.timeout_s"
        ) from error


def check_ground_truths(reward: NamedReward, prompts: Sequence[Prompt]) -> None:
    """Find out before a run whether every ground truth is one that the reward can compare answers with.

    Functions of the user's are not asked: they alone know what they accept.

    Raises:
        ValueError: naming the prompt, its ground truth and what is wrong with it.
    """
    check = reward.reward.check_ground_truth if isinstance(reward.reward, (ExactMatch, MathReward)) else None
    if check is None:
        return
    # Many data sets have few distinct answers.
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
    """`map`; the first exception, in order, leaves the rest undone."""
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
        # Last, so that files in the working folder never hide an installed module; for good, because the module may
        # import its neighbours later.
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
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: tensors of several elements
        return None


def _describe(prompt: Prompt, response: str) -> str:
    source = f"data_source {prompt.data_source!r}, ground truth {prompt.ground_truth!r}"
    return f"prompt {prompt.index} ({source}), response {response[:200]!r}"
