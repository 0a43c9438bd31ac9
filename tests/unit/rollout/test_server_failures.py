"""Servers that fail in other ways than by a broken connection, in each thing that they are asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fivefold.roles.responses import Job
from fivefold.rollout.contract import complete
from fivefold.rollout.servers import life
from fivefold.types import Prompt
from tests.rows import long
from tests.unit.experience.local_replicas import EngineWorker
from tests.unit.rollout import fake_server
from tests.unit.rollout.conftest import spec_of
from tests.unit.rollout.fake_server import write_python
from tests.unit.rollout.served import GENERATE, Served, lose, requests_of, sampling, start

LOAD = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}
PHASES = {
    "vllm": [
        "/collective_rpc", "/reset_prefix_cache", "/sleep?level=2", "/wake_up?tags=weights", "/wake_up?tags=kv_cache",
    ],
    "sglang": ["/update_weights_from_disk", "/release_memory_occupation", "/resume_memory_occupation"],
}  # fmt: skip
BACKENDS = pytest.mark.parametrize("backend", PHASES)

Start = Callable[..., Served]


@pytest.fixture
def started(model_folder: Callable[..., Path], tmp_path: Path) -> Iterator[Start]:
    """Start a server that fails in the first request to a path, as `how` says, and may be started again once."""
    engines = []

    def begin(backend: str, path: str, how: str, **changes: object) -> Served:
        model = model_folder("qwen3_moe")
        variables = {fake_server.DIES_IN: path, fake_server.DIES_ONCE: "1", fake_server.HOW: how}
        options = {"python": write_python(tmp_path, **variables), "max_restarts": 1, **changes}
        spec = spec_of(backend, model, **options)
        served = Served(spec, start(spec), tmp_path, load_file(model / "model.safetensors"))
        engines.append(served.engine)
        return served

    yield begin
    for engine in engines:
        engine.close()


def take_a_step(served: Served, version: int) -> None:
    """Sleep, take weights and wake, as `Roles.send_weights` does, and answer a request."""
    served.engine.sleep()
    while not served.engine.has_weights:
        served.engine.sleep()
        while not served.engine.wake_weights():
            served.engine.revive()
        served.update(version)
        served.engine.wake()
    [completion] = complete(served.engine, requests_of(1), sampling())
    assert set(completion.versions.tolist()) == {version}


@pytest.mark.parametrize(
    ("backend", "path"),
    [*LOAD.items(), *long(*((name, path) for name in PHASES for path in PHASES[name] if path != LOAD[name]))],
)
def test_a_server_that_hangs_between_two_steps_is_started_again(
    backend: str, path: str, started: Start, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(life, "GRACE_S", 3.7)
    served = started(backend, path, "hangs", server_timeout_s=0.3)
    monkeypatch.undo()
    take_a_step(served, 4)
    assert "within 4 s, and was ended; it is started again (1 of 1 times)" in capfd.readouterr().out
    [told] = served.engine.take_restarts()
    assert "within 4 s, and was ended; it is started again (1 of 1 times). Its last messages:\n" in told
    assert served.engine.take_restarts() == []
    assert len(served.log.rows("start")) == 2


@BACKENDS
def test_a_server_whose_engine_has_died_is_started_again_though_it_still_answers(backend: str, started: Start) -> None:
    served = started(backend, GENERATE[backend], "engine")
    served.update(0)
    assert lose(served.engine, dict(enumerate(requests_of(3))))
    take_a_step(served, 1)
    assert len(served.log.rows("start")) == 2


@BACKENDS
def test_a_server_whose_engine_dies_of_weights_is_started_again(backend: str, started: Start) -> None:
    served = started(backend, LOAD[backend], "engine")
    take_a_step(served, 1)
    assert len(served.log.rows("start")) == 2


@BACKENDS
def test_half_an_answer_is_an_error(backend: str, started: Start) -> None:
    served = started(backend, GENERATE[backend], "cuts")
    served.update(0)
    with pytest.raises(RuntimeError, match="the server"):
        complete(served.engine, requests_of(1), sampling())


@pytest.mark.parametrize(("backend", "path"), [("sglang", "/update_weights_from_disk"), ("vllm", "/collective_rpc")])
def test_half_a_reply_to_weights_is_an_error_that_repeats_it(backend: str, path: str, started: Start) -> None:
    served = started(backend, path, "cuts")
    with pytest.raises(RuntimeError, match=rf"the server's reply to {path} is not JSON \(.*\): \{{"):
        served.update(0)


def test_weights_from_files_have_the_version_that_was_sent(started: Start) -> None:
    served = started("sglang", "", "", max_restarts=0)
    served.update(3)
    (served.folder / fake_server.FORGETFUL).touch()
    with pytest.raises(RuntimeError, match="to version 4 the server says that its weights are version 'default'"):
        served.update(4)


@BACKENDS
def test_requests_that_come_to_a_server_after_its_death_are_left_to_others(backend: str, started: Start) -> None:
    served = started(backend, GENERATE[backend], "engine", can_sleep=False)
    served.update(0)
    served.engine.submit(7, *requests_of(1), sampling())
    while served.engine.has_weights:
        assert served.engine.collect(0.1) == []
    with pytest.raises(RuntimeError, match="no complete set of weights"):
        complete(served.engine, requests_of(1), sampling())
    assert list(served.engine.take_lost()) == [7]


def test_the_last_messages_are_the_end_of_the_log(tmp_path: Path) -> None:
    code = (
        "import os, sys; from fivefold.rollout.servers.process import last_said; "
        "[print(f'line {n}', flush=True) for n in range(20_000)]; print(); print('x' * 400, flush=True); "
        "os.write(2, last_said().encode())"
    )
    with (tmp_path / "log").open("w") as log:
        to_file = subprocess.run(
            [sys.executable, "-c", code], stdout=log, stderr=subprocess.PIPE, text=True, check=True
        )
    assert to_file.stderr.splitlines() == [*(f"line {n}" for n in range(19_996, 20_000)), "x" * 300]
    to_pipe = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert to_pipe.stderr == ""


def test_a_replica_reports_each_restart_once(started: Start) -> None:
    """Its first request is the end of the first server."""
    served = started("sglang", GENERATE["sglang"], "engine", load_weights=True, can_sleep=False)
    worker = EngineWorker(served.engine)
    job = Job(0, Prompt(0, "", (3, 4), None), requests_of(1), sampling())
    report, _ = worker.advance([job], 5.0)
    while not report.restarts:
        report, _ = worker.advance([], 5.0)
    assert ["it is started again (1 of 1 times)" in why for why in report.restarts] == [True]
    assert list(report.lost) == [0]
    report, _ = worker.advance([], 0.1)
    assert not report.restarts
