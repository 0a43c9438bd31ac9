"""Calls of groups of workers that succeed."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from engines import Engine, GlooEngine, Tally, gone, listening_addresses
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fivefold.cluster.group import STREAM_AHEAD, WorkerGroup, fetch, put
from fivefold.cluster.nodes import Node
from fivefold.cluster.role import NODE, PLACE_ON_NODE, PROCESSES_ON_NODE, Role, worker_environment
from fivefold.cluster.session import Session
from fivefold.config.schema.machines import ClusterConfig, SchedulerConfig
from fivefold.layout.placement import Device
from fivefold.observe.timers import PhaseTimers

Groups = Mapping[str, WorkerGroup]


@pytest.fixture(scope="module")
def groups(session: Session) -> Iterator[Groups]:
    """Three actors and two of a rollout, for the first tests of this file; those that follow start their own."""
    roles = {"actor": 3, "rollout": 2}
    yield session.launch(*(Role(name, [Device(0, rank) for rank in range(n)], Engine) for name, n in roles.items()))
    session.kill()


def launch(session: Session, n: int, name: str = "actor") -> WorkerGroup:
    return session.launch(Role(name, [Device(0, rank) for rank in range(n)], Engine))[name]


def test_calls_reach_the_ranks_they_name(groups: Groups) -> None:
    group = groups["actor"]
    assert len(group) == 3
    assert group.call(Engine.echo, [7], suffix="!") == ["0:[7]!", "1:[7]!", "2:[7]!"]
    assert group.call_first(Engine.echo, "x") == "0:x"
    assert group.call_each(Engine.echo, [("a",), ("b",), ("c",)], [0, 1, 2]) == ["0:a", "1:b", "2:c"]
    assert group.call_each(Engine.echo, [("a",), ("b",), ("c",)], [2, 0]) == ["2:c", "0:a"]
    with pytest.raises(ValueError, match="arguments for 2 ranks, but has 3"):
        group.call_each(Engine.echo, [("a",), ("b",)], [0])


def test_a_part_of_the_held_object_is_made_once_in_each_process(groups: Groups) -> None:
    group = groups["rollout"]
    assert group.call(Tally.add, 2) == ["0:2", "1:2"]
    assert group.control(Tally.add, 3) == ["0:5", "1:5"]


def test_kept_payloads_are_read_by_other_workers_and_not_by_the_driver(groups: Groups) -> None:
    group = groups["rollout"]
    kept = group.keep_each(Engine.make_bytes, [(3,), (5,)], [0, 1])
    assert [summary for summary, _ in kept] == ["0 made 3", "1 made 5"]
    (_, first), (_, second) = kept
    # Each rank reads what both have made.
    assert group.call_each(Engine.total_length, [(first, second), (second,)], [0, 1]) == [8, 5]


def test_arguments_that_several_ranks_have_are_sent_once_and_results_that_nobody_wants_not_at_all(
    groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = groups["actor"]
    [(_, made)] = group.keep_each(Engine.make_bytes, [(3,)] * 3, [1])
    sent, store = [], ray.put

    def counted(value: Any) -> Any:
        sent.append(value)
        return store(value)

    monkeypatch.setattr(ray, "put", counted)
    both, own = (made, b"12", made), (b"1", made)
    assert group.call_each(Engine.total_length, [both, own, both], [0, 1, 2]) == [8, 4, 8]
    assert sent == [both]
    assert ray.get([group._workers[0].call_with.remote("total_length", reply, own) for reply in (True, False)]) == [
        4,
        None,
    ]


def test_ranks_whose_payload_is_not_wanted_leave_nothing_in_the_store(groups: Groups) -> None:
    group = groups["rollout"]
    kept = group.keep_each(Engine.make_bytes, [(3,), (5,)], [1])
    assert [(summary, len(fetch(payload))) for summary, payload in kept] == [("1 made 5", 5)]
    pair = [group._workers[0].keep.remote("make_bytes", False, {}, 3)]
    assert ray.get(pair[0]) == [None, None]


def test_a_worker_tells_how_far_it_is_while_the_driver_waits(session: Session, groups: Groups) -> None:
    group = groups["rollout"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(group.start(Engine.run_until_told).wait)
        while (report := session.progress().get("rollout")) is None or not report.share:
            assert not waiting.done()
            time.sleep(0.05)
        assert (report.action, report.share) == ("listening", 0.25)
        group.control(Engine.tell_to_stop, "enough")
        waiting.result()
    assert session.progress() == {}


def test_several_threads_wait_for_calls_of_their_own(groups: Groups, timers: PhaseTimers) -> None:
    timers.take()

    def call_often(name: str) -> list[str]:
        with timers.phase(name):
            return [groups[name].call_first(Engine.echo, number) for number in range(50)]

    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(call_often, groups))
    assert answers == [[f"0:{number}" for number in range(50)]] * 2
    assert timers.take().keys() == groups.keys()


def test_driver_and_workers_know_how_their_children_ended(groups: Groups) -> None:
    assert groups["rollout"].call(Engine.status_of_a_child) == [3, 3]
    assert Engine.status_of_a_child(None) == 3  # type: ignore[arg-type]


def test_a_feed_gives_the_stream_of_one_role_to_every_rank_of_another(groups: Groups) -> None:
    actor, rollout = groups["actor"], groups["rollout"]
    assert rollout.feed(Engine.total, actor.stream(Engine.items, 12), 1000) == [1000 + sum(range(12))] * 2
    assert actor.call(Engine.yielded) == [12, 12, 12]
    # Each feed is independent of the ones before it, even if their readers ended early.
    assert rollout.feed(Engine.take_one, actor.stream(Engine.items, 10)) == [0, 0]
    assert rollout.feed(Engine.total, actor.stream(Engine.items, 3), 0) == [3, 3]
    assert rollout.feed(Engine.total, actor.stream(Engine.items, 0), 5) == [5, 5]
    # Roles work at the same time.
    first, second = actor.start(Engine.echo, 1), rollout.start(Engine.echo, 2)
    assert (second.wait(), first.wait()) == (["0:2", "1:2"], ["0:1", "1:1", "2:1"])


def test_calls_on_single_ranks_come_back_as_they_end_with_payloads_that_workers_read(groups: Groups) -> None:
    group = groups["actor"]
    slow, quick = group.keep_on(0, Engine.work_until_told, 3), group.keep_on(1, Engine.work, 4)
    found, summary = group.first_kept([slow, quick])
    assert (found, summary) == (quick, 4)
    group.control(Engine.tell_to_stop, "enough")
    assert group.first_kept([slow]) == (slow, 3)
    assert group.call_each(Engine.echo, [(slow.payload,), (quick.payload,), ("",)], [0, 1]) == ["0:enough", "1:rank 1"]


def test_results_that_are_ready_are_taken_together(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of Ray's waits looks at all open references, so that one for each result would be slow on many ranks."""
    group = launch(session, 1)
    calls = [group.start(Engine.echo, number) for number in range(20)]
    refs = [ref for call in calls for ref in call._refs]
    ray.wait(refs, num_returns=len(refs))
    waits, wait = [], ray.wait

    def counted(refs: Sequence[Any], **options: Any) -> Any:
        waits.append(len(refs))
        return wait(refs, **options)

    monkeypatch.setattr(ray, "wait", counted)
    assert session.watch.wait(refs, "train", 60.0) == [f"0:{number}" for number in range(20)]
    assert len(waits) <= 3


def test_a_control_call_and_a_feed_beside_are_answered_while_a_method_runs(session: Session) -> None:
    group = launch(session, 2)
    running = group.start(Engine.run_until_told)
    items = [put(bytes([0, number])) for number in range(4)]
    assert group.feed_beside(Engine.total, items, 10) == [16, 16]
    assert group.control(Engine.tell_to_stop, "enough") == ["0 heard enough", "1 heard enough"]
    assert running.wait() == ["enough", "enough"]
    # What goes on at once lies on rows of its own.
    events = [json.loads(line) for line in (session.logs / "actor-0.events").read_text().splitlines()]
    rows = {event["name"]: event["thread"] for event in events}
    assert rows == {"build": "main", "run_until_told": "main", "total": "parallel", "tell_to_stop": "parallel"}


def test_a_stream_waits_for_its_reader(session: Session, tmp_path: Path) -> None:
    group, record = launch(session, 1), tmp_path / "yielded"
    stream = group.stream(Engine.items_on_record, str(record), 40)
    next(stream)
    time.sleep(1.0)
    assert record.stat().st_size <= 1 + STREAM_AHEAD + 2
    assert sum(1 for _ in stream) == 39


def test_cpu_workers_get_rank_threads_and_variables(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    devices = [Device(0, 0), Device(0, 1)]
    chosen = Role("chosen", devices[:1], Engine, threads=3, environment={"NCCL_DEBUG": "INFO"})
    groups = session.launch(Role("actor", devices, Engine), chosen)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")
    threads = str(max(1, min(16, len(os.sched_getaffinity(0)) // 2)))
    found = groups["actor"].call(Engine.environment, *names)
    assert found == [["0", "2", "0", "", threads, "1"], ["1", "2", "0", "", threads, "1"]]
    assert groups["chosen"].call_first(Engine.environment, "OMP_NUM_THREADS", "NCCL_DEBUG") == ["3", "INFO"]


def test_processes_have_the_variables_of_their_role(session: Session) -> None:
    """The recipe of the fixture gives some to all roles, and others to the rollout, whose followers have them too."""
    names = ("actor", "rollout", "rollout-follower")
    groups = session.launch(*(Role(name, [Device(0, 0)], Engine) for name in names))
    found = {name: groups[name].call_first(Engine.environment, "GIVEN", "OF_ALL") for name in names}
    assert found == {
        "actor": ["to all", "yes"],
        "rollout": ["to the rollout", "yes"],
        "rollout-follower": ["to the rollout", "yes"],
    }


def test_a_process_with_several_devices_sees_them_and_its_place_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are two nodes with four GPUs, two for each process; another job has the first four of each node."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/cache")
    monkeypatch.setenv("SGLANG_TIMEOUT_KEEP_ALIVE", "9")
    gpus, strategy = ("4", "5", "6", "7"), cast(PlacementGroupSchedulingStrategy, None)
    nodes = [Node(index, f"10.0.0.{index}", gpus, 8, f"eth{index}", 1, strategy) for index in range(2)]
    devices = [Device(node, local) for node in range(2) for local in range(4)][:6]
    role = Role("rollout", devices, Engine, devices_per_process=2)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", NODE, PLACE_ON_NODE, PROCESSES_ON_NODE, "CUDA_VISIBLE_DEVICES")
    found = [worker_environment(role, rank, nodes) for rank in range(3)]
    assert [[environment[name] for name in names] for environment in found] == [
        ["0", "3", "0", "0", "0", "2", "4,5"],
        ["1", "3", "0", "0", "1", "2", "6,7"],
        ["2", "3", "0", "1", "0", "1", "4,5"],
    ]
    assert [environment["GLOO_SOCKET_IFNAME"] for environment in found] == ["eth0", "eth0", "eth1"]
    assert [environment["OMP_NUM_THREADS"] for environment in found] == ["2", "2", "4"]
    assert {environment["VLLM_CACHE_ROOT"] for environment in found} == {"/cache"}
    assert {environment["SGLANG_TIMEOUT_KEEP_ALIVE"] for environment in found} == {"9"}


def test_a_role_has_a_process_for_each_group_of_devices(session: Session) -> None:
    devices = [Device(0, rank) for rank in range(4)]
    group = session.launch(Role("rollout", devices, Engine, devices_per_process=2))["rollout"]
    assert len(group) == 2
    assert group.call(Engine.environment, "RANK", PLACE_ON_NODE, PROCESSES_ON_NODE) == [
        ["0", "0", "2"],
        ["1", "1", "2"],
    ]


def test_output_goes_to_the_log_and_not_to_the_screen(session: Session, capfd: pytest.CaptureFixture[str]) -> None:
    group = launch(session, 2, "talker")
    group.call(Engine.say, "hello")
    for rank in range(2):
        assert (session.logs / f"talker-{rank}.log").read_text().count("hello") == 3
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def test_ranks_meet_in_torch_distributed(session: Session) -> None:
    role = Role("actor", [Device(0, 0)] * 2, GlooEngine, distributed=True, imports="colorsys")
    session.create(role)
    assert launch(session, 1, "rollout").call(Engine.echo, "up") == ["0:up"]  # while those of the actor wait
    group = session.launch(role)["actor"]
    assert group.call(GlooEngine.sum_of_ranks) == [1.0, 1.0]
    assert group.call(GlooEngine.imported_before_it_was_built) == [["colorsys"]] * 2
    # A run on one machine needs no other interface, and other networks may be public.
    assert listening_addresses(session) <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_workers_import_what_the_driver_does_but_installed_packages_first(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_driver.py").write_text(
        "class Held:\n    def origin(self):\n        import colorsys\n        return colorsys.__file__\n"
    )
    (tmp_path / "colorsys.py").write_text("# the user's, with the name of an installed module")
    monkeypatch.syspath_prepend(tmp_path)
    held = importlib.import_module("beside_driver").Held
    group = session.launch(Role("actor", [Device(0, 0)], held))["actor"]
    assert not Path(group.call_first(held.origin)).is_relative_to(tmp_path)


def test_a_role_may_name_the_function_that_builds_its_object(session: Session) -> None:
    group = session.launch(Role("actor", [Device(0, 0)], "fractions:Fraction", args=(3, 4)))["actor"]
    assert group.call_first(Fraction.as_integer_ratio) == (3, 4)


def test_kill_ends_workers_and_what_they_started(session: Session) -> None:
    group = launch(session, 2)
    pids = [*group.call(Engine.pid), *group.call(Engine.spawn_child)]
    session.kill()
    assert gone(pids)


def test_several_nodes_are_refused_without_scheduler_type_ray() -> None:
    config = SchedulerConfig()
    with pytest.raises(ValueError, match=r"cluster\.n_nodes is 2.*set scheduler\.type=ray"):
        Session.open(config, ClusterConfig(n_nodes=2), None, PhaseTimers())  # type: ignore[arg-type]
