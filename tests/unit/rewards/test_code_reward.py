"""The reward `code`: which programs pass which tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from fivefold.config.schema.rewards import RewardConfig
from fivefold.rewards import code_reward
from fivefold.rewards.code_reward import program_of
from fivefold.rewards.code_tests import read_tests
from fivefold.rewards.resolve import resolve_reward
from fivefold.rewards.reward_set import check_ground_truths, compute_rewards
from fivefold.rewards.sandbox.runner import Result, Sandbox
from fivefold.types import Prompt
from tests.unit.rewards.conftest import judge

SUMS = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]}
LINES = {"inputs": ["1\n2\n"], "outputs": ["3"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}
ASSERTS = {"asserts": ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]}


def earned(response: str, truth: Any, **kwargs: Any) -> float:
    """Return the reward of a response. The limit of time is generous, because the machine may be busy."""
    return judge(resolve_reward(RewardConfig(fn="code", kwargs={"timeout_s": 300.0, **kwargs})), response, truth)


def test_a_preamble_comes_before_the_program() -> None:
    program = "def add(a: List, b) -> int:\n    return floor(a) + b"
    truth = {"asserts": ["assert add(1.5, 2) == 3"]}
    assert earned(program, truth) == 0.0
    assert earned(program, truth, preamble="from typing import *\nfrom math import floor") == 1.0
    with pytest.raises(ValueError, match=r"reward\.kwargs\.preamble='import' is not Python"):
        earned(program, truth, preamble="import")


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("Answer: ```python\nprint(3)\n```", "print(3)\n"),
        ("<answer>```python\nprint(3)\n```</answer>", "print(3)\n"),
        ("<think>```python\nprint(5)\n```</think>\n```python\nprint(3)\n```", "print(3)\n"),
        ("- ```python\n  if 1:\n    print(3)\n  ```", "if 1:\n  print(3)\n"),
        ("1. First\n   ````py\n   s = 1\n   ````", "s = 1\n"),
        ("Call ```f()``` as in ```python\nprint(3)\n```", "print(3)\n"),
        ("Use ```f()```, then say so.\n```\nprint(3)\n```\nbye", "print(3)\n"),
        ("```python\nprint(3)\n```\n```\n3\n```", "print(3)\n"),
        ("```python\nprint(3)", "```python\nprint(3)"),
    ],
)
def test_the_program_is_the_last_block_in_python(response: str, program: str) -> None:
    assert program_of(response) == program


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("Read two numbers:\n```python\nprint(sum(map(int, input().split())))\n```\nDone.", SUMS, 1.0),
        ("print(sum(map(int, input().split())))\nexit()", SUMS, 1.0),
        ("def add(a, b): return 1.5", {"fn_name": "add", "inputs": [[1, 2]], "outputs": [10**400]}, 0.0),
        ("def add(a, b): return 10**400", {"fn_name": "add", "inputs": [[1, 2]], "outputs": [1.5]}, 0.0),
        ("print(sum(map(int, input().split())))\nquit(1)", SUMS, 0.0),
        ("print(sum(map(int, input().split())))", json.dumps(SUMS), 1.0),
        ("a, b = map(int, input().split())\nprint(f'{a + b}.0  \\n')", SUMS, 1.0),
        ("print(sum(map(int, input().split())))\nraise ValueError", SUMS, 0.0),
        ("def f(:", SUMS, 0.0),
        ("Sorry, I cannot \ud800 \0", SUMS, 0.0),
        ("import sys\nif __name__ == '__main__':\n    print(sum(map(int, sys.stdin)))\n    sys.exit()", LINES, 1.0),
        ("def add(a, b):\n    print('noise')\n    return a + b", CALLS, 1.0),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", CALLS, 1.0),
        ("def add(a, b): return a", CALLS, 0.0),
        ("def add(a, b): return object()", CALLS, 0.0),
        ("def subtract(a, b): return a + b", CALLS, 0.0),
        ("def add(a, b): return (0.1 + 0.2, a)", {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[0.3, 1]]}, 1.0),
        ("def add(a, b): return True", {"fn_name": "add", "inputs": [[1, 2]], "outputs": [1]}, 0.0),
        ("def add(a, b): return 3", {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}, 1.0),
        ("def add(a, b): return a + b", ASSERTS, 1.0),
        ("def add(a, b): return 3", ASSERTS, 0.0),
        ("def add(a, b): return a + b", {"test": "def check(f):\n    assert f(1, 2) == 3\ncheck(add)"}, 1.0),
    ],
)  # fmt: skip
def test_a_program_earns_1_if_it_passes_all_tests(response: str, truth: Any, expected: float) -> None:
    assert earned(response, truth) == expected


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("print('3\\n7\\n11')", SUMS),
        ("print(3)\nimport os\nos._exit(1)", SUMS),
        ("import sys\nsys.exit(0)", ASSERTS),
        ("import os\nos._exit(0)", ASSERTS),
        ("import sys\ndef add(a, b): sys.exit(0)", ASSERTS),
        ("import os\ndef add(a, b): os._exit(0)", ASSERTS),
        ("import json\njson.dumps = lambda *_: '3'\ndef add(a, b): return 4", CALLS),
        # Whatever is written in place of the report, the secret is not known.
        ("import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'ready\\n3')\n    except OSError: pass", ASSERTS),
        ("import os\nfor fd in range(3, 20):\n    try: os.close(fd)\n    except OSError: pass", ASSERTS),
    ],
)
def test_neither_printing_answers_nor_ending_early_passes(response: str, truth: Any) -> None:
    assert earned(response, truth) == 0.0


def test_partial_earns_the_share_of_the_tests_that_pass() -> None:
    program = "a, b = map(int, input().split())\nprint(a + b if a < 5 else 0)"
    assert earned(program, SUMS, partial=True) == pytest.approx(2 / 3)
    assert earned(program, SUMS) == 0.0


def test_all_tests_of_a_response_share_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now, limits = 0.0, []

    def run(program: str, asks: Mapping[str, Any], stdin: str = "", *, sandbox: Sandbox) -> Result:
        """Take as many seconds as the input says, by the test's own clock."""
        nonlocal now
        if program == "print(1)":  # the trial before the run
            return Result("exit 0", b"1\n", b"")
        limits.append(sandbox.timeout_s)
        ends = float(stdin) <= sandbox.timeout_s
        now += min(float(stdin), sandbox.timeout_s)
        return Result("exit 0" if ends else "time", stdin.encode(), b"")

    monkeypatch.setattr(code_reward, "run", run)
    monkeypatch.setattr(code_reward, "time", SimpleNamespace(monotonic=lambda: now))
    truth = {"inputs": ["1\n", "9\n", "9\n", "0\n"], "outputs": ["1\n", "9\n", "9\n", "0\n"]}
    assert earned("", truth, partial=True, total_timeout_s=3.0) == 0.25
    assert limits == [3.0, 2.0]


def test_the_last_fenced_block_is_the_program() -> None:
    assert program_of("```\na\n```\ntext\n```python\nb\nc\n```\n") == "b\nc\n"
    assert program_of("```Python3\na\n```\nwhich prints\n```\n1\n```\nin\n```bash\ntime\n```\n") == "a\n"
    assert program_of("1. Code:\n   ```py\n   if x:\n     y\n   ```") == "if x:\n  y\n"
    assert program_of('````python\na = """\n```\n"""\n````\n') == 'a = """\n```\n"""\n'
    assert program_of("a = `b`") == "a = `b`"


def test_responses_are_judged_in_order_by_several_processes() -> None:
    reward = resolve_reward(RewardConfig(fn="code", kwargs={"timeout_s": 300.0, "concurrency": 3}))
    truth = {"inputs": [""], "outputs": ["1"]}
    prompts = [Prompt(i, "q", (1,), truth) for i in range(6)]
    assert compute_rewards(reward, prompts, [f"print({i % 2})" for i in range(6)]) == [0.0, 1.0] * 3


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("no json", "is no JSON"),
        (7, "is a int"),
        ({"input": []}, r"has the keys \['input'\]"),
        ({**SUMS, **ASSERTS}, "has the keys"),
        ({"inputs": [], "outputs": []}, "every program would pass"),
        ({"inputs": ["a"], "outputs": []}, "two lists of one length"),
        ({"inputs": [[1]], "outputs": [1]}, "must be texts, or fn_name"),
        ({"fn_name": "f", "inputs": ["a"], "outputs": [1]}, "list of a call's arguments"),
        ({"asserts": []}, "every program would pass"),
        ({"asserts": ["assert ("]}, "is not Python"),
    ],
)
def test_ground_truths_without_tests_are_refused_before_the_run(truth: Any, message: str) -> None:
    reward = resolve_reward(RewardConfig(fn="code"))
    with pytest.raises(ValueError, match=message):
        check_ground_truths(reward, [Prompt(0, "q", (1,), truth)])
    assert read_tests(SUMS)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"memory_mb": 1}, "memory_mb=1 must be from 64 to"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"total_timeout_s": 0}, "total_timeout_s"),
        ({"concurrency": 0}, "concurrency=0 must be from 1"),
        ({"language": "rust"}, "reward.kwargs.language='rust'"),
        ({"time_limit": 3}, r"\['time_limit'\]"),
    ],
)
def test_arguments_that_cannot_work_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_reward(RewardConfig(fn="code", kwargs=kwargs))


def test_the_least_memory_is_enough_for_the_interpreter() -> None:
    assert earned("print(3)", {"inputs": [""], "outputs": ["3"]}, memory_mb=code_reward.LEAST_MEMORY_MB) == 1.0


def test_a_machine_without_the_sandbox_is_refused_unless_the_recipe_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_reward, "missing", lambda: {"landlock": "Landlock", "seccomp": "seccomp"})
    with pytest.raises(ValueError, match=r"lacks Landlock and seccomp.*reward.kwargs.allow_unsandboxed: true"):
        resolve_reward(RewardConfig(fn="code"))
    truth = {"inputs": [""], "outputs": ["0"]}
    program = "import os\npid = os.fork()\nif pid == 0:\n    os._exit(0)\nos.waitpid(pid, 0)\nprint(0)"
    assert earned(program, truth, allow_unsandboxed=True) == 1.0
    monkeypatch.undo()
    assert earned(program, truth, allow_unsandboxed=True) == 0.0, "it only takes effect where something is missing"
