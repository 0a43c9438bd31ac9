"""What the roles of a run are started with, in a session without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fivefold.cluster.role import Role
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import SHAPES
from fivefold.layout.placement import place_allocation
from fivefold.layout.recipe import recipe_allocation
from fivefold.planning.decisions import while_generating
from fivefold.roles.devices import Roles
from fivefold.roles.launch import launch_roles
from fivefold.roles.trainer_worker import TrainerSpec
from fivefold.weights.table import choose_route


class Group:
    """The processes of a role, which are only named. Each answers every call with the node that it is on."""

    def __init__(self, role: Role) -> None:
        self._role = role

    def call(self, *_: Any) -> list[int]:
        return [devices[0].node for devices in self._role.processes()]


class Session:
    """Keeps the roles that it is asked to start."""

    def __init__(self, gpu_memory: int | None) -> None:
        self.gpu_memory = gpu_memory
        self.host_memory = 2**40
        self.roles: dict[str, Role] = {}
        self.order: list[str] = []
        """What happened to which role."""

    def create(self, *roles: Role) -> None:
        self.order += [f"{role.name} imports {role.imports}" for role in roles]

    def launch(self, *roles: Role) -> dict[str, Group]:
        self.roles |= {role.name: role for role in roles}
        self.order += [f"{role.name} is built" for role in roles]
        return {role.name: Group(role) for role in roles}


def launched(folder: Path, session: Session, **values: Any) -> tuple[Roles, TrainRecipe]:
    """Return the roles of a run whose rollout and actor take turns on eight GPUs."""
    (folder / "config.json").write_text((SHAPES / "Qwen3-8B.json").read_text())
    recipe = TrainRecipe.model_validate(
        {
            "experiment_name": "launch",
            "cluster": {"n_nodes": 1, "n_gpus_per_node": 8},
            "allocation_mode": "vllm:d8|megatron:d8",
            "actor": {"path": str(folder)},
            "train_dataset": {"path": "data.jsonl", "batch_size": 256, "max_length": 128},
            "gconfig": {"max_new_tokens": 1100},
            **values,
        }
    )
    placement = place_allocation(recipe_allocation(recipe), recipe.cluster.n_nodes, recipe.cluster.n_gpus_per_node)
    route = choose_route(recipe, placement)
    return launch_roles(session, recipe, placement, 1, route), recipe  # type: ignore[arg-type]


@pytest.mark.parametrize("gpu_memory", [140 * 10**9, 97 * 10**9, 85 * 10**9])
def test_the_memory_of_the_gpus_that_are_there_decides_what_is_offloaded(gpu_memory: int, tmp_path: Path) -> None:
    session = Session(gpu_memory)
    roles, recipe = launched(tmp_path, session)
    expected = while_generating(recipe, {"actor": tmp_path}, gpu_memory=gpu_memory)
    assert roles.actor.away == expected.offloaded
    # The actor's processes import while the server on their devices starts.
    assert session.order == ["actor imports fivefold.mcore.engine", "rollout is built", "actor is built"]
    assert session.roles["rollout"].args[0].reserved == expected.kept["rollout"]


def test_the_replicas_are_told_when_a_server_hangs_and_how_often_it_may(tmp_path: Path) -> None:
    session = Session(140 * 10**9)
    launched(tmp_path, session, rollout={"server_timeout_s": 60, "max_server_restarts": 7})
    spec = session.roles["rollout"].args[0]
    assert (spec.server_timeout_s, spec.max_restarts) == (60.0, 7)


def test_state_is_copied_for_a_checkpoint_if_the_host_has_room_for_the_copy(tmp_path: Path) -> None:
    """Of 8.2 billion parameters, 12 bytes each are copied: 92 GiB, beside 16 processes and what is offloaded."""

    def copies(host_gib: int, **recover: str) -> bool:
        session = Session(140 * 10**9)
        session.host_memory = host_gib * 2**30
        launched(tmp_path, session, recover=recover)
        spec = session.roles["actor"].args[0]
        assert isinstance(spec, TrainerSpec)
        return spec.copies_state

    assert copies(1000)
    assert not copies(150)
    assert copies(150, snapshot="copy")
    assert not copies(1000, snapshot="blocking")


def test_on_cpus_the_actor_offloads_what_the_recipe_says(tmp_path: Path) -> None:
    on_cpus = {
        "cluster": {"n_nodes": 1, "n_gpus_per_node": 0},
        "allocation_mode": "transformers:d8|megatron:d8",
        "actor": {"path": str(tmp_path), "offload": {"grads": True}},
    }
    session = Session(None)
    roles, _ = launched(tmp_path, session, **on_cpus)
    assert roles.actor.away == ("grads",)
    assert session.roles["rollout"].args[0].reserved == 0


def test_each_node_of_a_replica_has_a_process_and_the_first_one_knows_the_others(tmp_path: Path) -> None:
    session = Session(140 * 10**9)
    cluster = {"n_nodes": 6, "n_gpus_per_node": 4}
    launched(tmp_path, session, cluster=cluster, allocation_mode="vllm:d2t4p3|megatron:d24")
    first, others = (session.roles[name].processes() for name in ("rollout", "rollout-follower"))
    assert [{device.node for device in devices} for devices in first] == [{0}, {3}]
    assert [{device.node for device in devices} for devices in others] == [{1}, {2}, {4}, {5}]
    assert {len(devices) for devices in (*first, *others)} == {4}
    assert session.roles["rollout"].args[1] == [(1, 2), (4, 5)]
    launched(tmp_path, session)
    assert session.roles["rollout"].args[1] == []


@pytest.mark.parametrize(
    ("values", "needs"),
    [
        ({}, False),
        ({"gconfig": {"stop": ["\n"]}}, True),
        ({"environment": {"game": "a.py:A"}, "reward": {"fn": "environment"}}, False),
        # Its requests may ask to stop at a text.
        ({"environment": {"agent": "a.py:a"}, "reward": {"fn": "environment"}}, True),
    ],
)
def test_a_server_keeps_its_tokenizer_where_completions_may_end_at_a_text(
    values: dict[str, Any], needs: bool, tmp_path: Path
) -> None:
    session = Session(140 * 10**9)
    launched(tmp_path, session, **values)
    assert session.roles["rollout"].args[0].needs_text is needs
