"""Users' own reward functions: how they are found, checked and called, and what their errors say."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from fivefold.config.schema.rewards import RewardConfig
from fivefold.rewards.resolve import resolve_reward
from fivefold.rewards.static_check import reward_problems
from tests.unit.rewards.conftest import LONGEST_S, Write, begin_limits_at, judge

MODULE = """\
import threading, time
begun = threading.Event()
CONSTANT = 3
def words(response, ground_truth, *, data_source, extra_info, target=2):
    return -abs(len(response.split()) - target) + extra_info.get('bonus', 0)
def flag(response, ground_truth, **_): return response == ground_truth
def text(response, ground_truth, **_): return '1.0'
def nothing(response, ground_truth, **_): pass
def infinite(response, ground_truth, **_): return float('inf')
def raising(response, ground_truth, **_): return 1 / 0
def refusing(response, ground_truth, **_): raise ValueError("no such task")
def ending(response, ground_truth, **_):
    import sys
    sys.exit(0)
def leaving(response, ground_truth, **_): raise GeneratorExit
def interrupted(response, ground_truth, **_): raise KeyboardInterrupt
def slow(response, ground_truth, *, seconds, **_):
    begun.set()
    try:
        time.sleep(seconds)
    except Exception:
        pass
    return 1.0
def of_verl(data_source, solution_str, ground_truth, extra_info=None, bonus=0):
    return {"score": float(solution_str == ground_truth) + bonus, "acc": data_source}
async def of_verl_later(data_source, solution_str, ground_truth, extra_info=None, **_): return {"score": 0.5}
def other_order(data_source, solution_str): return 0.0
def of_trl(completions, prompts=None, **kwargs): return [0.0] * len(completions)
def too_many(response, ground_truth, reference, *, data_source, extra_info): return 0.0
def generator(response, ground_truth, **_): yield 1.0
async def async_generator(response, ground_truth, **_): yield 1.0
class Judge:
    def __init__(self, response='', ground_truth='', **_): pass
    def __call__(self, response, ground_truth, *, data_source, extra_info): return 0.25
class Streams:
    def __call__(self, response, ground_truth, **_): yield 1.0
judge = Judge()
streams = Streams()
"""


@pytest.fixture(autouse=True)
def module(write_module: Write) -> Path:
    return write_module("my_rewards.py", MODULE)


def test_a_function_from_the_working_folder() -> None:
    reward = resolve_reward(RewardConfig(fn="my_rewards:words", kwargs={"target": 3}))
    assert judge(reward, "one two", None) == -1.0
    assert judge(reward, "one two", None, {"bonus": 4}) == 3.0
    flag = judge(resolve_reward(RewardConfig(fn="my_rewards:flag")), "a", "a")
    assert flag == 1.0
    assert type(flag) is float


def test_a_function_of_verl_is_called_by_its_names_and_may_return_a_mapping() -> None:
    reward = resolve_reward(RewardConfig(fn="my_rewards:of_verl", kwargs={"bonus": 2}))
    assert [judge(reward, response, "a") for response in "ab"] == [3.0, 2.0]
    assert judge(resolve_reward(RewardConfig(fn="my_rewards:of_verl_later")), "a", "a") == 0.5
    with pytest.raises(ValueError, match="got an unexpected keyword argument 'malus'"):
        resolve_reward(RewardConfig(fn="my_rewards:of_verl", kwargs={"malus": 2}))
    assert list(reward_problems(RewardConfig(fn="my_rewards:of_verl", kwargs={"bonus": 2}))) == []


def test_an_object_that_can_be_called_is_a_reward() -> None:
    assert judge(resolve_reward(RewardConfig(fn="my_rewards:judge")), "a", "a") == 0.25


@pytest.mark.parametrize("place", ["my_rewards.py", "./judges/math.py", "{folder}/judges/math.py"])
def test_a_function_of_a_file_is_named_by_its_path(write_module: Write, tmp_path: Path, place: str) -> None:
    write_module("judges/math.py", "from neighbour import flag\nimport my_rewards\n")
    write_module("judges/neighbour.py", "def flag(response, ground_truth, **_): return response == ground_truth\n")
    reward = resolve_reward(RewardConfig(fn=f"{place.format(folder=tmp_path)}:flag"))
    assert [judge(reward, response, "a") for response in "ab"] == [1.0, 0.0]
    assert sys.modules["math"].__name__ == "math"
    assert sys.modules["math"] is __import__("math")


@pytest.mark.parametrize(
    ("fn", "kwargs", "message"),
    [
        (
            "mathh",
            {},
            r"'mathh' is neither one of .* nor of the form module:function or file",
        ),
        ("no_such_module_under_test:f", {}, "there is no module 'no_such_module_under_test'"),
        ("no/such/file.py:f", {}, r"there is no Python file /.*/no/such/file\.py"),
        ("./my_rewards:flag", {}, r"there is no Python file /.*/my_rewards: give the path of a file that ends in .py"),
        ("my_rewards:nope", {}, "defines no 'nope'"),
        ("my_rewards.py:nope", {}, "defines no 'nope'"),
        ("my_rewards:CONSTANT", {}, "is a int, which cannot be called"),
        ("my_rewards:Judge", {}, "is a class, whose call returns no number"),
        ("my_rewards:generator", {}, "is a generator function, whose call returns no number"),
        ("my_rewards:streams", {}, "is a generator function, whose call returns no number"),
        ("my_rewards:async_generator", {}, "is an asynchronous generator function"),
        ("my_rewards:words", {"goal": 3}, r"called as fn\(response, ground_truth, data_source=, extra_info=, goal=\)"),
        ("my_rewards:flag", {"data_source": "a"}, r"reward.kwargs has \['data_source'\], which each row"),
        ("my_rewards:flag", {"response": "a"}, r"signature \(response, ground_truth, \*\*_\).*multiple values .*'resp"),
        ("my_rewards:other_order", {}, r"has the signature \(data_source, solution_str\)"),
        ("my_rewards:of_trl", {"prompts": 1}, "TRL's functions judge lists of completions: this one gets one response"),
        (
            "my_rewards:too_many",
            {},
            r"has the signature \(response, ground_truth, reference, .*: missing .*'reference'",
        ),
        ("builtins:max", {}, "has no signature that could be checked"),
        ("exact_match", {"patern": "x"}, r"\['patern'\], but the reward 'exact_match' takes \['ignore_case'"),
        ("exact_match", {"pattern": "("}, "is not a regular expression"),
        ("math", {"timeout_s": 0}, "must be greater than 0"),
        ("math", {"timeout_s": "soon"}, "timeout_s"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused_at_setup(fn: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_reward(RewardConfig(fn=fn, kwargs=kwargs))


@pytest.mark.parametrize("fn", ["broken:f", "broken.py:f"])
@pytest.mark.parametrize(
    ("code", "facts"),
    [
        ("x = 1\ndef f(:\n    return 1\n", ['broken.py", line 2', "def f(:", "SyntaxError: invalid syntax"]),
        (
            "\nimport no_such_dependency\n",
            ['broken.py", line 2', "ModuleNotFoundError: No module named 'no_such_dependency'"],
        ),
        ("from json import no_such_name\n", ['broken.py", line 1', "cannot import name 'no_such_name' from 'json'"]),
        ("import json\njson.loads('{')\n", ['broken.py", line 2', 'decoder.py", line', "JSONDecodeError: Expecting"]),
        ("import sys\nsys.exit(0)\n", ['broken.py", line 2', "sys.exit(0)", "SystemExit: 0"]),
        ("import asyncio\nraise asyncio.CancelledError\n", ['broken.py", line 2', "asyncio.exceptions.CancelledError"]),
    ],
)
def test_an_error_while_the_module_is_imported_is_refused_with_its_place(
    write_module: Write, fn: str, code: str, facts: list[str]
) -> None:
    write_module("broken.py", code)
    with pytest.raises(
        ValueError, match=rf"^reward.fn='{fn}': the import of its (module|file) failed:\n  File "
    ) as caught:
        resolve_reward(RewardConfig(fn=fn))
    assert [fact for fact in facts if fact not in str(caught.value)] == []
    # Only places in the user's code and in what it calls are of interest.
    assert "importlib" not in str(caught.value)
    assert "user_file_broken" not in sys.modules


@pytest.mark.parametrize(("fn", "value"), [("text", "'1.0'"), ("nothing", "None"), ("infinite", "inf")])
def test_a_reward_that_is_no_finite_number_names_function_and_sample(fn: str, value: str) -> None:
    reward = resolve_reward(RewardConfig(fn=f"my_rewards:{fn}"))
    with pytest.raises(ValueError, match=rf"'my_rewards:{fn}' returned {value} on prompt 6 \(data_source 'sums'"):
        judge(reward, "response", "truth")


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        ("raising", "ZeroDivisionError: division by zero"),
        ("refusing", "ValueError: no such task"),
        ("ending", "SystemExit: 0"),
        ("leaving", "GeneratorExit"),
    ],
)
def test_whatever_a_function_raises_is_an_error_that_names_function_place_and_sample(fn: str, what: str) -> None:
    with pytest.raises(ValueError, match=rf"{what}$") as caught:
        judge(resolve_reward(RewardConfig(fn=f"my_rewards:{fn}")), "response", "truth")
    message = str(caught.value)
    assert message.startswith(
        f"the reward function 'my_rewards:{fn}' failed on prompt 6 (data_source 'sums', ground truth 'truth'), "
        "response 'response':\n"
    )
    assert 'my_rewards.py", line ' in message
    assert f"in {fn}\n" in message
    assert "fivefold/rewards" not in message


def test_an_interruption_is_no_error_of_the_function() -> None:
    with pytest.raises(KeyboardInterrupt):
        judge(resolve_reward(RewardConfig(fn="my_rewards:interrupted")), "response", "truth")


def test_a_function_that_hangs_ends_with_an_error_that_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    config = RewardConfig(fn="my_rewards:slow", kwargs={"seconds": 1000})
    reward = resolve_reward(config, timeout_s=0.2)
    begin_limits_at(sys.modules["my_rewards"].begun, monkeypatch)
    start = time.perf_counter()
    with pytest.raises(
        ValueError,
        match=r"'my_rewards:slow' took longer than scheduler.timeout_s=0.2 s for 1 responses, and was at "
        r"prompt 6 \(data_source 'sums', ground truth 'truth'\), response 'response'",
    ) as caught:
        judge(reward, "response", "truth")
    assert time.perf_counter() - start < LONGEST_S
    assert "in slow" in "".join(traceback.format_exception(caught.value))
    assert signal.getsignal(signal.SIGUSR2) == before


@pytest.mark.parametrize("timeout_s", [None, LONGEST_S])
def test_a_function_that_is_slow_within_the_limit_is_left_alone(timeout_s: float | None) -> None:
    config = RewardConfig(fn="my_rewards:slow", kwargs={"seconds": 0.05})
    threads = threading.active_count()
    assert judge(resolve_reward(config, timeout_s=timeout_s), "response", "truth") == 1.0
    while threading.active_count() > threads:
        time.sleep(0.01)


def test_a_child_that_a_reward_forks_does_not_continue_the_run(
    write_module: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """\
import os
CHILDREN = []
def returning(response, ground_truth, **_):
    CHILDREN.append(os.fork())
    return 1.0
def failing(response, ground_truth, **_):
    CHILDREN.append(os.fork())
    if CHILDREN[-1] == 0:
        raise ValueError
    return 1.0
"""
    write_module("forking.py", code)
    for name in ("returning", "failing"):
        reward = resolve_reward(RewardConfig(fn=f"forking:{name}"))
        lines = tmp_path / name
        assert judge(reward, "a", "a") == 1.0
        lines.open("a").write("a line of the run\n")
        children = sys.modules["forking"].CHILDREN
        _, status = os.waitpid(children.pop(), 0)
        assert os.waitstatus_to_exitcode(status) == 1
        assert lines.read_text() == "a line of the run\n"
        assert "has forked a process, and has returned or failed in it" in capfd.readouterr().err
