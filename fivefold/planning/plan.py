"""Plans: which rank does what, what it needs and how long a step takes, before a GPU is taken.

    recipe or model ─> Inputs ─> (search) ─> Estimate ─> fivefold.report.plan: tables, JSON, SVG, HTML

This room does not import torch, so a plan takes well under a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fivefold.config.schema.recipe import Recipe
from fivefold.layout.allocation import Allocation
from fivefold.layout.parser import parse_role
from fivefold.layout.stages import NEARLY_EQUAL
from fivefold.planning.defaults import DEFAULT_GPU, DEFAULT_GPUS_PER_NODE
from fivefold.planning.estimate import estimate
from fivefold.planning.estimates import Estimate
from fivefold.planning.inputs import Inputs
from fivefold.planning.layouts import layout_text
from fivefold.planning.model_inputs import model_inputs
from fivefold.planning.recipe_inputs import Changes, recipe_inputs
from fivefold.planning.room import Cluster
from fivefold.planning.search import Found, search


@dataclass(frozen=True)
class Plan:
    """The plan of a run."""

    inputs: Inputs
    """After a search, with the layout and the recompute mode that it chose."""
    estimate: Estimate | None
    """None if a search found no layout that fits."""
    found: Found | None
    """Ranking of the layouts; None if there was no search."""

    @property
    def fits(self) -> bool:
        """Whether the run can start."""
        return self.estimate is not None and self.estimate.fits


def plan_recipe(
    recipe: Recipe,
    *,
    gpu: str = DEFAULT_GPU,
    changes: Changes | None = None,
    searching: bool = False,
) -> Plan:
    """Plan a recipe of any training command.

    Args:
        recipe: the recipe.
        gpu: kind of GPU, such as `h100-80g`.
        changes: changes of the recipe's work.
        searching: rank all layouts of the actor, and plan the best one.

    Raises:
        ValueError: the recipe is wrong, its roles do not fit on its cluster, or the GPU is unknown.
    """
    return _plan(recipe_inputs(recipe, gpu, changes or Changes()), searching=searching)


def plan_model(
    model: str,
    n_gpus: int,
    *,
    gpus_per_node: int = DEFAULT_GPUS_PER_NODE,
    gpu: str = DEFAULT_GPU,
    actor: str | None = None,
    rollout: str | None = None,
    devices: Sequence[str] = (),
    changes: Changes | None = None,
    searching: bool = False,
) -> Plan:
    """Plan a model on a cluster.

    Args:
        model: its name, its folder or its config.json.
        n_gpus: number of GPUs in all.
        gpus_per_node: number of GPUs of a node.
        gpu: kind of GPU, such as `h100-80g`.
        actor: layout of the trainer; None: the best one is searched for.
        rollout: layout that generates; None: nothing generates.
        devices: GPUs of each role: `actor=0-31`, `rollout=[0, 2, 4]`. Without it, the roles share devices if there are
            too few for both.
        changes: changes of the default work.
        searching: rank all layouts of the actor, and plan the best one.

    Raises:
        ValueError: the model or the GPU is unknown, or a layout cannot be read or placed.
    """
    inputs = model_inputs(
        model, n_gpus, gpus_per_node=gpus_per_node, gpu=gpu, actor=actor, rollout=rollout, devices=devices,
        changes=changes or Changes(),
    )  # fmt: skip
    return _plan(inputs, searching=searching or actor is None)


def _plan(inputs: Inputs, *, searching: bool) -> Plan:
    if not searching:
        return Plan(inputs, estimate(inputs), None)
    if not inputs.on_gpus:
        raise ValueError(
            "--search ranks layouts on GPUs, but cluster.n_gpus_per_node is 0, so that roles are CPU processes: name "
            "the GPUs, for example cluster.n_gpus_per_node=8, or drop --search"
        )
    actor, reference = inputs.actor, inputs.hosted_reference
    found = search(
        actor.shape, Cluster.of(inputs), actor.work, reference=None if reference is None else reference.shape
    )
    if not found.best:
        return Plan(inputs, None, found)
    best = found.best[0]
    role = replace(parse_role(layout_text(best.layout)), name="actor")
    groups = tuple(
        tuple(role if member.role == "actor" else member for member in group) for group in inputs.allocation.groups
    )
    notes = inputs.notes
    if any(member.role == "actor" and member.split != NEARLY_EQUAL for member in inputs.allocation.roles):
        notes = (
            *notes,
            "the search divides layers as equally as possible: with one of its layouts, drop the keys of "
            "actor.megatron.transformer that set the layers of a stage",
        )
    chosen = replace(actor, work=actor.work.recomputing(best.recompute))
    models = {**inputs.models, "actor": chosen}
    inputs = replace(inputs, allocation=Allocation(groups), models=models, notes=notes)
    return Plan(inputs, estimate(inputs), found)
