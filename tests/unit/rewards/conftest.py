"""A working folder for users' reward functions, and the reward of one response."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fivefold.rewards import time_limit
from fivefold.rewards.reward import NamedReward
from fivefold.rewards.reward_set import compute_rewards
from fivefold.types import Prompt

Write = Callable[[str, str], Path]
LONGEST_S = 120.0
"""Most seconds that a wait may take, which only a failure uses up."""


def judge(reward: NamedReward, response: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    """Return the reward of one response to the sixth prompt."""
    prompt = Prompt(5, "q", (1,), ground_truth, "sums", extra_info or {})
    return compute_rewards(reward, [prompt], [response])[0]


def begin_limits_at(begun: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the time of `time_limit` begin only once a reward function has set `begun`."""

    class Timer(threading.Timer):
        def run(self) -> None:
            begun.wait(LONGEST_S)
            super().run()

    monkeypatch.setattr(time_limit.threading, "Timer", Timer)


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Change to an empty working folder. Returns a function that writes a file into it, by name and content."""

    def write(name: str, code: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code, encoding="utf-8")
        return file

    monkeypatch.chdir(tmp_path)
    return write
