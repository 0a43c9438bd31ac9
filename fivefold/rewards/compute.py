"""Computes the rewards of completions: one after the other, in threads, or as coroutines of one event loop."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

from fivefold.rewards.reward import BuiltIn, NamedReward, describe
from fivefold.rewards.time_limit import OutOfTime, time_limit
from fivefold.types import Prompt

Result = TypeVar("Result")

N_AT_ONCE = 64
"""Most responses that a coroutine function judges at the same time: services refuse too many requests at once."""
CLEAN_UP_S = 1.0
"""Seconds that coroutines have to end when their time is over. Then the main thread is interrupted, because one of them
may block it."""


_LOOP = threading.Lock()
"""Held while the one event loop runs: an evaluation may need it beside the rewards of a stream."""


def compute_rewards(reward: NamedReward, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """Return one reward for each response, in their order.

    Args:
        reward: the reward.
        prompts: the prompt of each response.
        responses: the completions, decoded without special tokens.

    Raises:
        ValueError: not one prompt for each response, an error of the function, a value that is no finite number, or
            rewards that took longer than `reward.timeout_s`. A function that is not a coroutine function has a time
            limit on the main thread only.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts and {len(responses)} responses: give the prompt of each response")
    try:
        if reward.is_coroutine:
            return _in_event_loop(reward, prompts, responses)
        with time_limit(reward.timeout_s):
            return _in_threads(reward, reward.judge, prompts, responses)
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


def _in_event_loop(reward: NamedReward, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    with _LOOP, time_limit(None if reward.timeout_s is None else reward.timeout_s + CLEAN_UP_S):
        try:
            return _runner().run(_judge_together(reward, prompts, responses))
        except BaseException as error:
            # Tasks may be left in the loop, which nothing else must run on. The runner ends them with the process.
            _runner.cache_clear()
            if not isinstance(error, SystemExit):
                raise
            # The function has started a task, whose SystemExit an event loop hands on.
            raise ValueError(
                f"a task of the reward function {reward.name!r} raised SystemExit({error.code!r}), which would end "
                "the run: raise another exception"
            ) from error


async def _judge_together(reward: NamedReward, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
    """Return one reward for each response; after the first exception, the others are cancelled."""
    free = asyncio.Semaphore(N_AT_ONCE)
    in_work: dict[int, str] = {}
    tasks: list[asyncio.Task[float]] = []

    async def judge(index: int) -> float:
        async with free:
            in_work[index] = describe(prompts[index], responses[index])
            try:
                value = await reward.judge_coroutine(prompts[index], responses[index])
            except (ValueError, OutOfTime):
                # At once: the others may be about to start, and to block as this one did.
                _cancel(tasks)
                raise
            del in_work[index]
            return value

    tasks += [asyncio.create_task(judge(index)) for index in range(len(responses))]
    try:
        done, late = await asyncio.wait(tasks, timeout=reward.timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if late:
            out_of_time = OutOfTime()
            out_of_time.add_note(f"at {next(iter(in_work.values()))}")
            raise out_of_time
        return [task.result() for task in tasks]
    finally:
        _cancel(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)


def _cancel(tasks: Sequence[asyncio.Task[float]]) -> None:
    """Cancel the tasks that go on, each once: a second time would interrupt what they do to end."""
    for task in tasks:
        if not task.done() and not task.cancelling():
            task.cancel()


@cache
def _runner() -> asyncio.Runner:
    """Return the runner of an event loop that lasts as long as the process.

    Clients of services, which a module often keeps in a variable, can be used in one event loop only.
    """
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner
