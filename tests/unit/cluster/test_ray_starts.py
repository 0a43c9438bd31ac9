"""How a private Ray starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray._private.services
import ray._raylet

from fivefold.cluster.compat import asked_often
from fivefold.cluster.session import Session


def test_a_start_asks_often_whether_the_raylet_has_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [{}, {}, {"a node": "its facts"}]
    client = SimpleNamespace(get_all_node_info=lambda: answers.pop(0))
    monkeypatch.setattr(ray._raylet, "GcsClient", lambda address: client)
    # Ray's own question sleeps for a second if the raylet has not registered.
    monkeypatch.setattr(ray._private.services, "get_node", lambda address, node: (address, node, len(answers)))
    with asked_often():
        assert ray._private.services.get_node("address", "node") == ("address", "node", 0)
    assert ray._private.services.get_node("address", "node") == ("address", "node", 0)


def test_the_raylet_has_no_agents(session: Session) -> None:
    assert session._own_ray is not None
    processes = list(session._own_ray.processes())
    assert {"raylet", "gcs_server"} <= {process.name() for process in processes}
    titles = [" ".join(process.cmdline()) for process in processes if process.name() not in ("raylet", "gcs_server")]
    assert not [title for title in titles if "agent" in title.lower()], titles
