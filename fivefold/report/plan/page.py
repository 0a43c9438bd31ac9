"""The HTML page of a plan: its picture, problems and notes, and the place of every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from fivefold.families.shape import ModelShape
from fivefold.planning.estimates import Estimate, ModelEstimate
from fivefold.planning.search import Found
from fivefold.report.plan.layouts import layouts_section
from fivefold.report.plan.picture import draw
from fivefold.report.plan.ranks import RANK_COLUMNS, rank_rows

_STYLE = """
body { font-family: Inter, 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif; color: #1f2933; }
body { margin: 0 auto; max-width: 1400px; }
svg { max-width: 100%; height: auto; }
p, li { font-size: 14px; line-height: 1.5; }
section { margin: 0 32px 32px; }
h2 { font-size: 16px; }
li { margin: 6px 0; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px; text-align: right; border-bottom: 1px solid #e3e7eb; white-space: nowrap; }
th { position: sticky; top: 0; background: #fff; }
#layouts td:last-child { white-space: normal; min-width: 280px; }
th[data-sort] { cursor: pointer; }
th[data-sort="up"]::after { content: " ↑"; } th[data-sort="down"]::after { content: " ↓"; }
#layouts th:first-child, #layouts th:last-child { text-align: left; }
#layouts td:first-child, #layouts td:last-child { text-align: left; } tr.chosen td { background: #e3edfb; }
.scroll { overflow: auto; max-height: 420px; }
rect[data-tip]:hover { filter: brightness(0.93); } [id^=dot-] { cursor: pointer; }
#tip { position: fixed; z-index: 9; max-width: 360px; white-space: pre-line; pointer-events: none; font-size: 12px; }
#tip { background: #1f2933; color: #fff; padding: 7px 11px; border-radius: 7px; line-height: 1.5; }
#tip[hidden] { display: none; }
@media (max-width: 700px) {
  section { margin: 0 12px 24px; overflow-x: auto; }
  #picture { overflow-x: auto; } #picture svg { max-width: none; width: 900px; }
}
@media (prefers-color-scheme: dark) {
  body { background: #1a1a1a; color: #e6e6e6; }
  svg { filter: invert(0.9) hue-rotate(180deg); }
  th { background: #1a1a1a; } th, td { border-color: #3a3a3a; } tr.chosen td { background: #24344d; }
}
"""


_SCRIPT = """
const tip = document.getElementById("tip");
document.querySelectorAll("svg rect > title").forEach((title) => {
  title.parentElement.dataset.tip = title.textContent;
  title.remove();
});
const point = (event) => {
  const text = event.target.dataset?.tip;
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  const below = event.clientY + 18;
  tip.style.top = `${below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 12 : below}px`;
};
addEventListener("pointermove", point);
addEventListener("pointerdown", point);
document.querySelectorAll("th[data-sort]").forEach((head) => {
  const sort = () => {
    const body = head.closest("table").tBodies[0], sign = head.dataset.sort === "up" ? -1 : 1;
    head.closest("tr").querySelectorAll("th").forEach((other) => { other.dataset.sort = ""; });
    head.dataset.sort = sign > 0 ? "up" : "down";
    const value = (row) => row.cells[head.cellIndex].dataset.value;
    const isText = (a, b) => isNaN(value(a)) || isNaN(value(b));
    const compare = (a, b) => (isText(a, b) ? value(a).localeCompare(value(b)) : value(a) - value(b));
    body.append(...[...body.rows].sort((a, b) => sign * compare(a, b)));
  };
  head.addEventListener("click", sort);
  head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
});
document.querySelectorAll("[id^=dot-]").forEach((dot) => dot.addEventListener("click", () => {
  document.querySelectorAll("tr.chosen").forEach((row) => row.classList.remove("chosen"));
  const row = document.getElementById(dot.id.replace("dot", "layout"));
  row.classList.add("chosen");
  row.scrollIntoView({ block: "center" });
}));
"""


def page(estimate: Estimate, found: Found | None = None) -> str:
    """Return one self-contained HTML document. `found` is the outcome of a search."""
    name = escape(estimate.inputs.actor.shape.name)
    sections = [_list("Why it cannot run", estimate.problems), _list("Notes", estimate.notes)]
    sections += [_ranks(model, estimate.inputs.models[model.placed.role].shape) for model in estimate.models]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{name}: plan</title><style>{_STYLE}</style></head>",
            "<body>",
            f'<div id="picture">{draw(estimate)}</div>',
            layouts_section(found) if found is not None and found.ranked else "",
            *sections,
            f'<div id="tip" hidden></div><script>{_SCRIPT}</script>',
            "</body></html>",
            "",
        ]
    )


def _list(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<section><h2>{escape(title)}</h2><ul>{items}</ul></section>"


def _ranks(model: ModelEstimate, shape: ModelShape) -> str:
    rows = (_row(cells) for cells in rank_rows(model.placed, shape))
    title = f"Ranks of {escape(model.placed.role)}"
    header = "".join(f"<th>{name}</th>" for name in RANK_COLUMNS)
    return f"<section><h2>{title}</h2><table><tr>{header}</tr>{''.join(rows)}</table></section>"


def _row(cells: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"
