"""Devices node by node, drawn twice so that parallel folding shows: once for attention, once for the experts.

node 0  [ d0 [c0 0 1][c1 2 3] ] ...        [ 0 1 2 3 ] ...
          replica, context, tensor           each block holds every expert once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fivefold.layout.grid import RankPosition, rank_grid
from fivefold.layout.placement import RolePlacement
from fivefold.report.plan.svg import FAINT, INK, LINE, Canvas, shard_colour, stage_colour, text_width, tint

LABEL_WIDTH = 58
MOST_NODES = 64
GAP_OF_BLOCKS = 9
CELL_HEIGHT = 44
ROOMY = 64
"""Least width of a cell with room for the device's index."""


@dataclass(frozen=True)
class Chip:
    """A coloured label. Two devices with the same letter and colour hold the same piece."""

    kind: str
    """Letter of the dimension: t, c, d or e."""
    text: str
    index: int
    count: int


@dataclass(frozen=True)
class View:
    """How one part of the model divides the ranks."""

    block: Callable[[RankPosition], tuple[int, ...]]
    """Returns the frame of a rank; ranks in one frame are neighbours."""
    chips: Callable[[RankPosition], list[Chip]]
    tooltip: Callable[[RankPosition], str]
    colour: Callable[[RankPosition], str]


def attention_view(placed: RolePlacement) -> View:
    """Return the view of attention: a frame is one copy of a stage, tp * cp ranks working on the same sequences."""
    layout = placed.layout

    def chips(position: RankPosition) -> list[Chip]:
        shown = [("t", position.tp, layout.tp), ("c", position.cp, layout.cp), ("d", position.dp, layout.dp)]
        return [Chip(letter, f"{letter}{index}", index, count) for letter, index, count in shown if count > 1]

    return View(
        block=lambda position: (position.pp, position.dp),
        chips=chips,
        tooltip=lambda p: f"rank {p.rank}: stage {p.pp}, tensor {p.tp}, context {p.cp}, data {p.dp}",
        colour=lambda position: stage_colour(position.pp) if layout.is_training else FAINT,
    )


def expert_view(placed: RolePlacement, n_experts: int) -> View:
    """Return the view of experts: a frame holds all experts of a stage once, on ep * etp ranks exchanging tokens."""
    layout = placed.layout
    local = n_experts // layout.ep

    def chips(position: RankPosition) -> list[Chip]:
        first = position.ep * local
        span = f"{first}" if local == 1 else f"{first}–{first + local - 1}"
        tensor = [Chip("t", f"t{position.etp}", position.etp, layout.etp)] if layout.etp > 1 else []
        return [Chip("e", f"e {span}", position.ep, layout.ep), *tensor]

    return View(
        block=lambda position: (position.pp, position.edp),
        chips=chips,
        tooltip=lambda p: f"rank {p.rank}: stage {p.pp}, experts shard {p.ep}, tensor {p.etp}, expert data {p.edp}",
        colour=lambda position: stage_colour(position.pp),
    )


def draw_devices(
    canvas: Canvas, placed: RolePlacement, view: View, *, x: float, y: float, cell: float, labels: bool
) -> float:
    """Draw the role's devices at (x, y), one row per node, and return the y below the last row."""
    positions = rank_grid(placed.layout)
    rows: dict[int, list[RankPosition]] = {}
    for position, device in zip(positions, placed.devices, strict=True):
        rows.setdefault(device.node, []).append(position)
    left = x + (LABEL_WIDTH if labels else 0)
    for node, ranks in list(rows.items())[:MOST_NODES]:
        if labels:
            canvas.text(x, y + CELL_HEIGHT / 2 + 4, f"node {node}", fill=FAINT)
        _draw_row(canvas, placed, ranks, view, left, y, cell)
        y += CELL_HEIGHT + 14
    if len(rows) > MOST_NODES:
        canvas.text(left, y + 8, f"and {len(rows) - MOST_NODES} more nodes, laid out alike", fill=FAINT)
        y += 20
    return y


def row_width(n_devices: int, n_blocks: int, cell: float) -> float:
    """Return the width of a row of framed devices."""
    return n_devices * cell + n_blocks * GAP_OF_BLOCKS


def widest_row(placed: RolePlacement, view: View) -> tuple[int, int]:
    """Return the number of devices and of frames in the widest row."""
    rows: dict[int, list[RankPosition]] = {}
    for position, device in zip(rank_grid(placed.layout), placed.devices, strict=True):
        rows.setdefault(device.node, []).append(position)
    return max((len(ranks), len({view.block(position) for position in ranks})) for ranks in rows.values())


def _draw_row(
    canvas: Canvas, placed: RolePlacement, ranks: Sequence[RankPosition], view: View, x: float, y: float, cell: float
) -> None:
    start = 0
    while start < len(ranks):
        end = start
        while end < len(ranks) and view.block(ranks[end]) == view.block(ranks[start]):
            end += 1
        block = ranks[start:end]
        canvas.rectangle(x - 3, y - 3, cell * len(block) + 2, CELL_HEIGHT + 6, stroke=LINE, fill="#f6f8fa", radius=6)
        for position in block:
            _draw_cell(canvas, position, placed.devices[position.rank].local, view, x, y, cell)
            x += cell
        x += GAP_OF_BLOCKS
        start = end


def _draw_cell(
    canvas: Canvas, position: RankPosition, device: int, view: View, x: float, y: float, cell: float
) -> None:
    """Draw a device: its rank, its index on the node if there is room, and its pieces of the model."""
    colour = view.colour(position)
    width = cell - 4
    canvas.rectangle(
        x, y, width, CELL_HEIGHT, fill=tint(colour), stroke=colour, radius=4, tooltip=view.tooltip(position)
    )
    canvas.text(x + 6, y + 16, str(position.rank), size=12, bold=True)
    if cell >= ROOMY:
        canvas.text(x + width - 5, y + 15, f"dev {device}", size=9, fill=FAINT, anchor="end")
    _draw_chips(canvas, view.chips(position), x + 3, y + CELL_HEIGHT - 19, width - 6)


def _draw_chips(canvas: Canvas, chips: Sequence[Chip], x: float, y: float, width: float) -> None:
    """Draw chips side by side, in proportion to their texts."""
    wanted = [text_width(chip.text, 10) + 8 for chip in chips]
    for chip, share in zip(chips, wanted, strict=True):
        space = (width - 2 * (len(chips) - 1)) * share / sum(wanted)
        canvas.rectangle(x, y, space, 16, fill=shard_colour(chip.kind, chip.index, chip.count), radius=3)
        size = min(10.0, 10.0 * (space - 3) / text_width(chip.text, 10))
        canvas.text(x + space / 2, y + 11.5, chip.text, size=round(size, 1), fill=INK, anchor="middle")
        x += space + 2
