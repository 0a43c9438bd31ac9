"""The page about runs: one HTML file that loads nothing from elsewhere.

Run ─> facts ──────────────────────────> data (JSON)      ┐
    ─> metrics, samples, time line ────> blocks (gzip)    ├─> template ─> page
plotly's script ───────────────────────> block (gzip)     │
scripts and styles of this room ──────────────────────────┘
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fivefold import __version__
from fivefold.observe.jsonl import finite
from fivefold.observe.timers import SUFFIX
from fivefold.report.blocks import inline, script_block, table_block
from fivefold.report.recipe_table import with_defaults
from fivefold.report.run import Run, duration
from fivefold.report.samples import Embedded, Samples, embedded
from fivefold.report.timeline import Timeline, timeline_block

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("core.js", "charts.js", "timeline.js", "samples.js", "page.js")
"""Scripts of the page, in their order; the last one begins."""
PLOTLY = "plotly-cartesian.min.js"
"""plotly.js without maps and charts in three dimensions: a browser runs it in half of the whole one's time. No Python
package has it, so it is kept here as npm's package plotly.js-cartesian-dist-min has it."""
ROOM_FOR_SAMPLES = 10_000_000
"""Bytes of a page that samples may take: with plotly's script and the metrics it stays below 20 MB."""
INSTALL = "install it with: pip install 'fivefold[report]'"


def page(runs: Sequence[Run]) -> str:
    """Return the page about `runs`, with all of their data in it.

    Raises:
        ValueError: the library that fills it in is not installed.
    """
    blocks: dict[str, bytes] = {}
    all_facts = []
    for number, run in enumerate(runs):
        samples = samples_of(run)
        inside = embedded(samples, f"{number}-samples", ROOM_FOR_SAMPLES // len(runs))
        blocks |= {f"{number}-metrics": metrics_block(run), **inside.blocks}
        if has_timeline(run):
            blocks[f"{number}-timeline"] = timeline_block(Timeline.read(run.folder.logs))
        all_facts.append(facts(run) | {"samples": sample_facts(samples, inside)})
    return render(all_facts, {name: inline(block) for name, block in blocks.items()}, live=False)


def samples_of(run: Run) -> Samples:
    """Return the logged samples of a run."""
    samples = Samples(run.folder.samples, run.folder.sample_parts)
    samples.refresh()
    return samples


def sample_facts(samples: Samples, inside: Embedded | None = None) -> dict[str, Any]:
    """Return what the page says about a run's samples: their number, the unit of their length, what was left out."""
    counted = samples.rows and samples.rows[0]["counts_tokens"]
    note = "" if inside is None else inside.note
    return {"n": len(samples.rows), "unit": "tokens" if counted else "characters", "note": note}


def metrics_block(run: Run, first: int = 0) -> bytes:
    """Return the metrics of the rows from `first` on as a block."""
    return table_block(run.series.since(first).columns)


def render(all_facts: Sequence[Mapping[str, Any]], blocks: Mapping[str, str], *, live: bool) -> str:
    """Return the page about the runs with these facts; a live page asks its server for blocks that are not in it.

    Raises:
        ValueError: the library that fills it in is not installed.
    """
    template = _jinja2().Template((ASSETS / "page.html.j2").read_text(encoding="utf-8"), autoescape=False)
    data = {"live": live, "runs": list(all_facts)}
    return str(
        template.render(
            title=_escaped(", ".join(str(each["name"]) for each in all_facts)),
            style=(ASSETS / "style.css").read_text(encoding="utf-8"),
            data=_in_script(json.dumps(finite(data))),
            plotly=_plotly(),
            blocks=blocks,
            scripts=[(ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS],
            footer=f"Fivefold {__version__}",
            live=live,
        )
    )


def facts(run: Run) -> dict[str, Any]:
    """Return what the page says about a run, besides its blocks."""
    about = run.about
    shown = {name: text for name, text in _section(about, "facts").items() if name not in ("warnings", "versions")}
    return {
        **state(run),
        "name": run.name,
        "warnings": _section(about, "facts").get("warnings"),
        "facts": list(shown.items()),
        "versions": list((_section(about, "versions") or _section(run.summary, "versions")).items()),
        "machine": list((_section(about, "machine") or {"host": run.status.get("host")}).items()),
        "folder": str(run.folder.path),
        "began": run.status.get("began"),
        "command": about.get("command"),
        "recipe": with_defaults(run.recipe) if run.recipe else [],
    }


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a JSON file; an empty one where the file has something else in its place."""
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def state(run: Run) -> dict[str, Any]:
    """Return the facts about a run that change while it is in progress."""
    best, left = run.best, run.time_left
    return {
        "state": run.state,
        "headline": run.headline(),
        "error": run.status.get("error"),
        "changed": run.status.get("changed"),
        "step": run.step,
        "total_steps": run.total_steps,
        "rows": len(run.series),
        "timeline": has_timeline(run),
        "duration": duration(run.seconds),
        "left": None if left is None else {"time": duration(left.seconds), "doubt": left.doubt},
        "held_out": None if run.held_out is None else vars(run.held_out),
        "before": run.before,
        "best": None if best is None else dict(zip(("name", "value", "step"), best, strict=True)),
    }


def has_timeline(run: Run) -> bool:
    """Return whether the run has recorded events."""
    return any(run.folder.logs.glob(f"**/*{SUFFIX}"))


@cache
def _plotly() -> str:
    """Return the script of plotly as a block, in the form in which it stands in a page."""
    return inline(script_block((ASSETS / PLOTLY).read_text(encoding="utf-8")))


def _jinja2() -> Any:
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise ValueError(
            f"pages about runs need the package {error.name}, which is not installed: {INSTALL}"
        ) from error
    return jinja2


def _in_script(text: str) -> str:
    """Return JSON of ASCII characters that cannot end the script element in which it stands."""
    return text.replace("<", "\\u003c")


def _escaped(text: str) -> str:
    """Return a text as HTML. Half a surrogate pair, as of a folder whose name is not UTF-8, has no encoding."""
    return text.encode(errors="replace").decode().replace("&", "&amp;").replace("<", "&lt;")
