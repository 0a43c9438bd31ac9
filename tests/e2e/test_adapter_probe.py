"""What a run compares before its first step, over an engine that loses adapters or computes them otherwise.

The embedded engine stands for a server: its end of the transport loses them. Tests of a layout share its processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fivefold.cluster.role import Part
from fivefold.cluster.session import Session
from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.observe.errors import RunFailed
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.adapter_probe import kinds_of
from fivefold.roles.devices import Roles
from fivefold.roles.launch import launch_roles
from fivefold.roles.trainer_worker import TrainerWorker
from fivefold.run.adapter_probe import Probe
from fivefold.train_setup import TrainSetup, set_up
from fivefold.weights.adapter import AdapterMemory
from fivefold.weights.stream import Receiver
from tests.e2e.conftest import ROOT, Fivefold
from tests.forks import forked_workers
from tests.rows import long
from tests.unit.rollout.fake_server import Log, write_python

ATTENTION = [f"self_attn.{letter}_proj" for letter in "qkvo"]
EXPERTS = [f"mlp.experts.{name}_proj" for name in ("gate", "up", "down")]


@dataclass(frozen=True)
class Faulty(AdapterMemory):
    """Adapters whose B arrives multiplied by a factor if its name is found: `fault` has the pattern and the factor."""

    fault: Path = Path()

    def receiver(self) -> Receiver:
        receive = super().receiver()

        def faulty(items: Iterator[object], device: torch.device) -> Iterator[tuple[str, Tensor]]:
            pattern, factor = json.loads(self.fault.read_text())
            for name, tensor in receive(items, device):
                is_found = "lora_B" in name and re.search(pattern, name)
                yield name, tensor * factor if is_found else tensor

        return faulty


class Held(Part):
    """The matrices that a rank of the actor holds."""

    def __init__(self, worker: TrainerWorker) -> None:
        self._engine = worker.engine

    def matrices(self) -> dict[str, Tensor]:
        return {each.name: each.values_N.clone() for each in self._engine.held_adapters()}


@dataclass(frozen=True)
class Launched:
    """The roles of a run, whose rollout gets adapters as `fault` says."""

    setup: TrainSetup
    roles: Roles
    fault: Path

    def probe(self, pattern: str, factor: float, tell: Callable[[str], None]) -> None:
        self.fault.write_text(json.dumps([pattern, factor]))
        kinds = kinds_of(self.setup.ground.shape.with_lora(self.setup.recipe.actor.lora))
        assert kinds == [*ATTENTION, *EXPERTS]
        Probe(self.roles, PhaseTimers(), kinds, self.setup.data.prompts, 1.0, 16, tell).run()


@pytest.fixture(scope="module", params=["megatron:d1", "fsdp:d2", *long("megatron:(attn:t2|ffn:e2)", "megatron:d2")])
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    folder = tmp_path_factory.mktemp("run")
    keys = (
        f"actor.backend={request.param}", "rollout.backend=transformers:d1", "rollout.weight_transport=adapter",
        "actor.lora.rank=4", "actor.lora.rank_of_experts=2", "actor.lora.alpha=8", "valid_dataset=null",
        f"cluster.fileroot={folder}",
    )  # fmt: skip
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", keys, TrainRecipe)
    setup = set_up(recipe)
    found = setup.route.transport
    assert isinstance(found, AdapterMemory)
    faulty = Faulty(merged_dtype=found.merged_dtype, alpha=found.alpha, fault=folder / "fault.json")
    with forked_workers(), Session.open(recipe.scheduler, recipe.cluster, folder, PhaseTimers()) as session:
        roles = launch_roles(session, recipe, setup.ground.placement, 1, replace(setup.route, transport=faulty))
        yield Launched(setup, roles, faulty.fault)


def test_an_engine_that_computes_all_adapters_passes_and_the_actor_keeps_its_own(launched: Launched) -> None:
    told: list[str] = []
    actor = launched.roles.actor.trainer.group
    before = actor.call(Held.matrices)
    launched.probe("$^", 1.0, told.append)
    after = actor.call(Held.matrices)
    assert told == ["the server computes the adapters of all layers as the actor does"]
    for one, other in zip(before, after, strict=True):
        assert one.keys() == other.keys()
        assert one
        assert all(torch.equal(values, other[name]) for name, values in one.items())


@pytest.mark.parametrize("launched", ["megatron:d1"], indirect=True)
@pytest.mark.parametrize(
    ("pattern", "factor", "says"),
    [
        (
            r"experts\..*_proj",
            0.0,
            r"by -?\d% of mlp\.experts\.gate_proj, -?\d% of mlp\.experts\.up_proj, -?\d% of mlp",
        ),
        (r"experts\..*up_proj", 0.0, r"by -?\d% of mlp\.experts\.up_proj of what .*down_proj"),
        (r"k_proj", 0.0, r"by -?\d% of self_attn\.k_proj of what"),
        (r"o_proj", 2.0, r"by (1[5-9]\d|2\d\d)% of self_attn\.o_proj of what"),
        (r"layers\.0\..*v_proj", 0.0, r"by -?\d+% of self_attn\.v_proj of what"),
    ],
    ids=["no experts", "one side of experts", "keys", "twice", "one layer"],
)
def test_an_engine_that_loses_adapters_ends_the_run(pattern: str, factor: float, says: str, launched: Launched) -> None:
    with pytest.raises(RunFailed, match="does not compute the actor's adapters") as failure:
        launched.probe(pattern, factor, print)
    assert re.search(says, str(failure.value)), str(failure.value)
    assert "rollout.weight_transport=auto" in str(failure.value)


def test_a_run_over_a_server_that_does_not_compute_with_adapters_ends_before_its_first_step(
    fivefold: Fivefold, tmp_path: Path
) -> None:
    """The server answers by a formula, whatever its adapters are."""
    result = fivefold(
        "train", str(ROOT / "recipes/quickstart.yaml"), "actor.backend=megatron:d1", "rollout.backend=vllm:d1",
        "rollout.weight_transport=served_adapter", "actor.lora.rank=4", "valid_dataset=null",
        f"rollout.server_python={write_python(tmp_path / 'server')}", f"cluster.fileroot={tmp_path}",
    )  # fmt: skip
    assert result.returncode != 0
    assert "the server's log-probs differ from the actor's with the same adapters" in result.stdout + result.stderr
    log = Log(tmp_path / "server")
    assert [row["name"] for row in log.rows("adapters")] == ["-1", "-2", "-3", "-4"]
    kinds = {name for row in log.rows("adapters") for name in (tensor["name"] for tensor in row["tensors"])}
    assert any(".experts.0.up_proj.lora_B" in name for name in kinds)
    [folder] = tmp_path.glob("*/*/")
    assert not (folder / "samples.jsonl").exists() or not (folder / "samples.jsonl").read_text()
