"""The live page's server: what it tells, whom it tells nothing, and how it ends."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from fivefold.observe.jsonl import JsonLines
from tests.unit.report.made_runs import make_run
from tests.unit.report.test_pages import facts_of, table_of

COMMAND = [sys.executable, "-m", "fivefold", "watch"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of the run in a process of its own, and the page's address."""
    with subprocess.Popen([*COMMAND, str(run)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def fetch(url: str, **headers: str) -> bytes:
    with urlopen(Request(url, headers=headers), timeout=60) as answer:
        return answer.read()


def status(url: str, **headers: str) -> int:
    try:
        with urlopen(Request(url, headers=headers), timeout=60) as answer:
            return answer.status
    except HTTPError as error:
        return error.code


def test_the_page_follows_the_steps_that_another_process_writes(run: Path, server: tuple[object, str]) -> None:
    _, url = server
    page = fetch(url).decode()
    assert facts_of(page)["live"] is True
    assert "connect-src 'self'" in page
    assert len(table_of(gzip.decompress(fetch(f"{url}blocks/0-metrics")))["step"]) == 12
    with JsonLines(run / "metrics.jsonl") as metrics:
        metrics.write({"step": 13, "reward/mean": 0.5, "new/metric": 3.0})
    with (run / "metrics.jsonl").open("a") as half:
        half.write('{"step": 14, "rew')
    with JsonLines(run / "samples.jsonl") as samples:
        samples.write(
            {"step": 13, "prompt": "p", "prompt_index": 1, "response": "the newest", "reward": 1.0, "n_tokens": 2}
        )
    [state] = json.loads(fetch(f"{url}state"))
    assert (state["rows"], state["step"], state["samples"]["n"]) == (13, 13, 97)
    new = table_of(gzip.decompress(fetch(f"{url}blocks/0-metrics?from=12")))
    assert (new["step"].tolist(), new["new/metric"].tolist()) == ([13.0], [3.0])
    chunk = json.loads(gzip.decompress(fetch(f"{url}blocks/0-samples-chunk-1")))
    assert chunk[-1]["response"] == "the newest"
    assert status(f"{url}blocks/0-samples-chunk-2") == 404


def test_the_server_tells_nothing_without_its_token_nor_beside_the_run(run: Path, server: tuple[object, str]) -> None:
    _, url = server
    base, token = url.rstrip("/").rsplit("/", 1)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", base)
    for wrong in ("", "x" * len(token), token[:-1], f"{token}%00", "..", "%2e%2e"):
        for what in ("", "state", "blocks/0-metrics"):
            assert status(f"{base}/{wrong}/{what}") == 404
    secret = run.parent / "secret.txt"
    secret.write_text("a secret")
    for path in (
        "../secret.txt",
        "..%2fsecret.txt",
        "%2e%2e/secret.txt",
        f"/{secret}",
        "0-metrics/../../secret.txt",
        "1-metrics",
    ):
        assert status(f"{url}blocks/{path}") == 404
        assert status(f"{url}{path}") == 404
    assert status(f"{url}blocks/0-metrics?from=-1") == 404
    assert status(url, Host="elsewhere.example") == 400
    with urlopen(url, timeout=60) as answer:
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cache-Control"] == "no-store"


def test_ctrl_c_ends_the_server_without_a_traceback(server: tuple[subprocess.Popen[str], str]) -> None:
    process, url = server
    assert status(f"{url}state") == 200
    os.kill(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, rest
    assert rest.replace("Press Ctrl-C to end.", "").strip() == ""
