"""The layouts that a search found: a sortable table, and a scatter plot of time against memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from fivefold.planning.estimates import gb
from fivefold.planning.search import Candidate, Found, reasons
from fivefold.report.plan.svg import FAINT, INK, Canvas

WIDTH, HEIGHT = 760.0, 360.0
LEFT, BOTTOM = 64.0, 40.0
MOST_TICKS = 6
"""Most grid lines of the memory axis."""
COLOURS = {"none": "#59a14f", "selective": "#edc948", "full": "#e15759"}
"""Colour of a dot, by recompute mode."""
OTHER_COLOUR = "#4e79a7"
COLUMNS = ("layout", "s a step", "GB", "GB spare", "MFU", "bubble", "recomputation", "why")


@dataclass(frozen=True)
class Scale:
    """Maps seconds (logarithmic) and bytes to pixels."""

    shortest: float
    longest: float
    largest: float

    def place(self, seconds: float, size: float) -> tuple[float, float]:
        """Return x and y."""
        share = math.log(seconds / self.shortest) / math.log(self.longest / self.shortest)
        return LEFT + share * (WIDTH - LEFT - 20), HEIGHT - BOTTOM - size / self.largest * (HEIGHT - BOTTOM - 30)

    def times(self) -> list[float]:
        """Return the seconds of grid lines: round numbers, denser on a short axis."""
        powers = [10.0**power for power in range(-3, 7)]
        for digits in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
            found = [digit * power for power in powers for digit in digits]
            found = [seconds for seconds in found if self.shortest <= seconds <= self.longest]
            if len(found) > 1:
                return found
        return [self.shortest, self.longest]

    def sizes(self) -> list[float]:
        """Return the bytes of grid lines: multiples of a round number, starting at 0."""
        steps = (digit * 10.0**power for power in range(6, 14) for digit in (1, 2, 5))
        step = next(step for step in steps if self.largest / step <= MOST_TICKS)
        return [step * number for number in range(int(self.largest / step) + 1)]


def layouts_section(found: Found) -> str:
    """Return the HTML section on the layouts of a search."""
    first = found.ranked[0]
    rows = "".join(_row(number, candidate, first) for number, candidate in enumerate(found.ranked))
    header = "".join(f'<th data-sort tabindex="0">{name}</th>' for name in COLUMNS)
    tried = (
        f"{found.n_tried:,} layouts were tried and {found.n_fitting:,} fit. Of those that differ only in virtual "
        "stages, the fastest is listed."
    )
    return (
        f"<section><h2>Layouts</h2><p>{tried} Click a heading to sort, and a dot to find its row.</p>{_scatter(found)}"
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
    """Return the plot as SVG: one dot per layout, seconds on x and memory on y."""
    canvas = Canvas(WIDTH)
    seconds = [candidate.time.total for candidate in found.ranked]
    scale = Scale(min(seconds) * 0.9, max(seconds) * 1.1, max(c.binding.total for c in found.ranked) * 1.1)
    for at in scale.times():
        x, _ = scale.place(at, 0)
        canvas.line(x, 30, x, HEIGHT - BOTTOM)
        canvas.text(x, HEIGHT - BOTTOM + 16, f"{at:g}", size=11, fill=FAINT, anchor="middle")
    for size in scale.sizes():
        _, y = scale.place(scale.shortest, size)
        canvas.line(LEFT, y, WIDTH - 10, y)
        canvas.text(LEFT - 8, y + 4, f"{size / 1e9:g}", size=11, fill=FAINT, anchor="end")
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
