"""Servers that die while they sleep, fall asleep or wake: they are started again, and get weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fivefold.rollout.contract import complete
from fivefold.rollout.engines import DIALECTS
from fivefold.rollout.servers.command import server_command
from tests.unit.rollout.conftest import spec_of
from tests.unit.rollout.fake_server import Log, write_python
from tests.unit.rollout.served import Served, requests_of, sampling, start

Folder = Callable[..., Path]


@pytest.fixture
def served(model_folder: Folder, tmp_path: Path) -> Iterator[Served]:
    """A server that sleeps and may be started again once, with weights of version 0."""
    model = model_folder("qwen3_moe")
    spec = spec_of("sglang", model, python=write_python(tmp_path), max_restarts=1)
    served = Served(spec, start(spec), tmp_path, load_file(model / "model.safetensors"))
    served.update(0)
    yield served
    served.engine.close()


def kill(log: Log) -> None:
    os.kill(log.rows("start")[-1]["pid"], signal.SIGKILL)


def hand_over(served: Served, version: int) -> None:
    """Do what the driver does between two steps of a rollout that shares its devices."""
    served.engine.sleep()
    while not served.engine.wake_weights():
        served.engine.revive()
    served.update(version)
    served.engine.wake()


@pytest.mark.parametrize("dies", ["before it sleeps", "asleep", "before its cache"])
def test_a_server_that_dies_between_two_steps_is_started_again(dies: str, served: Served) -> None:
    engine, requests = served.engine, requests_of(3)
    wanted = [completion.token_ids.tolist() for completion in complete(engine, requests, sampling())]
    if dies == "before it sleeps":
        kill(served.log)
        hand_over(served, 1)
    elif dies == "asleep":
        engine.sleep()
        kill(served.log)
        assert not engine.wake_weights()
        hand_over(served, 1)
    else:
        engine.sleep()
        assert engine.wake_weights()
        served.update(1)
        kill(served.log)
        engine.wake()
        assert not engine.has_weights
        hand_over(served, 1)
    answers = complete(engine, requests, sampling())
    assert [completion.token_ids.tolist() for completion in answers] == wanted
    assert {version for completion in answers for version in completion.versions.tolist()} == {1}
    assert len(served.log.rows("start")) == 2
    hand_over(served, 2)
    # It may die as often as the recipe says.
    kill(served.log)
    with pytest.raises(RuntimeError, match="the server ended with status"):
        hand_over(served, 3)


def test_a_server_that_lives_is_not_revived(served: Served) -> None:
    served.engine.sleep()
    served.engine.revive()
    hand_over(served, 1)
    assert [row["pid"] for row in served.log.rows("start")] == [served.log.rows("load")[0]["pid"]]


KEEPS = {"vllm": "/sleep?level=1", "sglang": "/release_memory_occupation"}


@pytest.mark.parametrize("backend", KEEPS)
def test_a_server_that_has_loaded_its_weights_keeps_them_while_it_sleeps(
    backend: str, model_folder: Folder, tmp_path: Path
) -> None:
    spec = spec_of(backend, model_folder("qwen3_moe"), python=write_python(tmp_path), load_weights=True, max_restarts=1)
    command = server_command(DIALECTS[backend], spec, 81)
    assert ("--enable-weights-cpu-backup" in command) is (backend == "sglang")
    assert "dummy" not in command
    engine = start(spec)
    served = Served(spec, engine, tmp_path, {})
    wanted = [completion.token_ids.tolist() for completion in complete(engine, requests_of(2), sampling())]
    for _ in range(2):
        assert served.posts_during(engine.sleep) == [KEEPS[backend]]
        assert len(served.posts_during(engine.wake)) == 2
        assert [completion.token_ids.tolist() for completion in complete(engine, requests_of(2), sampling())] == wanted
    engine.sleep()
    kill(served.log)
    while not engine.wake_weights():
        engine.revive()
    engine.wake()
    assert [completion.token_ids.tolist() for completion in complete(engine, requests_of(2), sampling())] == wanted
    engine.close()
