"""`fivefold plan`: which rank does what, what it needs, how long a step takes; before a GPU is taken.

    recipe or model ─> Question ─> (search) ─> Blueprint ─> tables, JSON, SVG, HTML

Nothing here imports torch; a plan takes well under a second.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fivefold.config.load import load_any_recipe
from fivefold.layout.allocation import Allocation
from fivefold.layout.parser import parse_role
from fivefold.planning.blueprint import Blueprint, draw_up
from fivefold.planning.question import Question
from fivefold.planning.question_sources import (
    DEFAULT_MICRO_TOKENS,
    DEFAULT_SEQUENCE_LENGTH,
    DEFAULT_SEQUENCES,
    Changes,
    question_of_model,
    question_of_recipe,
)
from fivefold.planning.search import Cluster, Found, layout_text, search
from fivefold.planning.workload import RECOMPUTE, Recompute

DEFAULT_GPU = "h100-80g"
DEFAULT_GPUS_PER_NODE = 8
DOES_NOT_FIT = 1


@dataclass(frozen=True)
class Plan:
    """The answer: a blueprint unless a search found nothing that fits."""

    question: Question
    blueprint: Blueprint | None
    found: Found | None
    """Of a search."""

    @property
    def fits(self) -> bool:
        return self.blueprint is not None and self.blueprint.fits


def plan_recipe(
    path: Path,
    overrides: Sequence[str],
    *,
    gpu: str = DEFAULT_GPU,
    changes: Changes | None = None,
    searching: bool = False,
) -> Plan:
    """The plan of a recipe, for `fivefold train` or for `fivefold sft`.

    Raises:
        ValueError: a recipe that is wrong, roles that do not fit on its cluster, an unknown GPU.
    """
    question = question_of_recipe(load_any_recipe(path, overrides), gpu, changes or Changes())
    return _answer(question, searching=searching)


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
    """The plan of a model on a cluster. Without a layout for the actor, the best one is searched for.

    Roles share devices if there are too few for both, or as `devices` says: `actor=0-31`, `rollout=[0, 2, 4]`.

    Raises:
        ValueError: an unknown model or GPU, a layout that cannot be read or placed.
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
    chosen = replace(question, allocation=Allocation(groups), work=question.work.recomputing(best.recompute))
    return Plan(chosen, draw_up(chosen), found)


RecipePath = Annotated[
    Path | None, typer.Argument(metavar="[RECIPE]", help="The recipe, a YAML file; or --model.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys of the recipe to set, such as actor.backend=megatron:d4t2."),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        help="Without a recipe: a model such as Qwen3-30B-A3B, its folder, or a config.json.", show_default=False
    ),
]
Gpus = Annotated[int | None, typer.Option(help="With --model: GPUs in all.", show_default=False)]
GpusPerNode = Annotated[
    int | None,
    typer.Option(help=f"With --model: GPUs of a node.  [default: {DEFAULT_GPUS_PER_NODE}]", show_default=False),
]
GpuKind = Annotated[str, typer.Option(help="Kind of GPU, such as h100-80g or h200-141g.")]
ActorBackend = Annotated[
    str | None,
    typer.Option(
        metavar="BACKEND", help="With --model: the trainer's layout.  [default: the best]", show_default=False
    ),
]
RolloutBackend = Annotated[
    str | None,
    typer.Option(
        metavar="BACKEND", help="With --model: the layout that generates.  [default: none]", show_default=False
    ),
]
DeviceLists = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ROLE=LIST",
        help="With --model, once a role: its GPUs, such as actor=0-31 or 'rollout=[0, 2, 4]'.",
        show_default=False,
    ),
]
Search = Annotated[bool, typer.Option("--search", help="Rank all layouts of the trainer, and plan the best.")]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Tokens of a sequence.  [default: the recipe's longest, or {DEFAULT_SEQUENCE_LENGTH}]",
        show_default=False,
    ),
]
Sequences = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Sequences of an optimizer step.  [default: the recipe's, or {DEFAULT_SEQUENCES}]",
        show_default=False,
    ),
]
MicroTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"Tokens of a micro-batch.  [default: the recipe's, or {DEFAULT_MICRO_TOKENS}]",
        show_default=False,
    ),
]
RecomputeMode = Annotated[
    str | None, typer.Option(help=f"{', '.join(RECOMPUTE)}.  [default: the recipe's, or none]", show_default=False)
]
AllRanks = Annotated[bool, typer.Option("--ranks", help="List the place of every rank.")]
SvgFile = Annotated[Path | None, typer.Option(help="Write a picture here.", show_default=False)]
HtmlFile = Annotated[Path | None, typer.Option(help="Write a page with the picture here.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")]


def plan(
    recipe: RecipePath = None,
    overrides: Overrides = None,
    model: ModelName = None,
    gpus: Gpus = None,
    gpus_per_node: GpusPerNode = None,
    gpu: GpuKind = DEFAULT_GPU,
    actor: ActorBackend = None,
    rollout: RolloutBackend = None,
    devices: DeviceLists = None,
    search: Search = False,
    sequence_length: SequenceLength = None,
    sequences: Sequences = None,
    micro_tokens: MicroTokens = None,
    recompute: RecomputeMode = None,
    ranks: AllRanks = False,
    svg: SvgFile = None,
    html: HtmlFile = None,
    as_json: AsJson = False,
) -> None:
    """Say which rank does what, what fits and what it costs, before a GPU is taken.

    Exit code 1: it does not fit.

    \b
    Examples:
      fivefold plan recipes/quickstart-5d.yaml
      fivefold plan recipe.yaml cluster.n_nodes=4 --gpu h200-141g --svg plan.svg
      fivefold plan --model Qwen3-30B-A3B --gpus 32 --rollout sglang:d4t4 --actor "megatron:(attn:p4t2c2|ffn:e4)"
      fivefold plan --model Qwen3-8B --gpus 8 --search
    """
    changes = Changes(sequence_length, sequences, micro_tokens, _recompute(recompute))
    if recipe is not None and model is None:
        _refuse_with_recipe(gpus=gpus, gpus_per_node=gpus_per_node, actor=actor, rollout=rollout, devices=devices)
        answer = plan_recipe(recipe, overrides or [], gpu=gpu, changes=changes, searching=search)
    elif recipe is None and model is not None and gpus is not None:
        per_node = DEFAULT_GPUS_PER_NODE if gpus_per_node is None else gpus_per_node
        answer = plan_model(
            model, gpus, gpus_per_node=per_node, gpu=gpu, actor=actor, rollout=rollout, devices=devices or (),
            changes=changes, searching=search,
        )  # fmt: skip
    else:
        raise ValueError("give either a recipe, or --model with --gpus")
    _write_pictures(answer, svg, html)
    show(answer, all_ranks=ranks, as_json=as_json)
    if not answer.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _recompute(text: str | None) -> Recompute | None:
    for known in RECOMPUTE:
        if text == known:
            return known
    if text is not None:
        raise ValueError(f"--recompute {text}: it is one of {', '.join(RECOMPUTE)}")
    return None


def _refuse_with_recipe(**options: object) -> None:
    keys = {
        "gpus": "cluster.n_nodes and cluster.n_gpus_per_node",
        "gpus_per_node": "cluster.n_gpus_per_node",
        "actor": "actor.backend",
        "rollout": "rollout.backend",
        "devices": "actor.device_mapping and rollout.device_mapping",
    }
    for option, value in options.items():
        if value not in (None, []):
            name = option.replace("_", "-")
            raise ValueError(f"--{name} belongs to --model; with a recipe set {keys[option]}")


def show(answer: Plan, *, all_ranks: bool, as_json: bool) -> None:
    """Print the plan: tables, or one JSON object."""
    from rich.console import Console

    from fivefold.planning.plan_json import found_as_json, plan_as_json
    from fivefold.planning.tables import print_notes, print_plan, print_search

    if as_json:
        values: dict[str, Any] = (
            plan_as_json(answer.blueprint)
            if answer.blueprint
            else {"fits": False, "notes": list(answer.question.notes)}
        )
        if answer.found:
            values["search"] = found_as_json(answer.found)
        typer.echo(json.dumps(values))
        return
    console = Console(highlight=False)
    if answer.found:
        print_search(console, answer.found)
        console.print()
    if answer.blueprint:
        print_plan(console, answer.blueprint, all_ranks=all_ranks)
    else:
        print_notes(console, answer.question.notes)


def _write_pictures(answer: Plan, svg: Path | None, html: Path | None) -> None:
    """Before anything is printed, so that a path that cannot be written to is the only message."""
    from fivefold.planning.drawing.page import page
    from fivefold.planning.drawing.picture import draw

    wanted = [(option, path, render) for option, path, render in (("svg", svg, draw), ("html", html, page)) if path]
    if answer.blueprint is None:
        if wanted:
            options = " and ".join(f"--{option}" for option, _, _ in wanted)
            typer.echo(f"{options}: nothing was written, for there is no layout that fits to draw", err=True)
        return
    for option, path, render in wanted:
        try:
            path.write_text(render(answer.blueprint), encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"--{option} {path} cannot be written ({error.strerror}); name a file in a folder that exists"
            ) from error
