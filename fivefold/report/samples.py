"""The logged samples of a run, as blocks that a page reads when it shows them.

samples/*.parquet ┐
samples.jsonl     ┴─> Samples ─> index   numbers of every sample: a table block
                             ─> chunk   texts and token values of CHUNK samples: a text block

The parquet parts come first; the lines have the samples of the steps behind them, without values of tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.json_text import parsed_object
from fivefold.observe.sample_parts import REWARD, parts_of, read_part
from fivefold.report.blocks import table_block, text_block
from fivefold.report.growing import GrowingLines

CHUNK = 64
"""Samples of a chunk."""
NUMBERS = (
    "step",
    "prompt_index",
    "reward",
    "rewards",
    "finish_reason",
    "n_tokens",
    "oldest_weight_version",
    "weight_version",
    "prompt",
    "response",
)
"""Columns of a part from which the index is made; the two texts only where older lines lack the numbers."""
TOKEN_COLUMNS = ("tokens", "rollout_logprobs", "trainer_logprobs", "advantages")
DIGITS = 3
"""Digits behind the point of log-probs and advantages in a page."""
_STEP = re.compile(rb'\{"step": (\d+)')


@dataclass
class Samples:
    """The samples of a run that are on the disk; `refresh` reads those that have come since."""

    lines: Path
    parts: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Numbers of each sample, and where its text is: `part` and `row` of a parquet file, or `offset` in the lines."""
    changes: int = 0
    """How often samples that were known have changed: a resumed run has cut them back, or a part has brought the
    values of their tokens."""
    _read: dict[Path, int] = field(default_factory=dict)
    """When each part that was read was written."""
    _prompts: dict[str, int] = field(default_factory=dict)
    _cache: tuple[Path, list[dict[str, Any]]] | None = None

    def __post_init__(self) -> None:
        self._growing = GrowingLines(self.lines)

    def refresh(self) -> None:
        """Read what was added since the last call; if the run was cut back, read everything again."""
        parts = {path: (first, path.stat().st_mtime_ns) for path, first, _ in parts_of(self.parts)}
        written = {path: when for path, (_, when) in parts.items()}
        if self._growing.begin_anew_if_changed() or not self._read.items() <= written.items():
            self._growing.rewind()
            self.rows, self._read, self._cache = [], {}, None
            self.changes += 1
        for path, (first, when) in parts.items():
            if path not in self._read:
                # Its samples are known from the lines; now they have values of their tokens.
                while self.rows and self.rows[-1]["step"] >= first:
                    self.rows.pop()
                self._add_part(path)
                self._read[path] = when
                self._growing.rewind()
                self.changes += 1
        self._add_lines()

    def _add_part(self, path: Path) -> None:
        rows = enumerate(read_part(path, NUMBERS))
        self.rows += [self._numbers(row) | {"part": path, "row": number} for number, row in rows]

    def _add_lines(self) -> None:
        known = self.rows[-1]["step"] if self.rows and self._growing.at_start else -1
        for offset, line in self._growing.new():
            begin = _STEP.match(line)
            if begin is None or int(begin[1]) <= known:
                continue
            with suppress(ValueError, KeyError, TypeError):  # a lost machine has torn the line, or it is no sample's
                self.rows.append(self._numbers(_of_line(line)) | {"offset": offset})

    def _numbers(self, row: dict[str, Any]) -> dict[str, Any]:
        prompt = row.get("prompt_index")
        length = row.get("n_tokens")
        return {
            "step": row["step"],
            "prompt": self._prompts.setdefault(row["prompt"], len(self._prompts)) if prompt is None else prompt,
            "reward": row.get("reward"),
            "counts_tokens": length is not None,
            "length": len(row["response"]) if length is None else length,
            "version": row.get("weight_version"),
            "age": _age(row),
            "cut": float(row.get("finish_reason") == "length"),
            **{f"{REWARD}{name}": value for name, value in (row.get("rewards") or {}).items()},
        }

    def index(self, chosen: Sequence[int]) -> bytes:
        """Return the numbers of the chosen samples as a table block."""
        names = dict.fromkeys(("step", "prompt", "reward", "length", "version", "age", "cut"))
        names |= dict.fromkeys(name for row in self.rows for name in row if name.startswith(REWARD))
        return table_block({name: self._column(name, chosen) for name in names})

    def _column(self, name: str, chosen: Sequence[int]) -> npt.NDArray[np.float32]:
        values = (self.rows[number].get(name) for number in chosen)
        return np.array([value if isinstance(value, int | float) else float("nan") for value in values], np.float32)

    def chunk(self, chosen: Sequence[int], *, with_tokens: bool) -> bytes:
        """Return the texts of the chosen samples as a text block, with the values of their tokens or without."""
        return text_block([_shown(record, with_tokens=with_tokens) for record in self._records(chosen)])

    def _records(self, chosen: Sequence[int]) -> Iterator[dict[str, Any]]:
        for number in chosen:
            row = self.rows[number]
            if "part" in row:
                yield self._part(row["part"])[row["row"]]
            else:
                with self.lines.open("rb") as lines:
                    lines.seek(row["offset"])
                    yield _of_line(lines.readline())

    def _part(self, path: Path) -> list[dict[str, Any]]:
        if self._cache is None or self._cache[0] != path:
            self._cache = (path, read_part(path))
        return self._cache[1]


@dataclass(frozen=True)
class Embedded:
    """The samples of a run in a page."""

    blocks: dict[str, bytes]
    note: str
    """What was left out; empty if nothing was."""


def embedded(samples: Samples, prefix: str, room: int) -> Embedded:
    """Return the blocks of a run's samples, of at most about `room` bytes together.

    If not all fit, the values of tokens are left out of some steps; if the texts alone do not fit, whole steps are. The
    steps that stay are spread evenly.
    """
    steps = np.array([row["step"] for row in samples.rows])
    texts, full = _sizes(samples)
    kept = _even_steps(steps, room / max(texts * len(steps), 1))
    room_for_tokens = room - texts * len(kept)
    with_tokens = set(_even_steps(steps[kept], room_for_tokens / max((full - texts) * len(kept), 1)).tolist())
    chunks: dict[str, bytes] = {}
    for start in range(0, len(kept), CHUNK):
        places = range(start, min(start + CHUNK, len(kept)))
        records = samples._records([int(kept[place]) for place in places])
        shown = [
            _shown(record, with_tokens=place in with_tokens) for place, record in zip(places, records, strict=True)
        ]
        chunks[f"{prefix}-chunk-{start // CHUNK}"] = text_block(shown)
    return Embedded({f"{prefix}-index": samples.index(kept.tolist()), **chunks}, _note(samples, kept, with_tokens))


def _note(samples: Samples, kept: npt.NDArray[np.int64], with_tokens: set[int]) -> str:
    total = len(samples.rows)
    if len(kept) < total:
        steps = len({samples.rows[number]["step"] for number in kept})
        return (
            f"{len(kept):,} of {total:,} logged samples are in this page, from {steps:,} steps; "
            "`fivefold watch` shows all of them."
        )
    if len(with_tokens) < total and any("part" in row for row in samples.rows):
        return (
            f"{len(with_tokens):,} of {total:,} samples have the values of their tokens in this page; "
            "`fivefold watch` shows all of them."
        )
    return ""


def _sizes(samples: Samples) -> tuple[float, float]:
    """Return the bytes of a sample in a page without and with the values of its tokens, from some of the chunks."""
    n = len(samples.rows)
    if n == 0:
        return 1.0, 1.0
    starts = sorted({int(start) for start in np.linspace(0, max(n - CHUNK, 0), 8)})
    tried = [range(start, min(start + CHUNK, n)) for start in starts]
    count = sum(len(chosen) for chosen in tried)
    sums = [sum(len(samples.chunk(each, with_tokens=with_tokens)) for each in tried) for with_tokens in (False, True)]
    base64 = 4 / 3
    return base64 * sums[0] / count + 4, base64 * max(sums[1], sums[0]) / count + 4


def _even_steps(steps: npt.NDArray[np.int64], share: float) -> npt.NDArray[np.int64]:
    """Return the places of the samples of evenly spread steps: about `share` of all, the last step among them."""
    if share >= 1 or not len(steps):
        return np.arange(len(steps))
    distinct = np.unique(steps)
    n = max(int(len(distinct) * max(share, 0)), 1 if share > 0 else 0)
    chosen = distinct[np.unique(np.linspace(0, len(distinct) - 1, n).round().astype(int))] if n else distinct[:0]
    return np.nonzero(np.isin(steps, chosen))[0]


def _shown(record: dict[str, Any], *, with_tokens: bool) -> dict[str, Any]:
    """Return what a page shows of a record."""
    shown = {name: record.get(name) for name in ("prompt", "response", "ground_truth", "data_source", "finish_reason")}
    if with_tokens and record.get("tokens") is not None:
        shown |= {name: _rounded(record.get(name)) for name in TOKEN_COLUMNS}
        versions = record.get("versions") or []
        shown["versions"] = versions if len(set(versions)) > 1 else None
        shown["reads"] = record.get("reads") or None
    return {name: value for name, value in shown.items() if value is not None}


def _age(row: dict[str, Any]) -> int | None:
    """Return how many versions older than the weights that were trained on it a sample's oldest token is, if known."""
    oldest = row.get("oldest_weight_version")
    return None if oldest is None else row["step"] - 1 - oldest


def _rounded(values: list[Any] | None) -> list[Any] | None:
    if values is None or not values or isinstance(values[0], str):
        return values
    return [None if value is None else round(value, DIGITS) for value in values]


def _of_line(line: bytes) -> dict[str, Any]:
    """Return a record of the lines in the form of a part's row."""
    record: dict[str, Any] = parsed_object(line)
    truth = record.get("ground_truth")
    rewards = {name.removeprefix(REWARD): value for name, value in record.items() if name.startswith(REWARD)}
    text = truth if truth is None or isinstance(truth, str) else json.dumps(truth, ensure_ascii=False)
    return {**record, "ground_truth": text, "rewards": rewards}
