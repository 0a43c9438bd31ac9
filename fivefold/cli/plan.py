"""`fivefold plan`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.command import FAILED, reporting_errors, write_text
from fivefold.config.limits import LARGEST, MOST_DEVICES
from fivefold.planning.defaults import (
    DEFAULT_GPU,
    DEFAULT_GPUS_PER_NODE,
    DEFAULT_MICRO_TOKENS,
    DEFAULT_SEQUENCE_LENGTH,
    DEFAULT_SEQUENCES,
)
from fivefold.planning.workload import Recompute

if TYPE_CHECKING:
    from fivefold.config.schema.recipe import Recipe
    from fivefold.families.shape import ModelShape
    from fivefold.planning.estimates import Estimate
    from fivefold.planning.inputs import Inputs
    from fivefold.planning.plan import Plan
    from fivefold.planning.simulation.look_ahead import LookAhead

OptionalRecipePath = Annotated[
    Path | None, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file; or --model.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Keys of the recipe to set, such as actor.backend=megatron:d4t2.", show_default=False
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        help="Without a recipe: a model such as Qwen3-30B-A3B, its folder, or a config.json.", show_default=False
    ),
]
Gpus = Annotated[
    int | None, typer.Option(max=MOST_DEVICES, help="With --model: number of GPUs in all.", show_default=False)
]
GpusPerNode = Annotated[
    int | None,
    typer.Option(
        max=MOST_DEVICES,
        help=f"With --model: number of GPUs of a node.  [default: {DEFAULT_GPUS_PER_NODE}]",
        show_default=False,
    ),
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
        help="With --model, once for each role: its GPUs, such as actor=0-31 or 'rollout=[0, 2, 4]'.",
        show_default=False,
    ),
]
Search = Annotated[bool, typer.Option("--search", help="Rank all layouts of the model, and plan the best.")]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=LARGEST,
        help=f"Tokens of a sequence.  [default: the recipe's longest, or {DEFAULT_SEQUENCE_LENGTH}]",
        show_default=False,
    ),
]
Sequences = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=LARGEST,
        help=f"Sequences of an optimizer step.  [default: the recipe's, or {DEFAULT_SEQUENCES}]",
        show_default=False,
    ),
]
MicroTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=LARGEST,
        help=f"Tokens of a micro-batch.  [default: the recipe's, or {DEFAULT_MICRO_TOKENS}]",
        show_default=False,
    ),
]
RecomputeMode = Annotated[
    Recompute | None,
    typer.Option(help="Recompute mode of the activations.  [default: the recipe's, or none]", show_default=False),
]
AllRanks = Annotated[bool, typer.Option("--ranks", help="List the place of every rank.")]
SvgFile = Annotated[Path | None, typer.Option(help="Write a picture here.", show_default=False)]
HtmlFile = Annotated[Path | None, typer.Option(help="Write a page with the picture here.", show_default=False)]
Effective = Annotated[
    bool,
    typer.Option(
        "--effective", help="With a recipe: print what differs from Megatron-Core's defaults, instead of the plan."
    ),
]
ResponseLengths = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="LENGTHS",
        help="With a recipe: simulate asynchronous training with responses of these lengths: the folder of a run, "
        "mean=4000,max=32768, or percentiles such as p50=3000,p90=9000,max=32768. Episodes of 8 turns that read 300 "
        "tokens between two: mean=4000,max=32768,turns=8,read=300.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]

KEYS_OF_MODEL_OPTIONS = {
    "--gpus": "cluster.n_nodes and cluster.n_gpus_per_node",
    "--gpus-per-node": "cluster.n_gpus_per_node",
    "--actor": "actor.backend",
    "--rollout": "rollout.backend",
    "--devices": "actor.device_mapping and rollout.device_mapping",
}
"""The options that go with --model, and the keys that say the same in a recipe."""


def plan(
    recipe: OptionalRecipePath = None,
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
    effective: Effective = False,
    lengths: ResponseLengths = None,
    as_json: AsJson = False,
) -> None:
    """Say which rank does what, what fits and what it costs.

    No GPU is needed to plan for one. The exit code is 1 if the plan does not fit.

    \b
    Examples:
      fivefold plan recipes/quickstart-5d.yaml
      fivefold plan recipe.yaml cluster.n_nodes=4 --gpu h200-141g --svg plan.svg
      fivefold plan recipe.yaml --effective
      fivefold plan recipe.yaml --lengths mean=4000,max=32768
      fivefold plan --model Qwen3-30B-A3B --gpus 32 --rollout sglang:d4t4 --actor "megatron:(attn:p4t2c2|ffn:e4)"
      fivefold plan --model Qwen3-8B --gpus 8 --search
    """
    with reporting_errors():
        from fivefold.config.load import load_any_recipe
        from fivefold.planning.plan import plan_model, plan_recipe
        from fivefold.planning.recipe_inputs import Changes

        changes = Changes(sequence_length, sequences, micro_tokens, recompute)
        ahead = None
        if recipe is not None and model is None:
            _refuse_model_options(
                {"--gpus": gpus, "--gpus-per-node": gpus_per_node, "--actor": actor, "--rollout": rollout,
                 "--devices": devices or None}
            )  # fmt: skip
            if effective:
                _refuse_with_effective(
                    {"--search": search, "--lengths": lengths, "--ranks": ranks, "--svg": svg, "--html": html,
                     **{f"--{name.replace('_', '-')}": value for name, value in vars(changes).items()}}
                )  # fmt: skip
                _print_effective(load_any_recipe(recipe, overrides or []), as_json=as_json)
                return
            loaded = load_any_recipe(recipe, overrides or [])
            answer = plan_recipe(loaded, gpu=gpu, changes=changes, searching=search)
            _check_checkpoint(loaded, answer.inputs.actor.shape)
            _check_methods(loaded)
            if lengths is not None:
                ahead = _look_ahead(loaded, answer.inputs, lengths)
        elif recipe is None and model is not None and gpus is not None:
            if effective:
                raise ValueError("--effective needs a recipe: a model and its GPUs alone set nothing")
            if lengths is not None:
                raise ValueError("--lengths needs a recipe, which says how many prompts and completions a step has")
            per_node = DEFAULT_GPUS_PER_NODE if gpus_per_node is None else gpus_per_node
            answer = plan_model(
                model, gpus, gpus_per_node=per_node, gpu=gpu, actor=actor, rollout=rollout, devices=devices or (),
                changes=changes, searching=search,
            )  # fmt: skip
        else:
            raise ValueError("give either a recipe, or --model with --gpus")
        # The pictures come first, so that a path that cannot be written to is the only message.
        _write_pictures(answer, svg, html)
        _print_plan(answer, ahead, all_ranks=ranks, as_json=as_json)
        if not answer.fits:
            raise typer.Exit(FAILED)


def _check_checkpoint(recipe: Recipe, shape: ModelShape) -> None:
    """Check that the Megatron-Core checkpoint that a recipe starts from, if any, holds its model.

    Raises:
        ValueError: it does not.
    """
    checkpoint = recipe.actor.megatron.dist_checkpointing_path
    if checkpoint is not None:
        from fivefold.bridge.megatron_reader import MegatronWeights  # imports torch, which no other plan needs

        MegatronWeights(checkpoint, shape).close()


def _check_methods(recipe: Recipe) -> None:
    """Check the loss and the advantage of a recipe as the training does, if it says more of them than a known name.

    Raises:
        ValueError: one that cannot be imported, or wrong options.
    """
    from fivefold.config.schema.train import TrainRecipe

    if not isinstance(recipe, TrainRecipe):
        return
    actor = recipe.actor
    is_own = any(":" in name for name in (actor.loss, actor.advantage))
    if is_own or actor.loss_kwargs or actor.advantage_kwargs or actor.prox_logp_method == "loglinear":
        from fivefold.algorithms.build import check_methods  # imports torch, which no other plan needs

        check_methods(recipe)


def _look_ahead(recipe: Recipe, inputs: Inputs, lengths: str) -> LookAhead:
    """Simulate asynchronous training of a recipe.

    Raises:
        ValueError: a recipe that does not generate, or lengths that cannot be read.
    """
    from fivefold.config.schema.train import TrainRecipe
    from fivefold.planning.simulation.lengths import parse_lengths
    from fivefold.planning.simulation.look_ahead import look_ahead

    if not isinstance(recipe, TrainRecipe):
        raise ValueError("--lengths: the recipe does not generate, so there is nothing to answer ahead of its step")
    return look_ahead(recipe, inputs, parse_lengths(lengths))


def _refuse_model_options(options: dict[str, object]) -> None:
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{option} belongs to --model; with a recipe set {KEYS_OF_MODEL_OPTIONS[option]}")


def _refuse_with_effective(options: dict[str, object]) -> None:
    if given := [option for option, value in options.items() if value]:
        raise ValueError(
            f"{given[0]} belongs to the plan, which --effective prints nothing of: give one of the two; keys that the "
            "configuration depends on are set as KEY=VALUE"
        )


def _write_pictures(answer: Plan, svg: Path | None, html: Path | None) -> None:
    from fivefold.report.plan.page import page
    from fivefold.report.plan.picture import draw

    renders: tuple[tuple[str, Path | None, Callable[[Estimate], str]], ...] = (
        ("--svg", svg, draw),
        ("--html", html, lambda estimate: page(estimate, answer.found)),
    )
    wanted = [(option, path, render) for option, path, render in renders if path]
    if answer.estimate is None:
        if wanted:
            options = " and ".join(option for option, _, _ in wanted)
            typer.echo(f"{options}: nothing was written, for there is no layout that fits to draw", err=True)
        return
    for _, path, render in wanted:
        write_text(path, render(answer.estimate))


def _print_effective(recipe: Recipe, *, as_json: bool) -> None:
    """Print what a recipe makes of Megatron-Core's configuration, as YAML or as one JSON object."""
    from fivefold.report.plan.effective import effective_configs, effective_text

    configs = effective_configs(recipe)
    typer.echo(json.dumps(configs) if as_json else effective_text(configs), nl=as_json)


def _print_plan(answer: Plan, ahead: LookAhead | None, *, all_ranks: bool, as_json: bool) -> None:
    """Print tables, or one JSON object."""
    if as_json:
        from fivefold.report.plan.as_json import look_ahead_as_json, plan_as_json

        simulated = {} if ahead is None else {"look_ahead": look_ahead_as_json(ahead)}
        typer.echo(json.dumps(plan_as_json(answer) | simulated))
        return
    from rich.console import Console

    from fivefold.report.plan.tables import print_plan

    console = Console(highlight=False)
    print_plan(console, answer, all_ranks=all_ranks)
    if ahead is not None:
        from fivefold.report.plan.look_ahead import print_look_ahead

        print_look_ahead(console, ahead)
