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

from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.observe.jsonl import JsonLines
from fivefold.observe.run_dir import RunDir
from fivefold.observe.step_log import SampleLog
from fivefold.report.live import Watched
from fivefold.report.series import MetricsFile
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


def test_the_page_keeps_what_it_has_while_files_cannot_be_read(run: Path, server: tuple[object, str]) -> None:
    _, url = server
    file, before = run / "status.json", (run / "status.json").read_bytes()
    [known] = json.loads(fetch(f"{url}state"))
    file.write_bytes(b'{"state": "runn')
    [state] = json.loads(fetch(f"{url}state"))
    assert "its status.json is damaged" in state["error"]
    assert state == known | {"error": state["error"]}
    assert facts_of(fetch(url).decode())["runs"][0]["error"] == state["error"]
    # Half a surrogate pair, as of a path that is not UTF-8, has no encoding.
    file.write_text(json.dumps(json.loads(before) | {"error": "no file \udcff"}))
    [state] = json.loads(fetch(f"{url}state"))
    assert state["error"] == "no file \udcff"
    assert facts_of(fetch(url).decode())["runs"][0]["error"] == "no file \udcff"
    file.write_bytes(before)
    assert json.loads(fetch(f"{url}state")) == [known]


def test_steps_and_samples_that_were_made_anew_take_the_place_of_those_that_were_read(tmp_path: Path) -> None:
    watched = Watched(make_run(tmp_path, n_steps=8))
    recipe = load_recipe(watched.run.folder.recipe, [], TrainRecipe)
    for number, text in enumerate(("once", "more"), start=2):
        known = watched.state()
        with RunDir.resume(recipe, step=4) as folder:
            folder.started()
            with JsonLines(folder.metrics) as metrics, SampleLog(folder.samples, folder.sample_parts) as samples:
                for step in range(5, 11):
                    metrics.write({"step": step, "reward/mean": float(number), "filler": "x" * 1000})
                    samples.write([{"step": step, "prompt": "p", "response": text, "reward": 0}] * 8)
                    samples.complete()
                    if step == 8:  # a part, which has the same name each time
                        samples.sync()
        watched.refresh()
        state = watched.state()
        assert (state["beginnings"], state["rows"]) == (number, 10)
        assert state["samples"]["changes"] > known["samples"]["changes"]
        assert watched.run.series.columns["reward/mean"].tolist()[4:] == [number] * 6
        chunk = watched.block("samples-chunk", 0, 0)
        assert chunk is not None
        assert [each["response"] for each in json.loads(gzip.decompress(chunk))][32:] == [text] * 32


def test_a_run_that_was_deleted_and_begun_anew_has_no_step_of_the_old_one(tmp_path: Path) -> None:
    run = make_run(tmp_path, n_steps=3)
    metrics = MetricsFile(run / "metrics.jsonl")
    assert len(metrics.read()) == 3
    (run / "metrics.jsonl").unlink()
    assert len(metrics.read()) == 0


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
