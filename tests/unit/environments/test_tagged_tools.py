"""Questions with one tool in tags: programs in the sandbox, a search service, and the judged answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgpack
import pytest

from fivefold.config.schema.data import DatasetConfig
from fivefold.data.rows import load_rows
from fivefold.environments.games.tagged_tools import NO_MORE, TaggedTool
from fivefold.rewards.sandbox.runner import missing

READER = "fivefold.environments.games.tagged_tools:rows"


def begun(truth: Any, **options: Any) -> TaggedTool:
    game = TaggedTool()
    game.reset(truth, options)
    return game


@pytest.mark.skipif(bool(missing()), reason="needs a kernel that closes programs in")
def test_programs_run_as_often_as_they_may_and_the_answer_is_judged() -> None:
    game = begun("40353607", tool="code", max_uses=2, tool_reward=0.1, success_reward=0.5, timeout_s=2)
    shown, reward, is_over = game.step("Let me see. <code>print(7**9)</code>")
    assert (shown, reward, is_over) == ("Result: 40353607", 0.6, False)
    shown, reward, is_over = game.step("```python\nprint(1/0)\n```")
    assert "ZeroDivisionError" in shown
    assert shown.endswith(NO_MORE)
    assert (reward, is_over) == (0.1, False)
    assert game.step(r"<code>print(1)</code> \boxed{40353607}") == ("", 1.0, True), "the tool is used up"
    assert begun("40353607", tool="code").step(r"\boxed{7} <code>print(1)")[1:] == (0.0, True)
    late = begun("1", tool="code", timeout_s=0.5).step("<code>while True: pass</code>")[0]
    assert "The program was ended: time" in late


@pytest.fixture
def service() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A retrieval service and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(msgpack.unpackb(self.rfile.read(int(self.headers["Content-Length"]))))
            is_known = "pokum" in asked[-1]["query"]
            found = [{"document": {"contents": f"Pokum\nPokum lives in town {number}."}} for number in (1, 2)]
            body = msgpack.packb({"result": found[: asked[-1]["topk"]]})
            self.send_response(200 if is_known else 500)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve", asked
    server.shutdown()


def test_a_search_asks_the_service_of_the_row(service: tuple[str, list[dict[str, Any]]]) -> None:
    url, asked = service
    game = begun("Town 2", tool="search", search_url=url, n_documents=2, max_uses=5)
    shown, reward, is_over = game.step("<think>Where?</think> <search> where is pokum </search>")
    assert asked == [{"query": "where is pokum", "topk": 2, "return_scores": True}]
    assert shown.splitlines()[1:3] == [
        "Document 1 (Pokum): Pokum lives in town 1.",
        "Document 2 (Pokum): Pokum lives in town 2.",
    ]
    assert (reward, is_over) == (0.0, False)
    assert game.step("<answer>the town 2.</answer>") == ("", 1.0, True)
    with pytest.raises(ValueError, match=r"/retrieve answered with status 500"):
        begun("x", tool="search", search_url=url).step("<search>else</search>")


def test_rows_bring_a_tool(tmp_path: Path) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text(json.dumps({"q": "1+1?", "a": "2"}) + "\n")

    def read(**options: Any) -> list[dict[str, Any]]:
        kwargs = {"question_key": "q", "answer_key": "a", **options}
        return load_rows(DatasetConfig.model_validate({"path": str(file), "reader": READER, "reader_kwargs": kwargs}))

    [row] = read(tool="search", search_url="http://localhost:1", max_uses=1)
    assert (row["prompt"], row["reward_model"]["ground_truth"]) == ("1+1?", "2")
    assert row["extra_info"] == {"tool": "search", "search_url": "http://localhost:1", "max_uses": 1}
    with pytest.raises(ValueError, match="tool='serch' is none of code, search; did you mean search"):
        read(tool="serch")
    with pytest.raises(ValueError, match="tool=search asks a service: add search_url"):
        read(tool="search")
