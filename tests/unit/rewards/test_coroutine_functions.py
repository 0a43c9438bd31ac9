"""Rewards that are coroutine functions: they judge together, within one limit of number and one of time."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest

from fivefold.config.schema.rewards import RewardConfig
from fivefold.rewards import event_loop
from fivefold.rewards.event_loop import N_AT_ONCE
from fivefold.rewards.resolve import resolve_reward
from fivefold.rewards.reward import NamedReward
from fivefold.rewards.reward_set import RewardSet, compute_rewards
from fivefold.types import Prompt
from tests.unit.rewards.conftest import LONGEST_S, Write, begin_limits_at, judge

MODULE = """\
import asyncio, os, sys, threading
children = []
begun, may_end = threading.Event(), threading.Event()
at_once = most = ended = 0
loops = set()
async def late(response, ground_truth, *, data_source, extra_info):
    # The last one ends first.
    global at_once, most
    at_once += 1
    most = max(most, at_once)
    loops.add(asyncio.get_running_loop())
    await asyncio.sleep(0.2 - int(response) / 1000)
    at_once -= 1
    return int(response)
async def hanging(response, ground_truth, **_):
    global ended
    try:
        await asyncio.sleep(1000 if response == "slow" else 0)
    finally:
        ended += 1
    return 1.0
async def blocking(response, ground_truth, **_):
    begun.set()
    may_end.wait(1000)
async def stubborn(response, ground_truth, **_):
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass
async def forking(response, ground_truth, **_):
    await asyncio.sleep(0)
    if (child := os.fork()) == 0:
        await asyncio.sleep(0)
        return 1.0
    children.append(child)
    return 1.0
async def text(response, ground_truth, **_): return "1.0"
async def raising(response, ground_truth, **_):
    await hanging("slow" if response == "good" else "", ground_truth)
    return 1 / 0
async def ending(response, ground_truth, **_): sys.exit(0)
async def cancelled(response, ground_truth, **_): raise asyncio.CancelledError
async def interrupted(response, ground_truth, **_): raise KeyboardInterrupt
async def exit(): sys.exit(0)
async def ending_task(response, ground_truth, **_): await asyncio.create_task(exit())
class Judge:
    async def __call__(self, response, ground_truth, *, data_source, extra_info): return 0.25
judge = Judge()
"""


@pytest.fixture(autouse=True)
def module(write_module: Write) -> None:
    write_module("my_judges.py", MODULE)


@pytest.fixture(params=[False, True], ids=["here", "beside"])
def is_beside(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Let the loop run where the rewards are asked for, or in a thread beside that."""
    with event_loop.beside() if request.param else nullcontext():
        yield request.param


def prompts(n: int) -> list[Prompt]:
    return [Prompt(i, "q", (1,), "truth", "sums") for i in range(n)]


def test_responses_are_judged_together_in_order_and_within_the_bound(is_beside: bool) -> None:
    reward = resolve_reward(RewardConfig(fn="my_judges:late"), timeout_s=60)
    n = 2 * N_AT_ONCE + 1
    assert compute_rewards(reward, prompts(n), [str(i) for i in range(n)]) == list(range(n))
    assert sys.modules["my_judges"].most == N_AT_ONCE
    # A client that the module keeps from step to step works in one event loop only.
    if not is_beside:
        with event_loop.beside():
            assert judge(reward, "7", "truth") == 7.0
    assert judge(reward, "7", "truth") == 7.0
    assert len(sys.modules["my_judges"].loops) == 1


def test_several_calls_share_the_bound_and_a_response_has_its_time_from_its_place_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_loop, "N_AT_ONCE", 2)
    event_loop._loop.cache_clear()
    begin_limit, limits, n_begun, n_running, most = asyncio.timeout, list[float | None](), 0, 0, 0

    def begin(seconds: float | None) -> asyncio.Timeout:
        limits.append(seconds)
        return begin_limit(seconds)

    async def reward(response: str, ground_truth: Any, **_: Any) -> float:
        nonlocal n_begun, n_running, most
        n_begun, n_running = n_begun + 1, n_running + 1
        most = max(most, n_running)
        assert len(limits) == n_begun, "none has begun that waits for its place"
        for _turn in range(3):  # others might begin
            await asyncio.sleep(0)
        n_running -= 1
        return float(response)

    monkeypatch.setattr(asyncio, "timeout", begin)
    named = NamedReward("f", reward, 60.0, is_coroutine=True)
    with event_loop.beside(), ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(compute_rewards, named, prompts(3), ["1", "2", "3"]) for _ in range(4)]
        assert [call.result() for call in calls] == [[1.0, 2.0, 3.0]] * 4
    assert (most, limits) == (2, [60.0] * 12)
    event_loop._loop.cache_clear()


def test_calls_that_are_in_progress_at_the_end_are_cancelled() -> None:
    has_begun, ended = threading.Event(), list[str]()

    async def endless(response: str, ground_truth: Any, **_: Any) -> float:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(response)
        return 0.0

    with ThreadPoolExecutor(1) as pool:
        with event_loop.beside():
            call = pool.submit(judge, NamedReward("f", endless, None, is_coroutine=True), "response", "truth")
            assert has_begun.wait(LONGEST_S)
        with pytest.raises(CancelledError):
            call.result(LONGEST_S)
    assert ended == ["response"]


def test_an_object_with_a_coroutine_to_call_is_awaited() -> None:
    assert judge(resolve_reward(RewardConfig(fn="my_judges:judge")), "a", "a") == 0.25


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        ("raising", "failed on .*ZeroDivisionError: division by zero$"),
        ("ending", "failed on .*SystemExit: 0$"),
        ("cancelled", "failed on .*CancelledError$"),
        ("text", "returned '1.0' on "),
    ],
)
def test_an_error_names_function_and_sample_and_cancels_the_others(fn: str, what: str, is_beside: bool) -> None:
    reward = resolve_reward(RewardConfig(fn=f"my_judges:{fn}"), timeout_s=60)
    with pytest.raises(ValueError, match=rf"(?s)^the reward function 'my_judges:{fn}' {what}") as caught:
        compute_rewards(reward, prompts(2), ["good", "bad"])
    sample = 2 if fn == "raising" else 1
    assert f"prompt {sample} (data_source 'sums', ground truth 'truth'), response" in str(caught.value)
    assert sys.modules["my_judges"].ended == (2 if fn == "raising" else 0)


def test_a_task_of_the_function_cannot_end_the_run_without_a_word(is_beside: bool) -> None:
    what = r"failed on .*SystemExit: 0" if is_beside else r"raised SystemExit\(0"
    with pytest.raises(ValueError, match=rf"(?s)the reward function 'my_judges:ending_task' {what}"):
        judge(resolve_reward(RewardConfig(fn="my_judges:ending_task")), "a", "truth")


def test_an_interruption_is_no_error_of_the_function(is_beside: bool) -> None:
    with pytest.raises(KeyboardInterrupt):
        judge(resolve_reward(RewardConfig(fn="my_judges:interrupted")), "response", "truth")


@pytest.mark.parametrize("fn", ["hanging", "blocking"])
def test_a_coroutine_that_takes_too_long_ends_with_an_error_that_says_where(
    fn: str, is_beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = resolve_reward(RewardConfig(fn=f"my_judges:{fn}"), timeout_s=0.2)
    if fn == "hanging":
        monkeypatch.setattr(event_loop, "CLEAN_UP_S", LONGEST_S)
    elif is_beside:
        monkeypatch.setattr(event_loop, "CLEAN_UP_S", 0.1)
    else:
        begin_limits_at(sys.modules["my_judges"].begun, monkeypatch)
    start = time.perf_counter()
    with pytest.raises(
        ValueError,
        match=rf"'my_judges:{fn}' took longer than scheduler.timeout_s=0.2 s for one response, and was at prompt ",
    ) as caught:
        compute_rewards(reward, prompts(2), ["fast", "slow"])
    assert time.perf_counter() - start < LONGEST_S
    late = "prompt 2 " if fn == "hanging" else "prompt 1 "
    assert f"{late}(data_source 'sums', ground truth 'truth')" in str(caught.value)
    if is_beside and fn == "blocking":
        sys.modules["my_judges"].may_end.set()
        while event_loop._loop()._in_work:
            time.sleep(0.01)
    # Another step can begin after it.
    assert judge(resolve_reward(RewardConfig(fn="my_judges:judge")), "a", "a") == 0.25


PROGRAM = """
import sys
from contextlib import nullcontext
from fivefold.config.schema.rewards import RewardConfig
from fivefold.rewards import event_loop
from fivefold.rewards.reward_set import compute_rewards
from fivefold.rewards.resolve import resolve_reward
from fivefold.types import Prompt

with event_loop.beside() if sys.argv[1] == "beside" else nullcontext():
    reward = resolve_reward(RewardConfig(fn="my_judges:stubborn"), timeout_s=0.2)
    compute_rewards(reward, [Prompt(5, "q", (1,), "truth", "sums")] * 2, ["a", "b"])
"""


@pytest.mark.parametrize("where", ["here", "beside"])
def test_a_coroutine_that_swallows_its_cancellation_keeps_no_process_alive(where: str) -> None:
    command = [sys.executable, "-c", PROGRAM, where]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST_S)
    assert done.returncode == 1
    assert re.search(
        r"'my_judges:stubborn' took longer than .* for one response, and was at prompt 6 .*response 'a'", done.stderr
    )


def test_a_response_that_is_judged_is_the_slowest_until_it_ends(is_beside: bool) -> None:
    rewards = RewardSet.of(resolve_reward(RewardConfig(fn="my_judges:hanging"), timeout_s=0.3))
    assert rewards.slowest() is None
    with ThreadPoolExecutor(1) as pool:
        before = time.perf_counter()
        call = pool.submit(compute_rewards, rewards.rewards[0].reward, prompts(1), ["slow"])
        while (slowest := rewards.slowest()) is None:
            assert not call.done()
        assert before <= slowest.began <= time.perf_counter()
        assert re.search(r"took longer than .*for one response, and was at prompt 1 .*'slow'", str(slowest.too_slow()))
        with pytest.raises(ValueError, match="took longer"):
            call.result()
    assert rewards.slowest() is None


def test_a_child_that_a_coroutine_forks_does_not_continue_the_run(
    is_beside: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    reward = resolve_reward(RewardConfig(fn="my_judges:forking"))
    assert judge(reward, "a", "a") == 1.0
    (child,) = sys.modules["my_judges"].children
    end = time.monotonic() + LONGEST_S
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child continues")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 1
    assert "has forked a process, and has returned or failed in it" in capfd.readouterr().err
