"""Steps and evaluations whose judge is away, although the recipe says what a response without a score earns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from fivefold.data.prompts import PromptDataset
from fivefold.evaluate import Evaluator
from fivefold.rewards.judge import Judge
from fivefold.types import Prompt
from tests.unit.experience.streams import BATCH, SAMPLES, ScriptedWorker, recipe_of, scripted

N_OF_A_STEP = BATCH * SAMPLES
FIRST_REASON = f"scored none of the {N_OF_A_STEP} responses of a step.*on_failure=0 .* The first reason: .*status 500"


@contextmanager
def service(scores: Callable[[int], bool]) -> Iterator[Judge]:
    """Yield a judge whose service scores the requests that `scores` accepts, by their number, and fails at others."""
    seen = iter(range(1_000_000))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            reply = b'{"choices": [{"message": {"content": "Score: 1"}}]}'
            self.send_response(200 if scores(next(seen)) else 500)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        yield Judge(url, "judge", retries=0, on_failure=0.0)
        server.shutdown()


@pytest.mark.parametrize("age", [0, 1])
def test_a_step_without_any_score_ends_the_run_with_the_first_reason(age: int) -> None:
    ahead = f"rollout.max_head_offpolicyness={age}"
    with service(lambda number: False) as judge, scripted(ScriptedWorker(), judge, ahead) as source:
        source.weights_sent(0)
        with pytest.raises(ValueError, match=FIRST_REASON):
            source.take(1)


@pytest.mark.parametrize("age", [0, 1])
def test_a_service_that_goes_away_ends_the_run_at_the_first_step_without_it(age: int) -> None:
    ahead, rewards = f"rollout.max_head_offpolicyness={age}", list[float]()
    scores = service(lambda number: number < N_OF_A_STEP + 1)
    with scores as judge, scripted(ScriptedWorker(), judge, ahead) as source:
        source.weights_sent(0)
        for step in (1, 2):
            rewards += [sample.reward for sample in source.take(step).samples]
            source.weights_sent(step)
        with pytest.raises(ValueError, match=FIRST_REASON):
            source.take(3)
    # One response of the second step has a score.
    assert rewards == [1.0] * (N_OF_A_STEP + 1) + [0.0] * (N_OF_A_STEP - 1)


def test_an_evaluation_without_any_score_ends_the_run() -> None:
    with service(lambda number: False) as judge, scripted(ScriptedWorker(), judge) as source:
        prompts = (Prompt(0, "0", (3, 4), ""),)
        with pytest.raises(ValueError, match=r"scored none of the .* responses of a step or an evaluation"):
            Evaluator(recipe_of(), {"valid_dataset": PromptDataset(prompts, 1, 0)}).run(source.stream)
