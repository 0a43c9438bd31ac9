"""A server whose processes are on two nodes, which are two addresses of this machine."""

from __future__ import annotations

import base64
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fivefold.rollout.contract import complete
from fivefold.rollout.engines import DIALECTS
from fivefold.rollout.replica import ReplicaNode, ReplicaSpec
from fivefold.rollout.servers import sglang_dialect
from fivefold.rollout.servers.engine import ServerEngine
from fivefold.rollout.servers.follower import FollowerHost
from fivefold.rollout.servers.process import ServerDied
from fivefold.weights.device_buckets import DeviceBucket
from fivefold.weights.table import TRANSPORTS
from fivefold.weights.transport import Route
from tests.rows import long
from tests.unit.rollout import fake_server
from tests.unit.rollout.conftest import spec_of
from tests.unit.rollout.fake_server import LONG, LONG_PROMPT, Log, write_python
from tests.unit.rollout.served import GENERATE, PROMPT, requests_of, sampling, start
from tests.unit.rollout.test_server_process import alive, assert_gone
from tests.unit.rollout.test_server_weights import HANDLE, INVITATION, buckets_of

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux has all addresses of 127.0.0.0/8 on its loopback interface"
)

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
BOTH = pytest.mark.parametrize("backend", ["vllm", "sglang"])


OverNodes = Callable[[ReplicaSpec], ReplicaSpec]


@pytest.fixture
def over_nodes() -> Iterator[OverNodes]:
    """Return a spec with a follower on the second node, which ends with the test."""
    hosts = []

    def make(spec: ReplicaSpec) -> ReplicaSpec:
        hosts.append(FollowerHost(DIALECTS[spec.backend], spec, SECOND))
        return replace(spec, node=ReplicaNode(host=FIRST), followers=(hosts[-1].address(),))

    yield make
    for host in hosts:
        host.close()


@pytest.fixture
def started(
    over_nodes: OverNodes, model_folder: Callable[..., Path], tmp_path: Path
) -> Iterator[Callable[..., ServerEngine]]:
    """Start an engine over two nodes, whose processes log to `tmp_path` and end with the test."""
    engines = []

    def make(backend: str, **changes: Any) -> ServerEngine:
        given = {"tp": 2, "can_sleep": False, "python": write_python(tmp_path), **changes}
        engines.append(start(over_nodes(spec_of(backend, model_folder("qwen3_moe"), **given))))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def starts(folder: Path) -> list[dict[str, Any]]:
    """Return the first rows of both nodes' processes, that of the first node first, of the last start."""
    rows = Log(folder).rows("start")[-2:]
    return sorted(rows, key=lambda row: value(row, "--node-rank"))


def value(row: dict[str, Any], flag: str) -> str:
    return str(row["command"][row["command"].index(flag) + 1])


@BOTH
def test_each_node_starts_its_part_and_the_first_one_answers(
    backend: str, started: Callable[..., ServerEngine], tmp_path: Path
) -> None:
    engine = started(backend, load_weights=True)
    assert len(complete(engine, requests_of(3), sampling())) == 3
    first, second = starts(tmp_path)
    assert [value(row, "--nnodes") for row in (first, second)] == ["2", "2"]
    programs = {
        "vllm": (["vllm.entrypoints.openai.api_server"], ["vllm.entrypoints.cli.main", "serve", "--headless"]),
        "sglang": (["fivefold_sglang"], ["fivefold_sglang"]),
    }[backend]
    for row, program in zip((first, second), programs, strict=True):
        assert row["command"][: 1 + len(program)] == ["-m", *program]
    if backend == "vllm":
        masters = {(value(row, "--master-addr"), value(row, "--master-port")) for row in (first, second)}
        assert value(first, "--uds") != value(second, "--uds")
    else:
        masters = {tuple(value(row, "--dist-init-addr").split(":")) for row in (first, second)}
        assert value(first, "--port") != value(second, "--port")
    [(host, port)] = masters
    assert host == FIRST
    assert int(port) > 0
    variable = {"vllm": "VLLM_HOST_IP", "sglang": "SGLANG_HOST_IP"}[backend]
    assert [row["environment"][variable] for row in (first, second)] == [FIRST, SECOND]
    pids = [pid for row in (first, second) for pid in (row["pid"], row["parent"])]
    assert alive(pids) == pids
    engine.close()
    assert alive(pids) == []


def test_sglang_gets_the_handles_of_both_nodes_devices_in_the_order_of_its_ranks(
    started: Callable[..., ServerEngine],
    model_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    # The follower looks for its devices before the first node does.
    found = iter([["uuid-0"], ["uuid-1"]])
    monkeypatch.setattr(sglang_dialect, "visible_uuids", lambda: next(found))
    engine = started("sglang", route=Route(TRANSPORTS["ipc"], "bfloat16", checksum=False))
    weights = load_file(model_folder("qwen3_moe") / "model.safetensors")
    handles = {"uuid-0": HANDLE, "uuid-1": (*HANDLE[:4], "other", *HANDLE[5:])}

    def with_handles(bucket: DeviceBucket) -> DeviceBucket:
        return replace(bucket, handles=handles)

    engine.load_buckets(map(with_handles, buckets_of(weights, "ipc")), 1)
    posted = [row["body"] for row in Log(tmp_path).rows("request") if row["path"] == "/update_weights_from_tensor"]
    pickles = [base64.b64decode(part) for part in posted[0]["serialized_named_tensors"]]
    assert [uuid in part for part, uuid in zip(pickles, (b"uuid-1", b"uuid-0"), strict=True)] == [True, True]


def go_on_until_it_dies(engine: ServerEngine) -> None:
    while True:
        engine.expect_transfer()


@pytest.mark.parametrize(("node", "backend"), [(0, "sglang"), (1, "vllm"), *long((0, "vllm"), (1, "sglang"))])
def test_a_node_whose_processes_die_takes_those_of_the_other_along(
    node: int,
    backend: str,
    started: Callable[..., ServerEngine],
    model_folder: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """The replica begins anew on both, as often as the recipe says, and enters another group for its weights."""
    weights = load_file(model_folder("qwen3_moe") / "model.safetensors")
    engine = started(backend, route=Route(TRANSPORTS["nccl"], "bfloat16", checksum=False), max_restarts=1)

    def update(version: int) -> None:
        engine.enter(INVITATION, 1)
        engine.load_buckets(iter(buckets_of(weights, "nccl")), version)
        [completion] = complete(engine, requests_of(1), sampling())
        assert set(completion.versions.tolist()) == {version}

    update(1)
    before = starts(tmp_path)
    [request] = requests_of(1)
    engine.submit(0, replace(request, token_ids=(LONG, 1, *[5] * (LONG_PROMPT - 2))), sampling())
    while not n_long(backend, tmp_path):
        engine.collect(0.05)
    os.kill(before[node]["pid"], signal.SIGKILL)
    while not (lost := engine.take_lost()):
        engine.collect(0.05)
    assert list(lost) == [0]
    assert_gone([pid for row in before for pid in (row["pid"], row["parent"])])
    update(2)
    assert len(Log(tmp_path).rows("start")) == 4

    after = starts(tmp_path)
    os.kill(after[node]["pid"], signal.SIGKILL)
    why = "the server ended with status 137"
    with pytest.raises(
        ServerDied, match=f"^{why}" if node == 0 else f"^the server's part on node {SECOND} says: {why}"
    ):
        go_on_until_it_dies(engine)
    assert_gone([after[0]["pid"], after[0]["parent"]])


def n_long(backend: str, folder: Path) -> int:
    """Return how many requests have come that are not answered before a pause."""
    bodies = [row["body"] for row in Log(folder).rows("request") if row["path"] == GENERATE[backend]]
    return sum(body[PROMPT[backend]][0] == LONG for body in bodies)


def test_a_part_ends_when_the_first_node_is_gone_and_strangers_start_none(
    over_nodes: OverNodes, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    spec = over_nodes(spec_of("sglang", model_folder("qwen3_moe"), python=write_python(tmp_path)))
    [address] = spec.followers
    assert "key" not in repr(address)
    with pytest.raises(AuthenticationError):
        Client((address.host, address.port), authkey=b"another")
    for n_starts in (1, 2):
        with Client((address.host, address.port), authkey=address.key) as head:
            head.send(spec.by_node(1)[1])
            while len(rows := Log(tmp_path).rows("start")) < n_starts:
                time.sleep(0.02)
        assert_gone([rows[-1]["pid"], rows[-1]["parent"]])


def test_a_part_that_cannot_start_says_so(
    over_nodes: OverNodes, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    python = write_python(tmp_path, **{fake_server.DIES_IN: "start"})
    spec = over_nodes(spec_of("sglang", model_folder("qwen3_moe"), python=python))
    [address] = spec.followers
    with Client((address.host, address.port), authkey=address.key) as head:
        head.send(spec.by_node(1)[1])
        assert head.recv().startswith(f"the server ended with status {fake_server.STATUS_AT_START};")
