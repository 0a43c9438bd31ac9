"""A working folder for users' reward functions, services that they ask, and the reward of one response."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fivefold.rewards import time_limit
from fivefold.rewards.reward import NamedReward
from fivefold.rewards.reward_set import compute_rewards
from fivefold.types import Prompt

Write = Callable[[str, str], Path]
Serve = Callable[[Callable[[dict[str, Any]], bytes]], tuple[str, list[dict[str, Any]]]]
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


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that starts a service, by what it answers; it returns its URL, and what it was asked."""
    servers = []

    def start(answer: Callable[[dict[str, Any]], bytes]) -> tuple[str, list[dict[str, Any]]]:
        seen: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                seen.append(body | {"key": self.headers.get("Authorization"), "path": self.path})
                data = answer(body)
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}/score", seen

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
