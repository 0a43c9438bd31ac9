"""`scheduler.type=ray`: devices of a cluster that outlives the run. Its GPUs exist only in Ray's records."""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import SOON_S

from fivefold.cluster import joined_ray
from fivefold.cluster.joined_ray import JoinedRay

DRIVER = Path(__file__).with_name("joined_driver.py")


@pytest.fixture
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a Ray cluster with one node, which claims to have four GPUs. It asks for a token by default."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", getattr(request, "param", "token"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")  # no workers before they are asked for
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    options = f"--head --block --port={port} --num-cpus=2 --num-gpus=4 --include-dashboard=false --temp-dir={folder}"
    few_processes = "--no-monitor --include-log-monitor=false"
    command = [str(Path(sys.executable).with_name("ray")), "start", *options.split(), *few_processes.split()]
    head = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        while not listens(port):
            assert head.poll() is None
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(timeout=SOON_S)
        shutil.rmtree(folder, ignore_errors=True)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


def driven(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, again while the cluster does not answer yet."""
    for _ in range(3):
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
        if "no Ray cluster answers" not in done.stderr:
            break
    return done


def drive(*arguments: str) -> dict[str, object]:
    done = driven(str(DRIVER), *arguments)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_roles_share_reserved_devices_and_release_them_at_the_end(cluster: str, tmp_path: Path) -> None:
    told = drive(cluster, str(tmp_path), "launch")
    seen = told["seen"]
    assert isinstance(seen, dict)
    (first,), (second,) = seen["actor"]
    assert {first, second} < {"0", "1", "2", "3"}
    assert first != second
    assert seen["rollout"] == [[second], [first]]
    assert "cluster.n_gpus_per_node is 5, but this machine has 4 GPUs" in str(told["refused"])
    # Each run takes three of the four devices, so the second could not begin if the first had kept them.
    assert drive(cluster, str(tmp_path))["seen"] == {}


@pytest.mark.parametrize("cluster", ["disabled"], indirect=True)
def test_a_cluster_that_asks_for_no_token_is_refused_unless_the_recipe_takes_it(cluster: str) -> None:
    for require_token, words in ((True, "takes commands without a token, from whoever "), (False, "joined")):
        join = f"JoinedRay.join({cluster!r}, require_token={require_token}); print('joined')"
        done = driven("-c", f"from fivefold.cluster.joined_ray import JoinedRay; {join}")
        assert words in done.stderr + done.stdout
        assert (done.returncode == 0) is not require_token


def test_joining_a_cluster_that_was_killed_fails_before_ray_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined_ray.ray, "init", lambda **_: pytest.fail("Ray tries for minutes"))
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nothing listens there
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"no Ray cluster answers at scheduler.address='{address}'"):
            JoinedRay.join(address)
