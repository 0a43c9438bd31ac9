"""The picture of a plan: devices by role, attention next to experts, with memory and time below."""

from __future__ import annotations

from dataclasses import replace

from fivefold.families.shape import ModelShape
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.placement import RolePlacement
from fivefold.planning.estimates import Estimate, ModelEstimate, RolloutEstimate, gb
from fivefold.planning.memory import RankMemory
from fivefold.planning.stages import Stage, stages
from fivefold.report.plan.bars import (
    MEMORY_COLOURS,
    TIME_COLOURS,
    Bar,
    draw_bars,
    rollout_parts,
    time_parts,
    trainer_parts,
)
from fivefold.report.plan.devices import (
    LABEL_WIDTH,
    View,
    attention_view,
    draw_devices,
    expert_view,
    row_width,
    widest_row,
)
from fivefold.report.plan.ranks import device_hint
from fivefold.report.plan.svg import FAINT, INK, LINE, Canvas, stage_colour, text_width, tint

WIDTH, MARGIN = 1360.0, 32.0
BETWEEN = 36.0
"""Pixels between the two views of the devices."""
MOST_BARS = 16


def draw(estimate: Estimate) -> str:
    """Return the picture as an SVG document."""
    inputs = estimate.inputs
    canvas = Canvas(WIDTH)
    title = f"{inputs.actor.shape.name} on {_cluster(estimate)}"
    canvas.text(MARGIN, 44, title, size=22, bold=True)
    canvas.text(MARGIN, 68, inputs.text, size=13, fill=FAINT, mono=True)
    y = 100.0
    for model in estimate.models:
        y = _model(canvas, estimate, model, y)
    for rollout in estimate.rollouts:
        y = _rollout(canvas, estimate, rollout, y)
    y = _memory(canvas, estimate, y)
    y = _time(canvas, estimate, y)
    _problems(canvas, estimate, y)
    return canvas.render(title)


def _cluster(estimate: Estimate) -> str:
    inputs = estimate.inputs
    nodes = f"{inputs.n_nodes} node{'s' if inputs.n_nodes > 1 else ''}"
    if not inputs.on_gpus:
        return f"{nodes}, CPU processes"
    return f"{nodes} × {inputs.gpus_per_node} {inputs.gpu.name}"


def _heading(canvas: Canvas, text: str, detail: str, y: float) -> None:
    canvas.line(MARGIN, y - 20, WIDTH - MARGIN, y - 20)
    canvas.text(MARGIN, y, text, size=15, bold=True)
    canvas.text(MARGIN + text_width(text, 16) + 14, y, detail, size=12, fill=FAINT)


def _model(canvas: Canvas, estimate: Estimate, model: ModelEstimate, y: float) -> float:
    placed, shape = model.placed, estimate.inputs.models[model.placed.role].shape
    layout = placed.layout
    _heading(canvas, placed.role, f"{layout.backend}, {layout.world_size} ranks", y)
    views = [("Attention and dense layers", _dense_degrees(layout), attention_view(placed))]
    if shape.is_moe:
        views.append(("Experts", _expert_degrees(layout), expert_view(placed, shape.n_experts)))
    gpu = estimate.inputs.gpu if estimate.inputs.gpus_per_node else None
    hint = device_hint(model, shape, gpu)
    views = [(name, degrees, replace(view, tooltip=hint)) for name, degrees, view in views]
    cell = _cell_width(placed, [view for _, _, view in views])
    x, below = MARGIN, y
    for index, (name, degrees, view) in enumerate(views):
        indent = LABEL_WIDTH if index == 0 else 0
        canvas.text(x + indent, y + 26, name, size=13, bold=True)
        canvas.text(x + indent + text_width(name, 13.5) + 12, y + 26, degrees, size=12, fill=FAINT, mono=True)
        below = draw_devices(canvas, placed, view, x=x, y=y + 42, cell=cell, labels=index == 0)
        x += indent + row_width(*widest_row(placed, view), cell) + BETWEEN
    below = _reading(canvas, layout, shape, below + 4)
    return _stages(canvas, layout, shape, below) + 34


def _cell_width(placed: RolePlacement, views: list[View]) -> float:
    room = WIDTH - 2 * MARGIN - LABEL_WIDTH - BETWEEN * (len(views) - 1)
    rows = [widest_row(placed, view) for view in views]
    frames = sum(row_width(0, blocks, 0) for _, blocks in rows)
    return min(84.0, (room - frames) / sum(devices for devices, _ in rows))


def _dense_degrees(layout: ParallelLayout) -> str:
    return _degrees(dp=layout.dp, pp=layout.pp, vpp=layout.vpp, cp=layout.cp, tp=layout.tp)


def _expert_degrees(layout: ParallelLayout) -> str:
    return _degrees(edp=layout.edp, pp=layout.pp, ep=layout.ep, etp=layout.etp)


def _degrees(**degrees: int) -> str:
    shown = [f"{name}{value}" for name, value in degrees.items() if value > 1]
    return " ".join(shown) or "one rank"


def _reading(canvas: Canvas, layout: ParallelLayout, shape: ModelShape, y: float) -> float:
    """Draw the line that explains frames and labels."""
    parts = ["large: rank, small: device of the node"]
    if layout.tp > 1:
        parts.append("t: shard of every matrix")
    if layout.cp > 1:
        parts.append("c: part of every sequence")
    if layout.dp > 1:
        parts.append("d: its own sequences")
    if shape.is_moe:
        parts.append("e: the experts it holds")
    frame = "frame left: one copy of a stage, right: of its experts" if shape.is_moe else "frame: one copy of a stage"
    canvas.text(MARGIN + LABEL_WIDTH, y + 8, "  ·  ".join([*parts, frame]), size=11, fill=FAINT)
    return y + 22


def _stages(canvas: Canvas, layout: ParallelLayout, shape: ModelShape, y: float) -> float:
    """Draw the legend of stages, with their layers."""
    left = MARGIN + LABEL_WIDTH
    for stage in stages(layout, shape):
        text = f"stage {stage.index}: {_contents(stage)}"
        needed = 18 + text_width(text, 11) + 18
        if left + needed > WIDTH - MARGIN:
            left, y = MARGIN + LABEL_WIDTH, y + 18
        colour = stage_colour(stage.index)
        canvas.rectangle(left, y, 12, 12, fill=tint(colour), stroke=colour, radius=3)
        canvas.text(left + 18, y + 10, text, size=11, fill=FAINT)
        left += needed
    return y + 20


def _contents(stage: Stage) -> str:
    before = "embedding, " if stage.has_embedding else ""
    return f"{before}layers {stage.summary.replace('-', '–')}" + (", LM head" if stage.has_head else "")


def _rollout(canvas: Canvas, estimate: Estimate, rollout: RolloutEstimate, y: float) -> float:
    placed = rollout.placed
    layout = placed.layout
    detail = f"{layout.backend}, {layout.dp} replica{'s' if layout.dp > 1 else ''} of {layout.tp * layout.pp}"
    if sharers := estimate.placement.sharers(placed.role):
        detail += f", on the same devices as {', '.join(sharers)}, in turn"
    _heading(canvas, placed.role, detail, y)
    view = attention_view(placed)
    cell = _cell_width(placed, [view])
    return draw_devices(canvas, placed, view, x=MARGIN, y=y + 20, cell=cell, labels=True) + 34


def _memory(canvas: Canvas, estimate: Estimate, y: float) -> float:
    gpu = estimate.inputs.gpu
    _heading(canvas, "Memory of a rank", "at the peak of a step", y)
    bars = [bar for model in estimate.models for bar in _trainer_bars(model)]
    for rollout in estimate.rollouts:
        memory = rollout.memory
        note = f"{gb(memory.total + rollout.others)} GB, {memory.sequences} sequences"
        bars.append(Bar(f"{rollout.placed.role}, awake", rollout_parts(memory, rollout.others), note))
    limit = f"{gpu.name}: {gb(gpu.memory)} GB" if estimate.inputs.gpus_per_node else ""
    return draw_bars(
        canvas, bars, MEMORY_COLOURS, x=MARGIN, y=y + 34, width=WIDTH - 2 * MARGIN, full=gpu.memory, limit=limit
    ) + 34  # fmt: skip


def _trainer_bars(model: ModelEstimate) -> list[Bar]:
    """Return one bar per stage; if there are too many, the first, the last and the largest."""
    chosen = list(model.memory)
    if len(chosen) > MOST_BARS:
        largest = sorted(chosen[1:-1], key=lambda stage: -stage.total)[: MOST_BARS - 2]
        chosen = [chosen[0], *sorted(largest, key=lambda stage: stage.stage), chosen[-1]]
    return [_trainer_bar(model, stage) for stage in chosen]


def _trainer_bar(model: ModelEstimate, stage: RankMemory) -> Bar:
    needed = f"{gb(stage.total + model.others)} GB"
    is_binding = stage is model.binding and len(model.memory) > 1
    return Bar(
        f"{model.placed.role}, stage {stage.stage}",
        trainer_parts(stage, model.others),
        f"{needed}, binding (rank {model.binding_rank})" if is_binding else needed,
        is_bold=is_binding,
    )


def _time(canvas: Canvas, estimate: Estimate, y: float) -> float:
    timed = [(model, model.time) for model in estimate.models if model.time is not None]
    if not timed or not estimate.inputs.on_gpus:
        return y
    _heading(canvas, "Seconds of an optimizer step", "as kernels and links allow, on the slowest stage", y)
    bars = []
    for model, time in timed:
        low, high = time.mfu_range
        bars.append(Bar(model.placed.role, time_parts(time), f"{time.total:.1f} s, MFU {low:.0%} to {high:.0%}"))
    full = max(time.total for _, time in timed)
    return draw_bars(canvas, bars, TIME_COLOURS, x=MARGIN, y=y + 16, width=WIDTH - 2 * MARGIN, full=full) + 34


def _problems(canvas: Canvas, estimate: Estimate, y: float) -> None:
    for line in estimate.problems:
        canvas.rectangle(MARGIN, y - 12, 4, 16, fill="#c62828")
        canvas.text(MARGIN + 12, y, line if len(line) < 190 else line[:187] + "…", size=12, fill=INK)
        y += 22
    if not estimate.problems:
        canvas.rectangle(MARGIN, y - 12, 4, 16, fill="#2e7d32", stroke=LINE)
        canvas.text(MARGIN + 12, y, "It fits.", size=12, fill=INK)
