"""The log of a run's samples: lines for people and text tools, columns for programs and pages.

samples.jsonl                           a line for each sample, on the disk before the step's update
samples/steps-000001-000040.parquet     the same samples as columns, with the values of their tokens, part by part

A part holds whole steps. It is written when a checkpoint is, at the end, and now and then between.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from fivefold.observe.durable import replacing
from fivefold.observe.jsonl import JsonLines, finite

if TYPE_CHECKING:
    import pyarrow

MOST_ROWS = 1024
"""Samples after which a part is written."""
LEAST_SECONDS = 10.0
"""Least time from one part to the next of fewer samples."""
SHARE_OF_RUN = 0.01
"""Share of the log's age that passes from one part to the next, so that a long run leaves some hundred parts."""
_NAME = re.compile(r"steps-(\d+)-(\d+)\.parquet")


@dataclass(frozen=True, eq=False)
class TokenValues:
    """The values of the tokens that the policy sampled in one sample, in their order."""

    tokens: list[str]
    """Text of each of the n tokens."""
    rollout_logprobs: npt.NDArray[np.float32]
    """[n]: log-probs under the distribution that was sampled from, in nats; NaN where they are not known."""
    trainer_logprobs: npt.NDArray[np.float32] | None
    """[n]: log-probs that the trainer computed before the update; None where it computed none."""
    advantages: npt.NDArray[np.float32] | None
    """[n]: advantages; None where they are not known before the update."""
    versions: npt.NDArray[np.int32]
    """[n]: versions of the weights that sampled the tokens."""


class SampleLog:
    """Writes each step's samples, first their text, then the values of their tokens.

        log.write(records)            # before the update: an update that fails leaves its samples
        log.complete(token_values)    # once the values are known; in the records' order

    Call `complete` after every `write`.
    """

    def __init__(self, lines: Path, parts: Path) -> None:
        """Open the log.

        Args:
            lines: the JSON lines file.
            parts: folder of the parquet files, which is created with the first one.
        """
        self._lines = JsonLines(lines)
        self._parts = parts
        self._open: list[dict[str, Any]] = []
        self._rows: list[dict[str, Any]] = []
        self._began = self._written = time.monotonic()

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append the records of a step's samples to the lines."""
        for record in records:
            self._lines.write(record)
        self._open = [_row(record) for record in records]

    def complete(self, values: Sequence[TokenValues] | None = None) -> None:
        """Put the samples of the last `write` into the columns, with the values of their tokens if there are any."""
        for row, tokens in zip(self._open, values or (), strict=False):
            row |= vars(tokens)
        self._rows += self._open
        self._open = []
        now = time.monotonic()
        is_time = now - self._written > max(LEAST_SECONDS, SHARE_OF_RUN * (now - self._began))
        if len(self._rows) >= MOST_ROWS or is_time:
            self._write_part()

    def sync(self) -> None:
        """Wait until all samples are on the disk, where they survive the machine."""
        self._lines.sync()
        self._write_part()

    def close(self) -> None:
        """Write what is left, and close the files."""
        self._rows += self._open
        self._open = []
        self._write_part()
        self._lines.close()

    def _write_part(self) -> None:
        self._written = time.monotonic()
        if not self._rows:
            return
        self._parts.mkdir(exist_ok=True)
        first, last = self._rows[0]["step"], self._rows[-1]["step"]
        write_part(self._parts / f"steps-{first:06}-{last:06}.parquet", self._rows)
        self._rows = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def parts_of(folder: Path) -> list[tuple[Path, int, int]]:
    """Return the parts of a folder in the order of their steps, each with its first and its last step."""
    found = [(path, match) for path in folder.glob("*.parquet") if (match := _NAME.fullmatch(path.name))]
    return sorted(((path, int(match[1]), int(match[2])) for path, match in found), key=lambda part: part[1:])


def cut_back_parts(folder: Path, step: int) -> None:
    """Delete the samples of steps after `step`."""
    for path, first, last in parts_of(folder):
        if last <= step:
            continue
        rows = [row for row in read_part(path) if row["step"] <= step] if first <= step else []
        if rows:
            write_part(path.with_name(f"steps-{first:06}-{rows[-1]['step']:06}.parquet"), rows)
        path.unlink()


def read_part(path: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of a part, with those of `columns` that it has, or with all.

    Raises:
        ValueError: the file is damaged.
    """
    import pyarrow.parquet

    try:
        known = pyarrow.parquet.read_schema(path).names
        chosen = known if columns is None else [name for name in columns if name in known]
        rows = pyarrow.parquet.read_table(path, columns=chosen).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} cannot be read: {error}; move it away, and its samples are left out") from error
    for row in rows:
        if "rewards" in row:
            row["rewards"] = {reward["name"]: reward["value"] for reward in row["rewards"]}
    return rows


def write_part(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as one part, atomically.

    Raises:
        OSError: the file cannot be written.
    """
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([_stored(row) for row in rows], schema=_schema())
    with replacing(path) as file:
        pyarrow.parquet.write_table(table, file, compression="zstd")


def _schema() -> pyarrow.Schema:
    import pyarrow as pa

    floats = pa.list_(pa.float32())
    return pa.schema(
        {
            "step": pa.int32(),
            "prompt_index": pa.int64(),
            "data_source": pa.string(),
            "prompt": pa.string(),
            "response": pa.string(),
            "ground_truth": pa.string(),
            "reward": pa.float32(),
            "rewards": pa.list_(pa.struct({"name": pa.string(), "value": pa.float32()})),
            "finish_reason": pa.string(),
            "n_tokens": pa.int32(),
            "oldest_weight_version": pa.int32(),
            "weight_version": pa.int32(),
            "tokens": pa.list_(pa.string()),
            "rollout_logprobs": floats,
            "trainer_logprobs": floats,
            "advantages": floats,
            "versions": pa.list_(pa.int32()),
        }
    )


REWARD = "reward/"
"""Beginning of the names of rewards in a record."""


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a record of the lines."""
    truth = record.get("ground_truth")
    text = (
        truth if isinstance(truth, str) or truth is None else json.dumps(finite(truth), ensure_ascii=False, default=str)
    )
    rewards = {name.removeprefix(REWARD): value for name, value in record.items() if name.startswith(REWARD)}
    return {**record, "ground_truth": text, "rewards": rewards}


def _stored(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as the schema has it, whose texts must have an encoding in UTF-8."""
    rewards = [{"name": name, "value": value} for name, value in row["rewards"].items()]
    return {name: encodable(value) for name, value in row.items()} | {"rewards": rewards}


def encodable(value: Any) -> Any:
    """Return a text, or a list of texts, with half surrogate pairs as codes; any other value as it is."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [encodable(item) for item in value]
    return value
