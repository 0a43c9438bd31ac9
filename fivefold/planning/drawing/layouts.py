"""The layouts that a search found: a table that can be sorted, and a scatter of time against memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from fivefold.planning.drawing.svg import FAINT, INK, Canvas
from fivefold.planning.role_plans import gb
from fivefold.planning.search import Candidate, Found, reasons

WIDTH, HEIGHT = 760.0, 360.0
LEFT, BOTTOM = 64.0, 40.0
TICKS = 5
COLOURS = {"none": "#59a14f", "selective": "#edc948", "full": "#e15759"}
"""Colour of a dot, by recompute mode."""
OTHER_COLOUR = "#4e79a7"
COLUMNS = ("layout", "s a step", "GB", "GB spare", "MFU", "bubble", "recomputation", "why")


@dataclass(frozen=True)
class Scale:
    """Where seconds, on a logarithmic axis, and bytes are drawn."""

    shortest: float
    longest: float
    largest: float

    def place(self, seconds: float, size: float) -> tuple[float, float]:
        """Return x and y."""
        share = math.log(seconds / self.shortest) / math.log(self.longest / self.shortest)
        return LEFT + share * (WIDTH - LEFT - 20), HEIGHT - BOTTOM - size / self.largest * (HEIGHT - BOTTOM - 30)


def layouts_section(found: Found) -> str:
    """Return the section of a page about the layouts of a search, as HTML."""
    first = found.ranked[0]
    rows = "".join(_row(number, candidate, first) for number, candidate in enumerate(found.ranked))
    header = "".join(f'<th data-sort tabindex="0">{name}</th>' for name in COLUMNS)
    told = f"{found.n_tried:,} layouts were tried and {found.n_fitting:,} fit; these differ in more than v."
    return (
        f"<section><h2>Layouts</h2><p>{told} Click a heading to sort, and a dot to find its row.</p>{_scatter(found)}"
        f'<div class="scroll"><table id="layouts"><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div>'
        "</section>"
    )


def _row(number: int, candidate: Candidate, first: Candidate) -> str:
    low, high = candidate.time.mfu_range
    cells: list[tuple[str, float | str]] = [
        (candidate.text, candidate.text),
        (f"{candidate.time.total:.2f}", candidate.time.total),
        (gb(candidate.binding.total), candidate.binding.total),
        (gb(candidate.spare), candidate.spare),
        (f"{low:.0%} to {high:.0%}", low),
        (f"{candidate.time.bubble_share:.0%}", candidate.time.bubble_share),
        (candidate.recompute, candidate.recompute),
        ("; ".join(reasons(candidate, first)), ""),
    ]
    inner = "".join(f'<td data-value="{escape(str(value))}">{escape(text)}</td>' for text, value in cells)
    return f'<tr id="layout-{number}">{inner}</tr>'


def _scatter(found: Found) -> str:
    """Return the picture: a dot for each layout, seconds to the right and memory upwards."""
    canvas = Canvas(WIDTH)
    seconds = [candidate.time.total for candidate in found.ranked]
    scale = Scale(min(seconds) * 0.9, max(seconds) * 1.1, max(c.binding.total for c in found.ranked) * 1.1)
    for tick in range(TICKS + 1):
        at = scale.shortest * (scale.longest / scale.shortest) ** (tick / TICKS)
        x, y = scale.place(at, scale.largest * tick / TICKS)
        canvas.line(x, 10, x, HEIGHT - BOTTOM)
        canvas.line(LEFT, y, WIDTH - 10, y)
        canvas.text(x, HEIGHT - BOTTOM + 16, f"{at:.3g}", size=11, fill=FAINT, anchor="middle")
        canvas.text(LEFT - 8, y + 4, gb(scale.largest * tick / TICKS), size=11, fill=FAINT, anchor="end")
    canvas.text(WIDTH - 10, HEIGHT - 4, "seconds of a step (logarithmic)", size=12, fill=INK, anchor="end")
    canvas.text(LEFT + 6, 22, "GB of a rank", size=12, fill=INK)
    left = LEFT + 110
    for mode in dict.fromkeys(candidate.recompute for candidate in found.ranked):
        canvas.rectangle(left, 13, 10, 10, fill=COLOURS.get(mode, OTHER_COLOUR), radius=5)
        canvas.text(left + 15, 22, f"{'no' if mode == 'none' else mode} recomputation", size=11, fill=FAINT)
        left += 160
    for number, candidate in reversed(list(enumerate(found.ranked))):
        x, y = scale.place(candidate.time.total, candidate.binding.total)
        hint = f"{candidate.text}\n{candidate.time.total:.2f} s, {gb(candidate.binding.total)} GB"
        colour = COLOURS.get(candidate.recompute, OTHER_COLOUR)
        canvas.rectangle(
            x - 5, y - 5, 10, 10, fill=colour, stroke=INK if number == 0 else "#ffffff", radius=5, tooltip=hint,
            name=f"dot-{number}",
        )  # fmt: skip
    return canvas.render("Time against memory")
