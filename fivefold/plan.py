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

from fivefold.config.load import RecipeError, load_recipe
from fivefold.config.schema import Recipe, SFTRecipe, TrainRecipe
from fivefold.layout.allocation import Allocation, RoleAllocation, parse_role
from fivefold.layout.blueprint import Blueprint, Question, draw_up
from fivefold.layout.gpus import find_gpu
from fivefold.layout.plan_shape import find_shape
from fivefold.layout.recipe import recipe_allocation
from fivefold.layout.search import Cluster, Found, layout_text, search
from fivefold.layout.workload import RECOMPUTE, Recompute, Workload

DEFAULT_GPU = "h100-80g"
DEFAULT_SEQUENCE_LENGTH = 4096
DEFAULT_SEQUENCES = 256
DEFAULT_MICRO_TOKENS = 8192
DEFAULT_GENERATION_BATCH = 256
DOES_NOT_FIT = 1


@dataclass(frozen=True)
class Changes:
    """What the command line says of the work; None: what the recipe says, or the default."""

    sequence_length: int | None = None
    sequences: int | None = None
    micro_tokens: int | None = None
    recompute: Recompute | None = None

    def applied(self, work: Workload) -> Workload:
        """`work` with these changes."""
        return replace(work, **{name: value for name, value in vars(self).items() if value is not None})


@dataclass(frozen=True)
class Plan:
    """The answer: a blueprint unless a search found nothing that fits."""

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
    gpus_per_node: int = 8,
    gpu: str = DEFAULT_GPU,
    actor: str | None = None,
    rollout: str | None = None,
    changes: Changes | None = None,
    searching: bool = False,
) -> Plan:
    """The plan of a model on a cluster. Without a layout for the actor, the best one is searched for.

    Roles share devices if there are too few for both.

    Raises:
        ValueError: an unknown model or GPU, a layout that cannot be read or placed.
    """
    if n_gpus < 1 or gpus_per_node < 1:
        raise ValueError(f"--gpus {n_gpus} --gpus-per-node {gpus_per_node}: both must be at least 1")
    per_node = min(gpus_per_node, n_gpus)
    if n_gpus % per_node:
        raise ValueError(f"--gpus {n_gpus} is not a whole number of nodes of {per_node}; give --gpus-per-node")
    default = Workload(DEFAULT_SEQUENCE_LENGTH, DEFAULT_SEQUENCES, DEFAULT_MICRO_TOKENS)
    work = (changes or Changes()).applied(default)
    roles = _roles(actor, rollout, n_gpus)
    question = Question(
        shape=find_shape(model),
        gpu=find_gpu(gpu),
        allocation=roles,
        n_nodes=n_gpus // per_node,
        gpus_per_node=per_node,
        work=work,
        generation_batch=DEFAULT_GENERATION_BATCH,
        generated=work.sequences,
        keeps_reference=False,
    )
    return _answer(question, searching=searching or actor is None)


def _roles(actor: str | None, rollout: str | None, n_gpus: int) -> Allocation:
    """Both roles, side by side if there are devices for both, else in turn. A missing actor takes what is left."""
    generator = None if rollout is None else replace(parse_role(rollout), name="rollout")
    trainer = (
        RoleAllocation("megatron", name="actor", dp=None) if actor is None else replace(parse_role(actor), name="actor")
    )
    if generator is None:
        return Allocation(((trainer,),))
    least = [role.replica_size if role.n_devices is None else role.n_devices for role in (trainer, generator)]
    if sum(least) <= n_gpus:
        return Allocation(((generator,), (trainer,)))
    return Allocation(((generator, trainer),))


def load_any_recipe(path: Path, overrides: Sequence[str]) -> Recipe:
    """A recipe of either kind; of two lists of problems, the shorter one is that of the kind that was meant."""
    try:
        return load_recipe(path, overrides, TrainRecipe)
    except RecipeError as error:
        try:
            return load_recipe(path, overrides, SFTRecipe)
        except RecipeError as other:
            raise min(error, other, key=lambda each: len(each.problems)) from None


def question_of_recipe(recipe: Recipe, gpu: str, changes: Changes) -> Question:
    """What a recipe asks for: its roles on its cluster, every sequence at its longest.

    Raises:
        ValueError: roles that contradict one another, a model whose shape is not known.
    """
    actor = recipe.actor
    length, sequences = recipe.train_dataset.max_length, recipe.train_dataset.batch_size
    keeps_reference, batch, generated = False, 1, sequences
    allocation = recipe_allocation(recipe)
    if isinstance(recipe, TrainRecipe):
        length += recipe.gconfig.max_new_tokens
        generated = sequences * recipe.gconfig.n_samples
        sequences = generated // recipe.actor.ppo_n_minibatches
        batch = recipe.rollout.max_batch_size
        keeps_reference = recipe.actor.kl_ctl > 0 and all(role.role != "ref" for role in allocation.roles)
    work = Workload(
        sequence_length=length,
        sequences=sequences,
        micro_tokens=actor.mb_spec.max_tokens_per_mb,
        recompute=actor.megatron.recompute,
        element_bytes=2 if actor.dtype == "bfloat16" else 4,
        logprob_chunk=actor.megatron.logprob_chunk_size,
    )
    return Question(
        shape=find_shape(actor.path),
        gpu=find_gpu(gpu),
        allocation=allocation,
        n_nodes=recipe.cluster.n_nodes,
        gpus_per_node=recipe.cluster.n_gpus_per_node,
        work=changes.applied(work),
        generation_batch=batch,
        generated=generated,
        keeps_reference=keeps_reference,
    )


def _answer(question: Question, *, searching: bool) -> Plan:
    if not searching:
        return Plan(draw_up(question), None)
    actor = question.allocation.resolve(question.n_nodes * question.gpus_per_node or None)["actor"]
    cluster = Cluster(question.gpu, actor.world_size, min(question.gpus_per_node or actor.world_size, actor.world_size))
    found = search(question.shape, cluster, question.work, has_reference=question.keeps_reference)
    if not found.best:
        return Plan(None, found)
    best = found.best[0]
    role = replace(parse_role(layout_text(best.layout)), name="actor")
    groups = tuple(
        tuple(role if member.role == "actor" else member for member in group) for group in question.allocation.groups
    )
    chosen = replace(question, allocation=Allocation(groups), work=question.work.recomputing(best.recompute))
    return Plan(draw_up(chosen), found)


def plan(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="The recipe, a YAML file; or --model.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of the recipe to set, such as actor.backend=megatron:d4t2."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Without a recipe: a model such as Qwen3-30B-A3B, its folder, or a config.json.", show_default=False
        ),
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="With --model: GPUs in all.", show_default=False)] = None,
    gpus_per_node: Annotated[int, typer.Option(help="With --model: GPUs of a node.")] = 8,
    gpu: Annotated[str, typer.Option(help="Kind of GPU, such as h100-80g or h200-141g.")] = DEFAULT_GPU,
    actor: Annotated[
        str | None,
        typer.Option(
            metavar="BACKEND", help="With --model: the trainer's layout.  [default: the best]", show_default=False
        ),
    ] = None,
    rollout: Annotated[
        str | None,
        typer.Option(
            metavar="BACKEND", help="With --model: the layout that generates.  [default: none]", show_default=False
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Rank all layouts of the trainer, and plan the best.")
    ] = False,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Tokens of a sequence.  [default: the recipe's longest, or {DEFAULT_SEQUENCE_LENGTH}]",
            show_default=False,
        ),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Sequences of an optimizer step.  [default: the recipe's, or {DEFAULT_SEQUENCES}]",
            show_default=False,
        ),
    ] = None,
    micro_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Tokens of a micro-batch.  [default: the recipe's, or {DEFAULT_MICRO_TOKENS}]",
            show_default=False,
        ),
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(RECOMPUTE)}.  [default: the recipe's, or none]", show_default=False),
    ] = None,
    ranks: Annotated[bool, typer.Option("--ranks", help="List the place of every rank.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write a picture here.", show_default=False)] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with the picture here.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
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
        _refuse_with_recipe(gpus=gpus, actor=actor, rollout=rollout)
        answer = plan_recipe(recipe, overrides or [], gpu=gpu, changes=changes, searching=search)
    elif recipe is None and model is not None and gpus is not None:
        answer = plan_model(
            model, gpus, gpus_per_node=gpus_per_node, gpu=gpu, actor=actor, rollout=rollout, changes=changes,
            searching=search,
        )  # fmt: skip
    else:
        raise ValueError("give either a recipe, or --model with --gpus")
    show(answer, all_ranks=ranks, as_json=as_json, gpu=gpu)
    _write_pictures(answer, svg, html)
    if not answer.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _recompute(text: str | None) -> Recompute | None:
    for known in RECOMPUTE:
        if text == known:
            return known
    if text is not None:
        raise ValueError(f"--recompute {text}: it is one of {', '.join(RECOMPUTE)}")
    return None


def _refuse_with_recipe(*, gpus: int | None, actor: str | None, rollout: str | None) -> None:
    keys = {
        "--gpus": "cluster.n_nodes and cluster.n_gpus_per_node",
        "--actor": "actor.backend",
        "--rollout": "rollout.backend",
    }
    for option, value in zip(keys, (gpus, actor, rollout), strict=True):
        if value is not None:
            raise ValueError(f"{option} belongs to --model; with a recipe set {keys[option]}")


def show(answer: Plan, *, all_ranks: bool, as_json: bool, gpu: str) -> None:
    """Print the plan: tables, or one JSON object."""
    from rich.console import Console

    from fivefold.layout.plan_json import found_as_json, plan_as_json
    from fivefold.plan_tables import print_plan, print_search

    if as_json:
        values: dict[str, Any] = plan_as_json(answer.blueprint) if answer.blueprint else {"fits": False}
        if answer.found:
            values["search"] = found_as_json(answer.found, find_gpu(gpu))
        typer.echo(json.dumps(values))
        return
    console = Console(highlight=False)
    if answer.found:
        print_search(console, answer.found, find_gpu(gpu))
        console.print()
    if answer.blueprint:
        print_plan(console, answer.blueprint, all_ranks=all_ranks)


def _write_pictures(answer: Plan, svg: Path | None, html: Path | None) -> None:
    from fivefold.layout.drawing.page import page
    from fivefold.layout.drawing.picture import draw

    if answer.blueprint is None:
        return
    if svg is not None:
        svg.write_text(draw(answer.blueprint), encoding="utf-8")
    if html is not None:
        html.write_text(page(answer.blueprint), encoding="utf-8")
