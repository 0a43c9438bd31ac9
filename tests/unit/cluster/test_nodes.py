"""Nodes: their order, their software, their network interface, and which of them are lost."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from fivefold.cluster.errors import LostNode, Member, NodesLost
from fivefold.cluster.nodes import check_versions, interface_of
from fivefold.cluster.ray_nodes import address_order
from fivefold.observe.machine import versions


def test_addresses_are_in_the_order_of_their_numbers() -> None:
    hosts = ["10.0.0.10", "fd00::2", "10.0.0.9", "9.255.0.1"]
    assert sorted(hosts, key=address_order) == ["9.255.0.1", "10.0.0.9", "10.0.0.10", "fd00::2"]


def test_the_loopback_interface_has_all_loopback_addresses_and_no_interface_a_foreign_one() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback in {name for _, name in socket.if_nameindex()}
    assert interface_of("127.0.0.3") == loopback
    assert interface_of("198.51.100.1") is None  # an address that RFC 5737 keeps for documents


def test_a_node_may_have_builds_for_other_devices_but_no_other_versions() -> None:
    here = versions()
    major, minor, _ = here["python"].split(".")
    same = here | {"torch": here["torch"].partition("+")[0] + "+cu128", "python": f"{major}.{minor}.99"}
    check_versions({"10.0.0.1": here, "10.0.0.2": same})
    for name, other in (("transformers", "4.0.0"), ("python", f"{major}.99.1")):
        with pytest.raises(ValueError, match=f"node 10.0.0.3 has {name} {other}, but the driver has {name} "):
            check_versions({"10.0.0.2": same, "10.0.0.3": here | {name: other}})
    without = {name: version for name, version in here.items() if name != "megatron-core"}
    with pytest.raises(ValueError, match=r"node 10\.0\.0\.2 has megatron-core none"):
        check_versions({"10.0.0.2": without})


def test_lost_nodes_are_named_with_their_processes_and_what_to_do() -> None:
    member = Member("actor", 3, "10.0.0.3", Path("actor-3.log"), strategy=None)  # type: ignore[arg-type]
    lost = [LostNode("10.0.0.3", (member,)), LostNode("10.0.0.4", ())]
    message = str(NodesLost(lost, "train", n_left=2, head=None))
    assert message.startswith("lost nodes 10.0.0.3 (actor rank 3), 10.0.0.4 (no process of the run) in phase 'train'")
    assert "cluster.n_nodes=2" in message
    assert "head" not in message
    assert "10.0.0.4 is the head" in str(NodesLost(lost, "train", n_left=2, head="10.0.0.4"))
    assert "n_nodes" not in str(NodesLost(lost, "train", n_left=0, head=None))
