"""Servers that hang: whether they sample tokens tells them from those that are busy with long answers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fivefold.rollout.contract import complete
from fivefold.rollout.servers import dialect as dialects
from fivefold.rollout.servers.process import ServerDied
from tests.rows import long
from tests.unit.rollout.conftest import spec_of
from tests.unit.rollout.fake_server import LATE, STUCK, write_python
from tests.unit.rollout.served import BEAT, GENERATE, Served, lose, requests_of, sampling, start

LONGEST_S = 120.0
"""Most seconds that a wait may take, which only a failure uses up."""
ENDED = r"within 0\.5 s, and was ended"


@pytest.fixture(params=["vllm", "sglang"])
def served(request: pytest.FixtureRequest, model_folder: Callable[..., Path], tmp_path: Path) -> Iterator[Served]:
    """A server with weights of version 0 that has to show that it goes on after a fifth of a second."""
    model = model_folder("qwen3_moe")
    options = {"can_sleep": False, "max_restarts": 1, "server_timeout_s": 0.2}
    spec = spec_of(request.param, model, python=write_python(tmp_path), **options)
    served = Served(spec, start(spec), tmp_path, load_file(model / "model.safetensors"))
    served.update(0)
    yield served
    served.engine.close()


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give servers half a second for a token; one that is well may take longer, so it is not to be asked then."""
    monkeypatch.setattr(dialects, "PAUSE_S", 0.5)
    yield
    monkeypatch.undo()


def n_beats(served: Served) -> int:
    return sum(row["path"] == BEAT[served.backend] for row in served.log.rows("request"))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fail(served: Served, how: str) -> None:
    """Let the server answer nothing any more, or sample nothing though it answers."""
    if how == "hangs":
        served.log.hang()
    else:
        (served.folder / STUCK).touch()


@pytest.mark.parametrize("how", ["samples nothing", *long("hangs")])
def test_a_server_that_hangs_is_started_again(
    how: str, served: Served, impatience: None, capfd: pytest.CaptureFixture[str]
) -> None:
    fail(served, how)
    assert lose(served.engine, dict(enumerate(requests_of(3), 4))).keys() == {4, 5, 6}
    assert re.search(rf"{ENDED}; it is started again \(1 of 1 times\)", capfd.readouterr().out)
    assert not served.engine.has_weights
    (served.folder / STUCK).unlink(missing_ok=True)
    served.update(1)
    assert len(served.log.rows("start")) == 2
    # It may hang as often as it may die.
    fail(served, how)
    with pytest.raises(ServerDied, match=ENDED):
        complete(served.engine, requests_of(3), sampling())


def test_a_server_that_is_busy_for_long_is_left_alone(served: Served) -> None:
    engine = served.engine
    before = len(served.log.posts())
    engine.submit(0, *requests_of(1, LATE), sampling())
    until(lambda: engine.collect(0.05) == [] and n_beats(served) >= 2)
    engine.submit(1, *requests_of(1), sampling())
    done: dict[int, object] = {}
    while len(done) < 2:
        done |= dict(engine.collect(0.05))
    paths = served.log.posts()[before:]
    assert set(paths) <= {GENERATE[served.backend], BEAT[served.backend]}, "it was not interrupted"
    assert paths.count(GENERATE[served.backend]) == 2
    assert len(served.log.rows("start")) == 1
    n = n_beats(served)
    time.sleep(0.5)
    assert engine.collect(0.05) == []
    assert n_beats(served) == n, "nobody waits for its answers"
