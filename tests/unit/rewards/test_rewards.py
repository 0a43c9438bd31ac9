"""The rewards that ship."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.config.schema.rewards import RewardConfig
from fivefold.rewards import math_reward
from fivefold.rewards.exact_match import ExactMatch
from fivefold.rewards.math_reward import MathReward, VerifierProcess
from fivefold.rewards.math_worker import last_box
from fivefold.rewards.resolve import resolve_reward
from fivefold.rewards.reward_set import check_ground_truths, compute_rewards
from fivefold.types import Prompt
from tests.unit.rewards.conftest import LONGEST_S, judge


@pytest.mark.parametrize(
    ("kwargs", "response", "truth", "expected"),
    [
        ({}, " 42\n", "42", 1.0),
        ({}, "42", 42, 1.0),
        ({}, "Paris", "paris", 0.0),
        ({}, "b", ["a", "b"], 1.0),
        ({"ignore_case": True}, "Paris", "paris", 1.0),
        ({"plain_words": True}, " The U.S. of  America,", "us of america", 1.0),
        ({"plain_words": True}, "an answer", "answers", 0.0),
        (
            {"plain_words": True, "pattern": "<answer>(.*?)</answer>"},
            "<answer>A Paris!</answer>",
            ["Rome", "paris"],
            1.0,
        ),
        ({"minerva": True}, r"x = \frac12", r"$\frac{1}{2}$", 1.0),
        ({"minerva": True}, r"\sqrt2", r"\sqrt{2}", 1.0),
        ({"minerva": True}, r"\boxed{1,234 dollars}", 1234, 1.0),
        ({"minerva": True}, r"90^\circ", "90 degrees", 1.0),
        ({"minerva": True}, r"\text{east}", "east", 1.0),
        ({"minerva": True}, r"\frac12", "0.5", 0.0),
        ({"minerva": True, "pattern": r"(?i)Answer\s*:\s*([^\n]+)"}, "Answer: 5\nAnswer: $7$ units", "7", 1.0),
        ({"minerva": True, "pattern": r"(?i)Answer\s*:\s*([^\n]+)"}, "It is 7", "7", 0.0),
        ({}, "0.00001", 1e-05, 1.0),
        ({"numbers": True}, "42.0", 42, 1.0),
        ({"numbers": True}, "1,234,567", "1234567", 1.0),
        ({"numbers": True}, "1,23", "123", 0.0),
        ({"numbers": True}, "nan", "NaN", 0.0),
        ({"numbers": True}, "abc", "abc", 1.0),
        ({"pattern": r"answer is (\S+)"}, "The answer is 3. No: the answer is 4", "4", 1.0),
        ({"pattern": r"-?\d+"}, "none", "none", 0.0),
        ({"pattern": r"a(x)?"}, "a", "", 0.0),
        ({"pattern": r"#### (\d+)|\\boxed\{(\d+)\}"}, r"\boxed{72}", "72", 1.0),
        # Tables make floats of whole numbers where a row of the column is empty.
        ({}, "72", 72.0, 1.0),
        ({}, "72.0", 72.0, 1.0),
        ({}, "-3", -3.0, 1.0),
        ({}, "1000000", 1e6, 1.0),
        ({}, "72", 72.5, 0.0),
    ],
)
def test_exact_match_rewards_equal_answers(kwargs: dict[str, Any], response: str, truth: Any, expected: float) -> None:
    assert judge(resolve_reward(RewardConfig(fn="exact_match", kwargs=kwargs)), response, truth) == expected


@given(st.text())
def test_exact_match_rewards_a_text_for_itself(text: str) -> None:
    assert ExactMatch(numbers=True, ignore_case=True)(f" {text}\n", text, data_source="", extra_info={}) == 1.0


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (r"so it is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"\boxed{1} wait, \boxed{2}", "2", 1.0),
        (r"cut off: \boxed{4", "4", 0.0),
        ("3 + 4 = 7", 7, 1.0),
        ("3 + 4 = 7", "8", 0.0),
        ("it costs $1,000", "1000", 1.0),
        (r"\boxed{18.90}", r"\$18.90", 1.0),
        (r"\boxed{0.00001}", 1e-05, 1.0),
        (r"$x^2+2x+1$", "(x+1)^2", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{3}", ["2", "3"], 1.0),
        (r"\boxed{0.333333}", r"\frac{1}{3}", 1.0),
        (r"\boxed{3.141593}", r"\pi", 1.0),
        (r"\boxed{50\%}", "0.5", 1.0),
        (r"\boxed{50}", r"50\%", 1.0),
        (r"\boxed{101_2}", "101_2", 1.0),
        (r"\boxed{2 hours}", r"2\text{ hrs}", 1.0),
        (r"\boxed{2}", r"2\text{ hours}", 1.0),
        (r"\boxed{5\text{ centimeters}}", "5 cm", 1.0),
        (r"\boxed{\text{Listen}}", "listen", 1.0),
        (r"\boxed{yx}", "xy", 1.0),
        # Of another value, which math-verify takes for equal.
        (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}", 0.0),
        (r"\boxed{0.0000001}", "0.0000002", 0.0),
        (r"\boxed{0.1234569}", "0.1234567", 0.0),
        (r"\boxed{2516_9}", "2516_8", 0.0),
        (r"\boxed{4:30\text{ a.m.}}", r"4:30\text{ p.m.}", 0.0),
        (r"\boxed{2\text{ minutes}}", r"2\text{ hours}", 0.0),
        (r"\boxed{5 m}", "5 km", 0.0),
        (r"\boxed{listen}", "silent", 0.0),
        # A text that ends within its last box has no final answer, whatever it withdrew.
        (r"It is \boxed{5}. No, wait: \boxed{6", "5", 0.0),
        ("", "7", 0.0),
        ("\\boxed{\\undefined{\ud800", "7", 0.0),
    ],
)
def test_math_rewards_answers_of_equal_value(response: str, truth: Any, expected: float) -> None:
    # The limit is generous, because the machine may be busy.
    assert judge(resolve_reward(RewardConfig(fn="math", kwargs={"timeout_s": 20})), response, truth) == expected


def test_math_works_off_the_main_thread() -> None:
    values: list[float] = []
    reward = MathReward()
    threads = [
        threading.Thread(target=lambda i=i: values.append(reward(f"{i}", str(i), data_source="", extra_info={})))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [1.0] * 4


def test_an_answer_that_cannot_be_evaluated_in_time_is_wrong_and_the_next_one_is_judged() -> None:
    assert MathReward(timeout_s=20)("7", "7", data_source="", extra_info={}) == 1.0
    start = time.perf_counter()
    # A power of huge integers is one call into C, which no signal handler of Python interrupts.
    assert MathReward(timeout_s=0.5)(r"\boxed{9^{9^{9}}}", "3", data_source="", extra_info={}) == 0.0
    assert time.perf_counter() - start < LONGEST_S
    assert MathReward(timeout_s=20)("7", "7", data_source="", extra_info={}) == 1.0


def test_a_time_limited_answer_costs_its_limit_and_little_more() -> None:
    verifier = VerifierProcess()
    assert verifier.is_equal(r"\boxed{\frac{1}{2}}", ["0.5"], 20) is True
    assert verifier._process is not None
    judged, process, imported = 5, verifier._process, sum(psutil.Process(verifier._process.pid).cpu_times()[:2])
    before = os.times()
    start = time.perf_counter()
    for _ in range(judged):
        assert verifier.is_equal(r"\boxed{9^{9^{9^9}}}", ["3"], 0.1) is None
    took = time.perf_counter() - start
    assert verifier._process is process, "a new process would import its packages anew"
    verifier.close()
    after = os.times()
    # The processor time of the ended forks counts, because the machine may be busy.
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent - imported < judged * 0.1 + 1.5
    assert took < LONGEST_S


def test_the_worker_does_not_import_torch() -> None:
    """With torch, a process would take seconds to start, and some hundred MB."""
    verifier = VerifierProcess()
    assert verifier.is_equal("7", ["7"], 20) is True
    assert verifier._process is not None
    libraries = [region.path for region in psutil.Process(verifier._process.pid).memory_maps()]
    verifier.close()
    assert any("python" in path for path in libraries)
    assert not [path for path in libraries if "torch" in path]


def when_at_work(fork: psutil.Process, action: Callable[[], None]) -> None:
    """Let a thread do something in the middle of the next job of a fork, which takes no processor time before."""
    idle = fork.cpu_times().user

    def act() -> None:
        while fork.cpu_times().user < idle + 0.1:
            time.sleep(0.01)
        action()

    threading.Thread(target=act, daemon=True).start()


def test_an_answer_that_crashes_the_verifier_is_wrong() -> None:
    verifier = VerifierProcess()
    assert verifier.is_equal("7", ["7"], 20) is True
    assert verifier._process is not None
    fork = psutil.Process(verifier._process.pid).children()[0]
    # The fork crashes in the middle of a long job, as when its C stack overflows.
    when_at_work(fork, lambda: fork.send_signal(signal.SIGSEGV))
    assert verifier.is_equal(r"\boxed{9^{9^{9^9}}}", ["3"], 60) is None
    assert verifier.is_equal("7", ["7"], 20) is True
    verifier.close()


def test_a_verifier_that_is_killed_between_jobs_is_an_error() -> None:
    verifier = VerifierProcess()
    assert verifier.is_equal("7", ["7"], 20) is True
    assert verifier._process is not None
    psutil.Process(verifier._process.pid).children()[0].kill()
    with pytest.raises(RuntimeError, match="ended with status 137"):
        verifier.is_equal("7", ["7"], 20)
    verifier.close()


def test_closing_ends_a_comparison_and_its_fork() -> None:
    verifier = VerifierProcess()
    assert verifier.is_equal("7", ["7"], 20) is True
    assert verifier._process is not None
    fork = psutil.Process(verifier._process.pid).children()[0]
    when_at_work(fork, verifier.close)
    with pytest.raises(RuntimeError, match="ended"):
        verifier.is_equal(r"\boxed{9^{9^{9^9}}}", ["3"], 60)
    fork.wait(timeout=LONGEST_S)


def test_answers_are_judged_side_by_side_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_reward, "n_processes", lambda: 3)
    pool = math_reward.VerifierPool(3)
    monkeypatch.setattr(math_reward, "_verifiers", lambda: pool)
    at_once, most, n_calls, lock = 0, 0, 0, threading.Lock()
    together = threading.Barrier(3, timeout=LONGEST_S)
    is_equal = VerifierProcess.is_equal

    def counted(self: VerifierProcess, *args: Any) -> bool | None:
        nonlocal at_once, most, n_calls
        with lock:
            at_once += 1
            most = max(most, at_once)
            n_calls += 1
            is_one_of_the_first = n_calls <= 3
        try:
            if is_one_of_the_first:
                together.wait()
            return is_equal(self, *args)
        finally:
            with lock:
                at_once -= 1

    monkeypatch.setattr(VerifierProcess, "is_equal", counted)
    reward = resolve_reward(RewardConfig(fn="math", kwargs={"timeout_s": 0.4}))
    responses = [r"\boxed{9^{9^{9^9}}}" if i % 4 == 1 else f"it is {i}" for i in range(12)]
    prompts = [Prompt(i, "q", (1,), str(i if i % 3 else -i)) for i in range(12)]
    assert compute_rewards(reward, prompts, responses) == [
        float(bool(i % 3 or i == 0) and i % 4 != 1) for i in range(12)
    ]
    assert most == 3
    pool.close()


@pytest.mark.parametrize(
    ("fn", "truth", "message"),
    [
        ("math", "", r"the ground truth \[''\] holds no mathematical answer"),
        ("math", {"a": 1}, r"the ground truth holds {'a': 1}, a dict"),
        ("math", False, "the ground truth holds False, a bool"),
        ("exact_match", " ", "the ground truth is ' ': give a text that is not blank"),
        ("exact_match", [], r"the ground truth is \[\]"),
        ("exact_match", ["a", {"b": 1}], r"the ground truth is \['a', {'b': 1}\]"),
    ],
)
def test_ground_truths_that_cannot_be_judged_are_refused_beforehand(fn: str, truth: Any, message: str) -> None:
    reward = resolve_reward(RewardConfig(fn=fn))
    fine = [Prompt(i, "q", (1,), value) for i, value in enumerate(["1", 2, 0.5, ["3", 4], r"\frac{1}{2}"])]
    check_ground_truths(reward, fine)
    with pytest.raises(
        ValueError, match=rf"prompt 6 \('What\?'\): the reward '{fn}' cannot judge its answers: {message}"
    ):
        check_ground_truths(reward, [*fine, Prompt(5, "What?", (1,), truth), Prompt(6, "Why?", (1,), truth)])


def test_a_ground_truth_that_takes_too_long_is_refused_beforehand() -> None:
    reward = resolve_reward(RewardConfig(fn="math", kwargs={"timeout_s": 0.3}))
    with pytest.raises(ValueError, match=r"cannot be read within 0\.3 s"):
        check_ground_truths(reward, [Prompt(0, "q", (1,), "(" * 400 + "3" + ")" * 400)])


def test_a_verifier_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    verifier = VerifierProcess()
    with pytest.raises(RuntimeError, match="ended with status 1"):
        verifier.is_equal("7", ["7"], 1.0)
    verifier.close()


def test_a_ground_truth_without_an_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'math' failed on prompt 6 \((.|\n)*holds no mathematical answer"):
        judge(resolve_reward(RewardConfig(fn="math")), "7", "")


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{\frac{1}{2}} end", r"\boxed{\frac{1}{2}}"),
        (r"\boxed{1} \boxed{2", ""),
        (r"\boxed{1 \boxed{2}", r"\boxed{2}"),
        (r"\boxed{\left\{ x \right.}", r"\boxed{\left\{ x \right.}"),
        ("none", None),
    ],
)
def test_the_last_box_is_the_answer(text: str, box: str | None) -> None:
    assert last_box(text) == box
