"""Computes the rewards of completions: one after the other, in threads, or as coroutines of one event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fivefold.rewards.event_loop import judge_together
from fivefold.rewards.reward import BuiltIn, NamedReward
from fivefold.rewards.time_limit import OutOfTime, time_limit
from fivefold.types import Prompt

Result = TypeVar("Result")


def compute_rewards(reward: NamedReward, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """Return one reward for each response, in their order.

    Args:
        reward: the reward.
        prompts: the prompt of each response.
        responses: the completions, decoded without special tokens.

    Raises:
        ValueError: not one prompt for each response, an error of the function, a value that is no finite number, or
            rewards that took longer than `reward.timeout_s`. A coroutine function may take it for each response; any
            other has the limit for all of them together, and on the main thread only.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts and {len(responses)} responses: give the prompt of each response")
    if reward.is_coroutine:
        return judge_together(reward, prompts, responses)
    try:
        with time_limit(reward.timeout_s):
            return _in_threads(reward, reward.judge, prompts, responses)
    except OutOfTime as error:
        notes = getattr(error, "__notes__", ())
        raise reward.too_slow(f"{len(responses)} responses", notes) from error


def check_ground_truths(reward: NamedReward, prompts: Sequence[Prompt]) -> None:
    """Refuse, before a run, ground truths with which the reward cannot compare answers.

    A user's function is not asked: it alone knows which ground truths it accepts.

    Raises:
        ValueError: a ground truth that cannot be compared, with its prompt.
    """
    if not isinstance(reward.reward, BuiltIn):
        return
    check = reward.reward.check_ground_truth
    # Many data sets have few distinct answers: each is checked once, at its first prompt.
    first = {repr(prompt.ground_truth): prompt for prompt in reversed(prompts)}

    def check_one(prompt: Prompt) -> None:
        try:
            check(prompt.ground_truth)
        except ValueError as error:
            raise ValueError(
                f"prompt {prompt.index + 1} ({prompt.text[-200:]!r}): the reward {reward.name!r} cannot judge its "
                f"answers: {error}"
            ) from error

    _in_threads(reward, check_one, list(first.values())[::-1])


def _in_threads(reward: NamedReward, function: Callable[..., Result], *arguments: Sequence[Any]) -> list[Result]:
    """Return `function` of each set of arguments, in order; after the first exception, the rest is not called.

    At most `reward.n_threads` calls are in progress, those that other threads make at the same time among them.
    """

    def in_turn(*each: Any) -> Result:
        with reward.free:
            return function(*each)

    if reward.n_threads == 1:
        return list(map(in_turn, *arguments))
    with ThreadPoolExecutor(reward.n_threads) as pool:
        return list(pool.map(in_turn, *arguments))
