"""From the recipe's `reward` section to a function, and from completions to rewards."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from fivefold.config.schema import RewardConfig
from fivefold.rewards.exact_match import ExactMatch
from fivefold.rewards.math_reward import MathReward
from fivefold.types import Prompt

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


def resolve_reward(config: RewardConfig) -> NamedReward:
    """The reward that a recipe names: `exact_match`, `math`, or a `module:function` of the user's.

    Modules are looked for among the installed ones, then in the working folder.

    Raises:
        ValueError: no such function, or one that cannot be called as `Reward` asks.
    """
    if config.fn in BUILT_IN:
        kind = BUILT_IN[config.fn]
        known = sorted(field.name for field in fields(kind))
        if unknown := sorted(set(config.kwargs) - set(known)):
            raise ValueError(f"reward.kwargs has {unknown}, but the reward {config.fn!r} takes {known}")
        return NamedReward(config.fn, TypeAdapter(kind).validate_python(config.kwargs))
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
    return NamedReward(config.fn, UserReward(function, config.kwargs))


def compute_rewards(reward: NamedReward, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """One reward for each response; `prompts` holds the prompt that each answers."""
    return [reward.judge(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]


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
    except (TypeError, ValueError):
        return None


def _describe(prompt: Prompt, response: str) -> str:
    source = f"data_source {prompt.data_source!r}, ground truth {prompt.ground_truth!r}"
    return f"prompt {prompt.index} ({source}), response {response[:200]!r}"
