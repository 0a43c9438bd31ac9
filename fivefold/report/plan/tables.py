"""The tables of a plan on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from fivefold.families.shape import ModelShape
from fivefold.layout.gpus import Gpu
from fivefold.layout.parallel import ParallelLayout
from fivefold.planning.estimates import Estimate, ModelEstimate, RolloutEstimate, gb
from fivefold.planning.groups import shown
from fivefold.planning.plan import Plan
from fivefold.planning.search import Found, reasons
from fivefold.planning.stages import stages
from fivefold.planning.timing import StepTime
from fivefold.report.plan.bars import MEMORY_COLOURS, rollout_parts, time_parts, trainer_parts
from fivefold.report.plan.ranks import RANK_COLUMNS, rank_rows

BAR_WIDTH = 48
MOST_RANKS = 16
"""Ranks listed by default; --ranks lists all."""
MOST_STAGES = 16
"""Most stages whose memory is shown; with more, only the first, the last and the largest."""
_GAP = 2
"""Spaces between two columns."""
LEAST_REASONS = 30
"""Least columns for the reasons next to the ranking; with fewer, they go below it."""

Row = tuple[str, dict[str, float]]
"""A rank's label, and its memory by kind."""


def print_plan(console: Console, plan: Plan, *, all_ranks: bool) -> None:
    """Print the ranking of the search, if there was one, and every table of the plan.

    Args:
        console: where to print.
        plan: what to print.
        all_ranks: list every rank instead of the first `MOST_RANKS`.
    """
    if plan.found is not None:
        _print_search(console, plan.found)
        if plan.estimate is not None:
            _print_verdict(console, plan.estimate, "The first: ")
        console.print()
    if plan.estimate is not None:
        _print_estimate(console, plan.estimate, all_ranks=all_ranks)
        if plan.found is None:
            _print_verdict(console, plan.estimate)
    else:
        _print_notes(console, plan.inputs.notes)


def _print_estimate(console: Console, estimate: Estimate, *, all_ranks: bool) -> None:
    console.print(_title(estimate))
    for model in estimate.models:
        _heading(console, f"Ranks of {model.placed.role}")
        console.print(_ranks(estimate, model, all_ranks=all_ranks))
        if model.placed.layout.vpp > 1:
            console.print()
            console.print(_virtual_stages(model, estimate.inputs.models[model.placed.role].shape))
    if estimate.inputs.on_gpus:
        _print_groups(console, estimate)
    _print_memory(console, estimate)
    for model in estimate.models:
        if model.time is not None and estimate.inputs.on_gpus:
            _print_step(console, model, model.time, estimate.inputs.gpu)
    console.print()
    _print_notes(console, estimate.notes)


def _print_verdict(console: Console, estimate: Estimate, of: str = "") -> None:
    """Print whether the plan can run. `of` names the layout if several are listed."""
    for line in estimate.problems:
        console.print(Text.assemble(("cannot run  ", "bold red"), line))
    if estimate.fits and estimate.inputs.on_gpus:
        console.print(Text(f"{of}It fits. {_tightest(estimate)}", style="bold green"))


def _print_notes(console: Console, notes: Iterable[str]) -> None:
    for line in notes:
        console.print(Text.assemble(("note  ", "yellow"), line))


def _tightest(estimate: Estimate) -> str:
    """Return a sentence on the trainer rank with the least room."""
    model = max(estimate.models, key=lambda each: each.binding.total + each.others, default=None)
    if model is None:
        return ""
    room, needed = estimate.inputs.gpu.memory, model.binding.total + model.others
    return (
        f"Of the trainers' ranks, rank {model.binding_rank} of {model.placed.role} (stage "
        f"{model.binding.stage}) needs the most: {gb(needed)} of {gb(room)} GB."
    )


def _print_search(console: Console, found: Found) -> None:
    """Print the ranking with the reasons for each place."""
    if not found.best:
        console.print(Text(f"None of {found.n_tried} layouts fits.", style="bold red"))
        for line in found.advice:
            console.print(f"  {line}", highlight=False)
        return
    _heading(console, f"{found.n_fitting} of {found.n_tried} layouts fit; the fastest")
    table = _ranking(found, with_reasons=False)
    if console.measure(table).maximum + LEAST_REASONS <= console.width:
        console.print(_ranking(found, with_reasons=True))
        return
    console.print(table)
    console.print()
    for place, candidate in enumerate(found.best, 1):
        console.print(f"{place}  {'; '.join(reasons(candidate, found.best[0]))}")


def _ranking(found: Found, *, with_reasons: bool) -> Table:
    """Return one row per layout. Only the reasons may wrap, so that a backend can be copied."""
    table = _table()
    for name in ("", "actor.backend", "recompute", "GB", "seconds", "MFU"):
        table.add_column(
            name,
            justify="left" if name in ("actor.backend", "recompute") else "right",
            overflow="fold",
            no_wrap=with_reasons,
        )
    if with_reasons:
        table.add_column("why")
    for place, candidate in enumerate(found.best, 1):
        time = candidate.time
        cells = (
            str(place),
            candidate.text,
            candidate.recompute,
            gb(candidate.binding.total),
            f"{time.total:.2f}",
            f"{time.mfu:.0%}",
        )
        table.add_row(*cells, *(["; ".join(reasons(candidate, found.best[0]))] if with_reasons else []))
    return table


def _table() -> Table:
    return Table(box=None, pad_edge=False, header_style="dim")


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _title(estimate: Estimate) -> RenderableType:
    inputs, shape, work = estimate.inputs, estimate.inputs.actor.shape, estimate.inputs.actor.work
    active = f", {_short(shape.n_active_parameters)} of them active" if shape.is_moe else ""
    given = f" and {work.given_sequences} given ones of {work.given_length}" if work.given_sequences else ""
    where = "CPU processes" if not inputs.on_gpus else f"x {inputs.gpus_per_node} {inputs.gpu.name}"
    lines = [
        Text.assemble((shape.name, "bold"), f"  {_short(shape.n_parameters)} parameters{active}"),
        Text(f"{inputs.text}  on {inputs.n_nodes} node{'s' if inputs.n_nodes > 1 else ''} {where}"),
        Text(
            f"{work.sequences} sequences of {work.sequence_length} tokens{given} a step, micro-batches of "
            f"{work.tokens_per_micro_batch} tokens, recompute {work.recompute}"
        ),
    ]
    return Text("\n").join(lines)


def _short(n_parameters: int) -> str:
    """Return a number of parameters in billions, or in millions below a billion."""
    return f"{n_parameters / 1e9:.1f}B" if n_parameters >= 1e9 else f"{n_parameters / 1e6:.1f}M"


def _ranks(estimate: Estimate, model: ModelEstimate, *, all_ranks: bool) -> Table:
    rows = list(rank_rows(model.placed, estimate.inputs.models[model.placed.role].shape))
    shown = rows if all_ranks else rows[:MOST_RANKS]
    table = _table()
    for name in RANK_COLUMNS:
        table.add_column(name, justify="right")
    for row in shown:
        table.add_row(*(str(cell) for cell in row))
    if len(shown) < len(rows):
        table.caption = f"and {len(rows) - len(shown)} more: --ranks lists them"
        table.caption_justify = "left"
    return table


def _virtual_stages(model: ModelEstimate, shape: ModelShape) -> Table:
    """Return the layers of each virtual stage: one row per stage, columns in the order of the forward pass."""
    table = _table()
    table.add_column("layers of stage", justify="right")
    for virtual in range(model.placed.layout.vpp):
        table.add_column(f"v{virtual}", justify="right")
    for stage in stages(model.placed.layout, shape):
        table.add_row(str(stage.index), *stage.spans)
    return table


def _print_groups(console: Console, estimate: Estimate) -> None:
    """Print how many groups of ranks stay inside a node."""
    plans: tuple[ModelEstimate | RolloutEstimate, ...] = (*estimate.models, *estimate.rollouts)
    rows = [(plan.placed, spread) for plan in plans for spread in plan.spreads]
    if not rows:
        return
    _heading(console, "Groups of ranks, and the nodes they are on")
    table = _table()
    for name in ("role", "groups", "of ranks", "inside a node", "ranks on one node"):
        table.add_column(name, justify="left" if name == "role" else "right")
    for placed, spread in rows:
        inside = "all" if spread.n_inside == spread.n_groups else f"{spread.n_inside} of {spread.n_groups}"
        name = f"{placed.role} {shown(spread.dimension, placed.layout)}"
        table.add_row(name, str(spread.n_groups), str(spread.size), inside, str(spread.ranks_per_node))
    console.print(table)


def _print_modes(console: Console, estimate: Estimate) -> None:
    """Print the memory of each recompute mode."""
    for model in estimate.models:
        modes = [
            f"{mode} {gb(stage.total)} (activations {gb(stage.activations)})" for mode, stage in model.modes.items()
        ]
        if modes:
            console.print(Text(f"{model.placed.role} by recompute mode: {', '.join(modes)}", style="dim"))


def _print_memory(console: Console, estimate: Estimate) -> None:
    gpu, on_gpus = estimate.inputs.gpu, estimate.inputs.on_gpus
    rows = [*_trainer_rows(estimate), *_rollout_rows(estimate)]
    full = gpu.memory if on_gpus else max(sum(parts.values()) for _, parts in rows)
    limit = f", of the {gb(gpu.memory)} of a {gpu.name}" if on_gpus else ""
    _heading(console, f"Peak memory of a rank in a step, GB{limit}")
    bars = _table()
    for name, parts in rows:
        bars.add_row(name, _bar(parts, full), Text(gb(sum(parts.values())), style="bold"))
    console.print(bars)
    console.print()
    kinds = [kind for kind in MEMORY_COLOURS if any(parts.get(kind, 0) > 0 for _, parts in rows)]
    width = max(len(name) for name, _ in rows) + sum(len(kind) + 2 for kind in kinds)
    if width <= console.width:
        console.print(_kinds_across(rows, kinds))
    else:
        _print_kinds_down(console, rows, kinds)
    _print_modes(console, estimate)


def _kinds_across(rows: list[Row], kinds: list[str]) -> Table:
    table = _table()
    table.add_column("")
    for kind in kinds:
        table.add_column(Text(kind, style=MEMORY_COLOURS[kind]), justify="right")
    for name, parts in rows:
        table.add_row(name, *(_amount(parts.get(kind, 0)) for kind in kinds))
    return table


def _print_kinds_down(console: Console, rows: list[Row], kinds: list[str]) -> None:
    """Print `_kinds_down` in as many tables as a narrow terminal needs without breaking words or amounts."""
    shown: list[Row] = []
    used = widest_kind = max(map(len, kinds))
    for row in rows:
        width = _GAP + _amount_width(row)
        if shown and used + width > console.width:
            console.print(_kinds_down(shown, kinds))
            console.print()
            shown, used = [], widest_kind
        shown.append(row)
        used += width
    console.print(_kinds_down(shown, kinds))


def _kinds_down(rows: list[Row], kinds: list[str]) -> Table:
    """Return the transposed table of `_kinds_across`, whose labels may wrap."""
    table = _table()
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_column(row[0], justify="right", width=_amount_width(row))
    for kind in kinds:
        amounts = (_amount(parts.get(kind, 0)) for _, parts in rows)
        table.add_row(Text(kind, style=MEMORY_COLOURS[kind]), *amounts)
    return table


def _amount_width(row: Row) -> int:
    """Return the length of the longest word of a row's label, or of its longest amount."""
    name, parts = row
    return max(len(text) for text in (*name.split(), *map(_amount, parts.values())))


def _trainer_rows(estimate: Estimate) -> Iterator[Row]:
    for model in estimate.models:
        n_stages = len(model.memory)
        for stage in model.memory:
            mark = " *" if stage is model.binding and n_stages > 1 else ""
            is_shown = n_stages <= MOST_STAGES or stage.stage in (0, n_stages - 1) or stage is model.binding
            if is_shown:
                yield f"{model.placed.role} stage {stage.stage}{mark}", trainer_parts(stage, model.others)


def _rollout_rows(estimate: Estimate) -> Iterator[Row]:
    for rollout in estimate.rollouts:
        yield _rollout_label(rollout), rollout_parts(rollout.memory, rollout.others)


def _rollout_label(rollout: RolloutEstimate) -> str:
    return f"{rollout.placed.role}, {rollout.memory.sequences} sequences"


def _amount(size: float) -> str:
    return "-" if size == 0 else gb(size) if size >= 5e7 else "<0.1"


def _bar(parts: dict[str, float], full: float) -> Text:
    """Return a bar of coloured blocks, one colour per kind. A bar longer than `full` ends with `>`."""
    bar = Text()
    drawn, reached = 0, 0.0
    for kind, size in parts.items():
        reached += size / full * BAR_WIDTH
        end = min(round(reached), BAR_WIDTH)
        bar.append("█" * (end - drawn), style=MEMORY_COLOURS[kind])
        drawn = max(drawn, end)
    bar.append("·" * (BAR_WIDTH - drawn), style="dim")
    if reached > BAR_WIDTH:
        bar.append(">", style="bold red")
    return bar


def _print_step(console: Console, model: ModelEstimate, time: StepTime, gpu: Gpu) -> None:
    low, high = time.mfu_range
    slow, fast = time.tokens_per_second * low / high, time.tokens_per_second
    _heading(console, f"An optimizer step of {model.placed.role}")
    console.print(
        f"{time.micro_batches} micro-batches, {time.total:.2f} s as kernels and links allow; expected MFU {low:.0%} to "
        f"{high:.0%}, {slow:,.0f} to {fast:,.0f} tokens/s a GPU\n"
    )
    console.print(_step(time))
    if time.traffic:
        console.print()
        console.print(_traffic(time, gpu, model.placed.layout))


def _traffic(time: StepTime, gpu: Gpu, layout: ParallelLayout) -> Table:
    table = _table()
    for name in ("traffic", "group", "inside a node", "GB sent by a rank", "seconds"):
        table.add_column(name, justify="left" if name == "traffic" else "right")
    for item in time.traffic:
        inside = "all" if not item.crosses_nodes else f"{item.ranks_per_node} of {item.size}"
        name = shown(item.dimension, layout)
        table.add_row(name, str(item.size), inside, gb(item.bytes), f"{item.seconds(gpu):.3f}")
    return table


def _step(time: StepTime) -> Table:
    table = _table()
    for name in ("time", "seconds", "", "   FLOPs", "TFLOP", ""):
        table.add_column(name, justify="left" if name in ("time", "   FLOPs") else "right")
    seconds = [(name, value) for name, value in time_parts(time).items() if value > 0]
    flops = [(name.replace("_", " "), value) for name, value in vars(time.flops).items() if value > 0]
    for index in range(max(len(seconds), len(flops))):
        left = _shares(*seconds[index], time.total, 1.0) if index < len(seconds) else ("", "", "")
        right = _shares(*flops[index], time.flops.total, 1e12) if index < len(flops) else ("", "", "")
        table.add_row(*left, f"   {right[0]}", *right[1:])
    return table


def _shares(name: str, value: float, whole: float, unit: float) -> tuple[str, str, str]:
    number = f"{value / unit:,.2f}" if value / unit < 100 else f"{value / unit:,.0f}"
    return name, number, f"{value / whole:.0%}"
