"""The reward `judge`, against a server of the test's own."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from fivefold.config.schema.rewards import RewardConfig
from fivefold.rewards.http_client import HTTPClient, RequestFailed
from fivefold.rewards.resolve import resolve_reward
from fivefold.rewards.reward_set import compute_rewards
from fivefold.rewards.static_check import reward_problems
from fivefold.types import Prompt
from tests.unit.rewards.conftest import LONGEST_S, judge

IMPATIENT = {"timeout_s": 0.3, "backoff_s": 0.0, "retries": 100}
"""On a busy machine, several replies may come too late."""
Answer = Callable[["Service", dict[str, Any]], tuple[int, bytes]]


class Service(ThreadingHTTPServer):
    """Answers chat completions as a test says, and counts them."""

    daemon_threads = True
    trickles = False
    """Whether the first reply never comes to its end, although some of it always comes."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.seen: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()
        self.in_work = self.most_in_work = 0
        self.ends = threading.Event()
        """Set when the test is over."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that did not wait for its reply."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        service = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with service.lock:
            service.seen.append(body)
            service.keys.append(self.headers.get("Authorization"))
            service.in_work += 1
            service.most_in_work = max(service.most_in_work, service.in_work)
        status, data = service.answer(service, body) if self.path == "/v1/chat/completions" else (404, b"no such path")
        with service.lock:
            service.in_work -= 1
        trickles = service.trickles and len(service.seen) == 1
        self.send_response(status)
        self.send_header("Content-Length", str(2**20 if trickles else len(data)))
        if status == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        while trickles and not service.ends.wait(0.05):
            self.wfile.write(b" ")
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Service]]:
    services = []

    def start(answer: Answer) -> Service:
        service = Service(answer)
        services.append(service)
        threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return service

    yield start
    for service in services:
        service.ends.set()
        service.shutdown()
        service.server_close()


def says(text: str) -> tuple[int, bytes]:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


def config(service: Service, **kwargs: Any) -> RewardConfig:
    settings = {"base_url": service.url, "model": "judge-1", "backoff_s": 0.001, "timeout_s": LONGEST_S}
    return RewardConfig(fn="judge", kwargs={**settings, **kwargs})


Serve = Callable[[Answer], Service]


def test_the_last_score_of_the_answer_times_the_scale_is_the_reward(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    service = serve(lambda *_: says("Score: 3 would be too low. **Score:** 7.5"))
    template = 'Q {prompt} A {response} T {ground_truth} {"score": 1}'
    reward = resolve_reward(config(service, template=template, scale=0.1, api_key_env="JUDGE_KEY", max_tokens=9))
    assert judge(reward, "{prompt}", ["x"]) == 0.75
    (request,) = service.seen
    assert request == {
        "model": "judge-1",
        "messages": [{"role": "user", "content": "Q q A {prompt} T ['x'] {\"score\": 1}"}],
        "temperature": 0.0,
        "max_tokens": 9,
    }
    assert service.keys == ["Bearer secret"]


def test_requests_that_are_refused_for_now_are_sent_again(serve: Serve) -> None:
    replies = iter([(429, b"slow down"), (503, b"starting"), (200, b"<html>"), says("hm"), says("Score: 1")])
    service = serve(lambda *_: next(replies))
    assert judge(resolve_reward(config(service, retries=4)), "a", "a") == 1.0
    assert len(service.seen) == 5
    assert service.keys == [None] * 5


def test_a_service_that_hangs_is_left_after_the_time_out(serve: Serve) -> None:
    def hang(service: Service, body: dict[str, Any]) -> tuple[int, bytes]:
        if len(service.seen) == 1:
            service.ends.wait()
        return says("Score: 1")

    service = serve(hang)
    assert judge(resolve_reward(config(service, **IMPATIENT)), "a", "a") == 1.0
    assert service.in_work, "the first reply has not come"


def test_the_time_out_is_that_of_the_whole_reply(serve: Serve) -> None:
    service = serve(lambda *_: says("Score: 1"))
    service.trickles = True
    assert judge(resolve_reward(config(service, **IMPATIENT)), "a", "a") == 1.0
    assert len(service.seen) > 1


@pytest.mark.parametrize(
    ("reply", "reason", "attempts"),
    [
        ((500, b"broken"), "gave no usable answer in 3 attempts: status 500: 'broken'", 3),
        ((200, b'{"choices": []}'), r"in 3 attempts: the reply has no choices\[0\].message.content", 3),
        (says("Score: none"), "in 3 attempts: .* finds no score in the answer 'Score: none'", 3),
        (says(f"Score: {'9' * 400}"), "in 3 attempts: .* finds no score in the answer", 3),
        ((200, b"[" * 100_000), "in 3 attempts: the reply has no choices", 3),
        ((400, b"too long"), "in 1 attempt: status 400: 'too long'", 1),
    ],
)
def test_a_failure_ends_the_run_or_earns_what_the_recipe_says(
    serve: Serve, reply: tuple[int, bytes], reason: str, attempts: int
) -> None:
    service = serve(lambda *_: reply)
    with pytest.raises(ValueError, match=rf"{service.url}/chat/completions .*{reason}"):
        judge(resolve_reward(config(service, retries=2)), "a", "a")
    assert len(service.seen) == attempts
    assert judge(resolve_reward(config(service, retries=2, on_failure=-0.5)), "a", "a") == -0.5


def test_a_service_that_refuses_every_request_ends_the_run_in_any_case(serve: Serve) -> None:
    service = serve(lambda *_: (401, b"wrong key"))
    with pytest.raises(ValueError, match="status 401: 'wrong key'"):
        judge(resolve_reward(config(service, on_failure=0.0)), "a", "a")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9", "http://127.0.0.1:99999/v1", "http://no-such-host.invalid/v1", "http://[::1]:9"]
)
def test_a_service_that_cannot_be_reached_is_refused_before_the_run(serve: Serve, url: str) -> None:
    gone = config(serve(lambda *_: says("")), base_url=url, on_failure=0.0)
    with pytest.raises(
        ValueError, match=r"base_url='http://.*': (nothing answers at|it cannot be read) .* Start the service"
    ):
        resolve_reward(gone)


def test_many_failures_in_a_row_end_the_run_and_a_score_between_them_does_not(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fivefold.rewards.asking.MOST_FAILED", 4)
    says_score = iter([False] * 3 + [True] + [False] * 4)
    service = serve(lambda *_: says("Score: 1") if next(says_score) else (500, b"down"))
    reward = resolve_reward(config(service, retries=0, on_failure=0.25))
    assert [judge(reward, "a", "a") for _ in range(7)] == [0.25] * 3 + [1.0] + [0.25] * 3
    with pytest.raises(ValueError, match=r"for 4 responses in a row, .* The first reason: .*status 500: 'down'"):
        judge(reward, "a", "a")


@pytest.mark.parametrize("at_once", [b"", b"HTTP/1.1 200 OK\r\n"], ids=["status line", "headers"])
def test_headers_that_come_byte_by_byte_are_too_late(at_once: bytes) -> None:
    """Each read ends in time, but all of them together do not."""
    ends = threading.Event()

    def trickle(listener: socket.socket) -> None:
        while not ends.is_set():
            with suppress(OSError), listener.accept()[0] as connection:
                connection.sendall(at_once)
                rest = (b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 1000).removeprefix(at_once)
                for byte in rest:
                    if ends.wait(0.05):
                        return
                    connection.sendall(bytes([byte]))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=trickle, args=(listener,), daemon=True).start()
        client = HTTPClient(f"http://127.0.0.1:{listener.getsockname()[1]}", None, 0.4, 0, 0.0, 1)
        begin = time.monotonic()
        with pytest.raises(RequestFailed, match=r"no reply within timeout_s=0\.4 s"):
            client.ask({}, float)
        ends.set()
    assert time.monotonic() - begin < LONGEST_S / 4


def test_the_requests_of_a_step_run_together_up_to_the_limit(serve: Serve) -> None:
    together = threading.Barrier(4, timeout=LONGEST_S)

    def score(service: Service, body: dict[str, Any]) -> tuple[int, bytes]:
        together.wait()
        return says(f"Score: {body['messages'][0]['content']}")

    service = serve(score)
    reward = resolve_reward(config(service, template="{response}", concurrency=4))
    prompts = [Prompt(i, "q", (1,), None) for i in range(12)]
    assert compute_rewards(reward, prompts, [str(i) for i in range(12)]) == [float(i) for i in range(12)]
    assert service.most_in_work == 4


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"base_url": "localhost:8000"}, "must be a URL"),
        ({"base_url": "http://[::1/v1"}, "must be a URL"),
        ({"base_url": "http://:8000/v1"}, "must be a URL"),
        ({"base_url": "http://host:port/v1"}, "must be a URL"),
        ({"template": "{prompt}"}, "has no {response}"),
        ({"template": "{response} {groundtruth}"}, "did you mean {ground_truth}"),
        ({"pattern": "("}, "is not a regular expression"),
        ({"concurrency": 0}, "reward.kwargs.concurrency=0 must be from 1 to 1,024"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"on_failure": float("nan")}, "must be a finite number"),
        ({"model": None}, "reward.kwargs.model"),
        ({"modle": "x"}, r"\['modle'\]"),
    ],
)
def test_a_judge_that_cannot_work_is_refused_before_the_run(kwargs: dict[str, Any], message: str) -> None:
    settings = {"base_url": "https://example.org/v1", "model": "m", **kwargs}
    with pytest.raises(ValueError, match=message):
        resolve_reward(RewardConfig(fn="judge", kwargs=settings))


def test_a_key_that_is_not_set_is_refused_where_the_run_starts_but_not_in_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    settings = {"base_url": "https://example.org/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"}
    assert list(reward_problems(RewardConfig(fn="judge", kwargs=settings))) == []
    with pytest.raises(ValueError, match="NO_SUCH_KEY: this environment variable is not set"):
        resolve_reward(RewardConfig(fn="judge", kwargs=settings))
