"""Verifiers, and the resolution of a user's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.config.schema import RewardConfig
from fivefold.rewards import NamedReward, compute_rewards, resolve_reward
from fivefold.rewards.exact_match import ExactMatch
from fivefold.rewards.math_reward import MathReward, VerifierProcess
from fivefold.rewards.math_worker import last_box
from fivefold.types import Prompt


def judge(reward: NamedReward, response: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    prompt = Prompt(5, "q", (1,), ground_truth, "sums", extra_info or {})
    return compute_rewards(reward, [prompt], [response])[0]


@pytest.mark.parametrize(
    ("kwargs", "response", "truth", "expected"),
    [
        ({}, " 42\n", "42", 1.0),
        ({}, "42", 42, 1.0),
        ({}, "42.0", 42, 0.0),
        ({}, "Paris", "paris", 0.0),
        ({}, "b", ["a", "b"], 1.0),
        ({"ignore_case": True}, "Paris", "paris", 1.0),
        ({"numbers": True}, "42.0", 42, 1.0),
        ({"numbers": True}, "1,234,567", "1234567", 1.0),
        ({"numbers": True}, "1,23", "123", 0.0),
        ({"numbers": True}, "+7", "07", 1.0),
        ({"numbers": True}, "nan", "NaN", 0.0),
        ({"numbers": True}, "abc", "abc", 1.0),
        ({"pattern": r"answer is (\S+)"}, "The answer is 3. No: the answer is 4", "4", 1.0),
        ({"pattern": r"-?\d+"}, "5 + 6 = 11", "11", 1.0),
        ({"pattern": r"-?\d+"}, "none", "none", 0.0),
        ({"pattern": r"a(x)?"}, "a", "", 0.0),
    ],
)
def test_exact_match(kwargs: dict[str, Any], response: str, truth: Any, expected: float) -> None:
    assert judge(resolve_reward(RewardConfig(fn="exact_match", kwargs=kwargs)), response, truth) == expected


@given(st.text())
def test_exact_match_of_a_text_with_itself(text: str) -> None:
    assert ExactMatch(numbers=True, ignore_case=True)(f" {text}\n", text, data_source="", extra_info={}) == 1.0


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (r"so it is \boxed{\frac{1}{2}}.", "0.5", 1.0),
        (r"\boxed{1} wait, \boxed{2}", "2", 1.0),
        (r"\boxed{1} wait, \boxed{2}", "1", 0.0),
        (r"cut off: \boxed{4", "4", 0.0),
        ("3 + 4 = 7", 7, 1.0),
        ("3 + 4 = 7", "8", 0.0),
        ("it costs $1,000", "1000", 1.0),
        (r"$x^2+2x+1$", "(x+1)^2", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{3}", r"\boxed{3}", 1.0),
        (r"\boxed{3}", ["2", "3"], 1.0),
        ("", "7", 0.0),
        ("\\boxed{\\undefined{\ud800", "7", 0.0),
    ],
)
def test_math(response: str, truth: Any, expected: float) -> None:
    # A generous limit: the first answer waits for nothing but the comparison, yet on a busy machine.
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
    # One power of huge integers, deaf to Python's signal handlers.
    assert MathReward(timeout_s=0.5)(r"\boxed{9^{9^{9}}}", "3", data_source="", extra_info={}) == 0.0
    assert time.perf_counter() - start < 10
    assert MathReward(timeout_s=20)("7", "7", data_source="", extra_info={}) == 1.0


def test_a_verifier_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    verifier = VerifierProcess()
    with pytest.raises(RuntimeError, match="ended with status 1"):
        verifier.is_equal("7", ["7"], 1.0)
    verifier.close()


def test_a_ground_truth_without_an_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match="holds no mathematical answer") as caught:
        judge(resolve_reward(RewardConfig(fn="math")), "7", "")
    assert "prompt 5" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{\frac{1}{2}} end", r"\boxed{\frac{1}{2}}"),
        (r"\boxed{1} \boxed{2", r"\boxed{1}"),
        (r"\boxed{\left\{ x \right.}", r"\boxed{\left\{ x \right.}"),
        ("none", None),
    ],
)
def test_last_box(text: str, box: str | None) -> None:
    assert last_box(text) == box


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", __import__("sys").path.copy())
    (tmp_path / "my_rewards_under_test.py").write_text(
        "CONSTANT = 3\n"
        "def words(response, ground_truth, *, data_source, extra_info, target=2):\n"
        "    return -abs(len(response.split()) - target) + extra_info.get('bonus', 0)\n"
        "def flag(response, ground_truth, **_): return response == ground_truth\n"
        "def text(response, ground_truth, **_): return '1.0'\n"
        "def nothing(response, ground_truth, **_): pass\n"
        "def infinite(response, ground_truth, **_): return float('inf')\n"
        "def raising(response, ground_truth, **_): return 1 / 0\n"
        "def other_order(data_source, solution_str): return 0.0\n"
    )
    (tmp_path / "broken_rewards_under_test.py").write_text("import no_such_dependency\n")
    return tmp_path


@pytest.mark.usefixtures("in_folder")
def test_a_function_from_the_working_folder() -> None:
    reward = resolve_reward(RewardConfig(fn="my_rewards_under_test:words", kwargs={"target": 3}))
    assert judge(reward, "one two", None) == -1.0
    assert judge(reward, "one two", None, {"bonus": 4}) == 3.0
    flag = judge(resolve_reward(RewardConfig(fn="my_rewards_under_test:flag")), "a", "a")
    assert flag == 1.0
    assert type(flag) is float


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize(
    ("fn", "kwargs", "message"),
    [
        ("mathh", {}, r"'mathh' is neither one of \['exact_match', 'math'\] nor of the form module:function"),
        ("no_such_module_under_test:f", {}, "there is no module 'no_such_module_under_test'"),
        ("my_rewards_under_test:nope", {}, "defines no 'nope'"),
        ("my_rewards_under_test:CONSTANT", {}, "is a int, which cannot be called"),
        (
            "my_rewards_under_test:words",
            {"goal": 3},
            r"called as fn\(response, ground_truth, data_source=, extra_info=, goal=\)",
        ),
        ("my_rewards_under_test:other_order", {}, r"has the signature \(data_source, solution_str\)"),
        ("exact_match", {"patern": "x"}, r"\['patern'\], but the reward 'exact_match' takes \['ignore_case'"),
        ("exact_match", {"pattern": "("}, "is not a regular expression"),
        ("math", {"timeout_s": 0}, "must be greater than 0"),
        ("math", {"timeout_s": "soon"}, "timeout_s"),
    ],
)
def test_what_cannot_be_called_is_refused_at_setup(fn: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_reward(RewardConfig(fn=fn, kwargs=kwargs))


@pytest.mark.usefixtures("in_folder")
def test_a_missing_import_inside_the_users_module_is_shown_as_it_is() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        resolve_reward(RewardConfig(fn="broken_rewards_under_test:f"))


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize(("fn", "value"), [("text", "'1.0'"), ("nothing", "None"), ("infinite", "inf")])
def test_a_reward_that_is_no_finite_number_names_function_and_sample(fn: str, value: str) -> None:
    reward = resolve_reward(RewardConfig(fn=f"my_rewards_under_test:{fn}"))
    with pytest.raises(
        ValueError, match=rf"'my_rewards_under_test:{fn}' returned {value} on prompt 5 \(data_source 'sums'"
    ):
        judge(reward, "response", "truth")


@pytest.mark.usefixtures("in_folder")
def test_an_exception_of_the_function_is_noted_with_its_sample() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        judge(resolve_reward(RewardConfig(fn="my_rewards_under_test:raising")), "response", "truth")
    assert "'my_rewards_under_test:raising' on prompt 5" in caught.value.__notes__[0]
