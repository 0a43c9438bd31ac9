"""Folders, memory, cores, names and proxies: from which value on each is a warning or a problem."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.doctor import machine
from fivefold.doctor.finding import GIB
from fivefold.doctor.machine import (
    Place,
    available_memory,
    check_cores,
    check_machine,
    check_memory,
    check_place,
    check_shared_memory,
    look_at_places,
)
from fivefold.doctor.network import (
    check_addresses,
    check_host_name,
    check_loopback,
    check_network,
    check_proxies,
    check_ray_address,
)


@pytest.mark.parametrize(
    ("free", "writable", "status"),
    [(500 * GIB, True, "ok"), (10 * GIB, True, "warning"), (GIB // 2, True, "problem"), (500 * GIB, False, "problem")],
)
def test_a_folder_must_be_writable_and_have_space(free: int, writable: bool, status: str) -> None:
    finding = check_place(Place("outputs", Path("/data"), free, writable, "cluster.fileroot=FOLDER"))
    assert finding.status == status
    assert "cluster.fileroot" in finding.advice


@pytest.mark.parametrize(
    ("free", "n_gpus", "status"),
    [(64 * 2**20, 0, "warning"), (64 * 2**20, 8, "problem"), (16 * GIB, 8, "ok"), (None, 0, "warning")],
)
def test_little_shared_memory_is_a_problem_with_several_gpus(free: int | None, n_gpus: int, status: str) -> None:
    assert check_shared_memory(free, n_gpus).status == status


def test_few_cores_a_high_load_and_little_memory_are_warnings() -> None:
    assert [check_cores(8, 3.0).status, check_cores(8, 40.0).status, check_cores(0.5, 0.0).status] == [
        "ok",
        "warning",
        "warning",
    ]
    assert [check_memory(64 * GIB).status, check_memory(GIB).status] == ["ok", "warning"]


def test_memory_that_a_container_can_give_up_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    for name, text in (("max", GIB), ("current", GIB - 2**20), ("stat", f"anon 7\ninactive_file {GIB // 2}")):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    assert available_memory() == GIB // 2 + 2**20
    (tmp_path / "memory.stat").unlink()
    assert available_memory() == 2**20


def test_the_folder_of_models_is_found_though_it_may_not_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", f"/{'x' * 300}/models")  # refused as a folder without permission is
    [models] = [place for place in look_at_places() if place.title == "model downloads"]
    assert (models.path, models.setting) == (Path("/"), "HF_HOME=FOLDER")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    [models] = [place for place in look_at_places() if place.title == "model downloads"]
    assert (models.path, models.setting) == (tmp_path, "HF_HUB_CACHE=FOLDER")


def test_an_empty_address_names_no_cluster() -> None:
    assert check_ray_address("", listening=False).found == "none here"


def test_a_proxy_that_is_also_for_this_machine_is_a_warning() -> None:
    assert check_proxies({}) == []
    assert check_proxies({"HTTPS_PROXY": "http://proxy:3128"})[0].status == "warning"
    assert check_proxies({"https_proxy": "http://proxy:3128", "NO_PROXY": "localhost, 10.0.0.1"})[0].status == "ok"


def test_the_host_name_the_addresses_and_the_ports_are_judged() -> None:
    assert check_loopback().status == "ok"
    assert check_host_name("node-7", False).status == "warning"
    assert "cluster.n_nodes=1" in check_addresses((), (), None).advice
    assert "mlx5_0" in check_addresses(("10.0.0.7",), ("mlx5_0",), (32768, 60999)).found
    assert check_addresses(("10.0.0.7",), (), (60000, 60100)).status == "warning"


def test_every_line_about_this_machine_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the folder of runs is below the working folder
    findings = check_machine(0) + check_network({})
    assert len(findings) > 8
    assert all(finding.found and finding.advice for finding in findings)
