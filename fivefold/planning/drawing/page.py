"""A page for browsers: the picture of a plan, its problems and notes, and the place of every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from fivefold.families.shape import ModelShape
from fivefold.planning.blueprint import Blueprint
from fivefold.planning.drawing.picture import draw
from fivefold.planning.rank_table import RANK_COLUMNS, rank_rows
from fivefold.planning.role_plans import TrainerPlan

_STYLE = """
body { font-family: Inter, 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif; color: #1f2933; }
body { margin: 0 auto; max-width: 1400px; }
svg { max-width: 100%; height: auto; }
section { margin: 0 32px 32px; }
h2 { font-size: 16px; }
li { margin: 6px 0; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px; text-align: right; border-bottom: 1px solid #e3e7eb; }
th { position: sticky; top: 0; background: #fff; }
"""


def page(blueprint: Blueprint) -> str:
    """Return one HTML document, which loads nothing from elsewhere."""
    name = escape(blueprint.question.shape.name)
    sections = [_list("Why it cannot run", blueprint.problems), _list("Notes", blueprint.notes)]
    sections += [_ranks(trainer, blueprint.question.of(trainer.placed.role).shape) for trainer in blueprint.trainers]
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{name}: plan</title><style>{_STYLE}</style></head>',
            "<body>",
            draw(blueprint),
            *sections,
            "</body></html>",
            "",
        ]
    )


def _list(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<section><h2>{escape(title)}</h2><ul>{items}</ul></section>"


def _ranks(trainer: TrainerPlan, shape: ModelShape) -> str:
    rows = (_row(cells) for cells in rank_rows(trainer.placed, shape))
    title = f"Ranks of {escape(trainer.placed.role)}"
    header = "".join(f"<th>{name}</th>" for name in RANK_COLUMNS)
    return f"<section><h2>{title}</h2><table><tr>{header}</tr>{''.join(rows)}</table></section>"


def _row(cells: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"
