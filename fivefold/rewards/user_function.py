"""Reward functions that users write: they are imported, and called as a reward is."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from fivefold.config.user_code import load_user_object
from fivefold.rewards.reward import Judged
from fivefold.rewards.token_rewards import SCORE, TOKEN_IDS, TOKEN_REWARDS, TokenizedText

OF_VERL = "solution_str"
"""Argument by which a function that was written for verl is recognised: its arguments are given by their names there,
and it may return a mapping whose `score` is the reward."""
OF_GROUPS = "responses"
"""First argument by which a function is recognised that judges all responses to a prompt together."""
OF_TRL = "completions"
"""Argument by which a function that was written for TRL is recognised; only an error mentions it."""
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

    def __call__(self, response: Judged, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]) -> Any:
        told = {"data_source": data_source, "extra_info": extra_info, **self.kwargs}
        if self.reads_tokens:
            told[TOKEN_IDS] = _token_ids(response)
        if not self._is_of_verl:
            return self.function(response, ground_truth, **told)
        result = self.function(solution_str=response, ground_truth=ground_truth, **told)
        return _score_later(result) if self.is_coroutine else _score(result)

    @cached_property
    def _is_of_verl(self) -> bool:
        return OF_VERL in inspect.signature(self.function).parameters

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether the function gets the tokens of a response."""
        return TOKEN_IDS in inspect.signature(self.function).parameters

    @property
    def judges_groups(self) -> bool:
        """Whether the function judges all responses to a prompt together."""
        return next(iter(inspect.signature(self.function).parameters), None) == OF_GROUPS

    @property
    def is_coroutine(self) -> bool:
        """Whether the function is a coroutine function, or an object whose `__call__` is one."""
        return _is_of_kind(self.function, inspect.iscoroutinefunction)


def _token_ids(response: Judged) -> list[int] | list[list[int]]:
    """Return the sampled tokens of a response, or of each response of a group."""
    if isinstance(response, str):
        return list(cast(TokenizedText, response).token_ids)
    return [list(cast(TokenizedText, each).token_ids) for each in response]


def _score(result: Any) -> Any:
    if not isinstance(result, Mapping) or TOKEN_REWARDS in result:
        return result
    return result.get(SCORE, result)


async def _score_later(result: Awaitable[Any]) -> Any:
    return _score(await result)


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
    function = load_user_object("reward.fn", name)
    if not callable(function):
        raise ValueError(f"reward.fn={name!r} is a {type(function).__name__}, which cannot be called")
    return cast(Callable[..., Any], function)


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
            f"reward.fn={name!r} has no signature that could be checked ({error}): call it from your own function"
        ) from error
    check_call(name, signature, kwargs)


def check_call(name: str, signature: inspect.Signature, kwargs: Mapping[str, Any]) -> None:
    """Check that a function of `signature` can be called as a reward is, or as verl calls one.

    Raises:
        ValueError: it takes other arguments, or was written for TRL.
    """
    if taken := sorted({"data_source", "extra_info"} & set(kwargs)):
        raise ValueError(f"reward.kwargs has {taken}, which each row of the data set gives: choose another name")
    if TOKEN_IDS in kwargs:
        raise ValueError(f"reward.kwargs has {TOKEN_IDS!r}, which are the tokens of each response: choose another name")
    # Not left to the call: fn(prompts, completions, **kwargs) can be called as a reward is, and returns a list.
    if OF_TRL in signature.parameters and OF_TRL not in kwargs:
        raise ValueError(
            f"reward.fn={name!r} has the signature {signature}. TRL's functions judge lists of completions: this one "
            "gets one response, as fn(response, ground_truth, *, data_source, extra_info), and returns one number"
        )
    is_of_verl = OF_VERL in signature.parameters
    by_name = {"data_source": "", "extra_info": {}, **kwargs}
    by_name |= {OF_VERL: "", "ground_truth": ""} if is_of_verl else {}
    by_name |= {TOKEN_IDS: []} if TOKEN_IDS in signature.parameters else {}
    try:
        signature.bind(*(() if is_of_verl else ("response", "ground truth")), **by_name)
    except TypeError as error:
        arguments = ", ".join(
            [*(() if is_of_verl else ("response", "ground_truth")), *(f"{name}=" for name in by_name)]
        )
        raise ValueError(
            f"reward.fn={name!r} has the signature {signature}, but it is called as fn({arguments}): {error}"
        ) from error
