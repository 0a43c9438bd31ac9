"""Plans: which rank does what, what it needs and how long a step takes, before a GPU is taken.

    recipe or model ─> Question ─> (search) ─> Blueprint ─> fivefold.report.plan: tables, JSON, SVG, HTML

This room does not import torch, so a plan takes well under a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fivefold.config.schema.recipe import Recipe
from fivefold.layout.allocation import Allocation
from fivefold.layout.parser import parse_role
from fivefold.layout.stages import NEARLY_EQUAL
from fivefold.planning.blueprint import Blueprint, draw_up
from fivefold.planning.defaults import DEFAULT_GPU, DEFAULT_GPUS_PER_NODE
from fivefold.planning.question import Question
from fivefold.planning.question_sources import Changes, question_of_model, question_of_recipe
from fivefold.planning.search import Cluster, Found, layout_text, search


@dataclass(frozen=True)
class Plan:
    """The answer to a question about a run."""

    question: Question
    """What was asked. After a search, the layout and the recompute mode are those that were chosen."""
    blueprint: Blueprint | None
    """None if a search found no layout that fits."""
    found: Found | None
    """Ranking of the layouts; None if there was no search."""

    @property
    def fits(self) -> bool:
        return self.blueprint is not None and self.blueprint.fits


def plan_recipe(
    recipe: Recipe,
    *,
    gpu: str = DEFAULT_GPU,
    changes: Changes | None = None,
    searching: bool = False,
) -> Plan:
    """Plan a recipe, be it for `fivefold train` or for `fivefold sft`.

    Args:
        recipe: the recipe.
        gpu: kind of GPU, such as `h100-80g`.
        changes: what to change about the recipe's work.
        searching: rank all layouts of the actor, and plan the best one.

    Raises:
        ValueError: the recipe is wrong, its roles do not fit on its cluster, or the GPU is unknown.
    """
    return _answer(question_of_recipe(recipe, gpu, changes or Changes()), searching=searching)


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
        changes: what to change about the default work.
        searching: rank all layouts of the actor, and plan the best one.

    Raises:
        ValueError: the model or the GPU is unknown, or a layout cannot be read or placed.
    """
    question = question_of_model(
        model, n_gpus, gpus_per_node=gpus_per_node, gpu=gpu, actor=actor, rollout=rollout, devices=devices,
        changes=changes or Changes(),
    )  # fmt: skip
    return _answer(question, searching=searching or actor is None)


def _answer(question: Question, *, searching: bool) -> Plan:
    if not searching:
        return Plan(question, draw_up(question), None)
    if question.gpus_per_node == 0:
        raise ValueError(
            "--search ranks layouts on GPUs, but cluster.n_gpus_per_node is 0, so that roles are CPU processes: name "
            "the GPUs, for example cluster.n_gpus_per_node=8, or drop --search"
        )
    found = search(question.shape, Cluster.of(question), question.work, reference=question.kept_reference)
    if not found.best:
        return Plan(question, None, found)
    best = found.best[0]
    role = replace(parse_role(layout_text(best.layout)), name="actor")
    groups = tuple(
        tuple(role if member.role == "actor" else member for member in group) for group in question.allocation.groups
    )
    notes = question.notes
    if any(member.role == "actor" and member.split != NEARLY_EQUAL for member in question.allocation.roles):
        notes = (
            *notes,
            "the search divides layers as equally as can be: with one of its layouts, drop the keys of "
            "actor.megatron.transformer that say how many layers a stage has",
        )
    work = question.work.recomputing(best.recompute)
    chosen = replace(question, allocation=Allocation(groups), work=work, notes=notes)
    return Plan(chosen, draw_up(chosen), found)
