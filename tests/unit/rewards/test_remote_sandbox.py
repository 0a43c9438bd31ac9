"""Programs of the reward `code` in a sandbox service: what it is asked, and what becomes of its replies."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fivefold.config.schema.rewards import RewardConfig
from fivefold.rewards.resolve import resolve_reward
from fivefold.rewards.reward import NamedReward
from fivefold.rewards.sandbox import remote
from fivefold.rewards.static_check import reward_problems
from tests.unit.rewards.conftest import LONGEST_S, Serve, judge
from tests.unit.rewards.test_code_reward import ASSERTS, CALLS, LINES, SUMS

TRIAL = "print(1)"
Answer = Callable[[dict[str, Any]], bytes]


def service(body: dict[str, Any], folder: Path) -> bytes:
    """Do what SandboxFusion does: write the code to a file, run it with the input, and say what it printed."""
    file = folder / f"{len(list(folder.iterdir()))}.py"
    file.write_text(body["code"], encoding="utf-8", errors="replace")
    ran = subprocess.run(
        [sys.executable, "-I", str(file)], input=body["stdin"].encode(), capture_output=True, timeout=LONGEST_S
    )
    result = {"status": "Finished", "return_code": ran.returncode, "stdout": ran.stdout.decode(), "execution_time": 0.1}
    status = "Success" if ran.returncode == 0 else "Failed"
    return json.dumps({"status": status, "message": "", "compile_result": None, "run_result": result}).encode()


def replies(reply: bytes, folder: Path) -> Answer:
    """Return a service that runs the program of the trial before a run, and replies so to all others."""
    return lambda body: service(body, folder) if body["code"] == TRIAL else reply


def reward_of(url: str, **kwargs: Any) -> NamedReward:
    return resolve_reward(RewardConfig(fn="code", kwargs={"sandbox_url": url, **kwargs}))


def test_a_service_judges_programs_as_the_sandbox_of_this_machine_does(serve: Serve, tmp_path: Path) -> None:
    url, seen = serve(lambda body: service(body, tmp_path))
    reward = reward_of(url, timeout_s=7.0, memory_mb=256)
    assert judge(reward, "```python\nprint(sum(map(int, input().split())))\n```", SUMS) == 1.0
    assert seen.pop(0)["code"] == TRIAL
    assert [body["stdin"] for body in seen] == SUMS["inputs"]
    for body in seen:
        assert (body["language"], body["run_timeout"], body["memory_limit_MB"]) == ("python", 7.0, 256)
        assert not any(output in json.dumps(body) for output in ("11\\n", "outputs")), "what is expected stays here"
    passing = [
        ("import sys\nif __name__ == '__main__':\n    print(sum(map(int, sys.stdin)))\n    sys.exit()", LINES),
        ("def add(a, b):\n    print('noise')\n    return a + b", CALLS),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", CALLS),
        ("def add(a, b): return a + b", ASSERTS),
    ]
    failing = [
        ("print(sum(map(int, input().split())))\nraise ValueError", SUMS),
        ("def f(:", SUMS),
        ("Sorry, I cannot \ud800 \0", SUMS),
        ("def add(a, b): return object()", CALLS),
        ("def subtract(a, b): return a + b", CALLS),
        ("def add(a, b): return 3", ASSERTS),
        ("import sys\nsys.exit(0)", ASSERTS),
        ("import os\ndef add(a, b): os._exit(0)", ASSERTS),
        ("import json\njson.dumps = lambda *_: '3'\ndef add(a, b): return 4", CALLS),
    ]
    assert [judge(reward, program, truth) for program, truth in passing] == [1.0] * len(passing)
    assert [judge(reward, program, truth) for program, truth in failing] == [0.0] * len(failing)


@pytest.mark.parametrize(
    "ran",
    [
        {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": "3\n", "return_code": None}},
        {"status": "Failed", "run_result": {"status": "Error", "stdout": "3\n", "return_code": 0}},
        {"status": "Failed", "run_result": {"status": "Finished", "stdout": "3\n", "return_code": 1}},
        {"status": "Failed", "compile_result": {"status": "Error"}, "run_result": None},
    ],
)
def test_a_program_that_did_not_end_well_does_not_pass(serve: Serve, ran: dict[str, Any], tmp_path: Path) -> None:
    url, seen = serve(replies(json.dumps(ran).encode(), tmp_path))
    assert judge(reward_of(url), "print(3)", {"inputs": [""], "outputs": ["3"]}) == 0.0
    assert len(seen) == 2, "the service has answered after the trial"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b'{"status": "SandboxError", "message": "no worker", "run_result": null}', "no worker"),
        (b"busy", "no JSON object"),
        (b'{"status": "Success", "run_result": null}', "did not run the program"),
    ],
)
def test_a_service_that_runs_nothing_ends_the_run(
    serve: Serve, reply: bytes, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(remote, "RETRIES", 1)
    url, seen = serve(replies(reply, tmp_path))
    reward = reward_of(url)
    with pytest.raises(ValueError, match=message):
        judge(reward, "print(3)", {"inputs": [""], "outputs": ["3"]})
    assert len(seen) == 3, "after the trial, it was asked twice"


def test_a_service_is_tried_before_the_run(serve: Serve) -> None:
    def problems(**kwargs: Any) -> str:
        return " ".join(reward_problems(RewardConfig(fn="code", kwargs=kwargs)))

    assert "must be a URL" in problems(sandbox_url="localhost")
    assert "drop one of them" in problems(sandbox_url="http://localhost:1/run_code", allow_unsandboxed=True)
    with pytest.raises(ValueError, match=r"reward\.kwargs\.sandbox_url='http://127\.0\.0\.1:1/': nothing answers"):
        reward_of("http://127.0.0.1:1/")
    finished = {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "2\n"}}
    url, _ = serve(lambda body: json.dumps(finished).encode())
    with pytest.raises(ValueError, match="a program that prints 1 fails in the sandbox"):
        reward_of(url)
