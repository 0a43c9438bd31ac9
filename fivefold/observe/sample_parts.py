"""The samples of a run as columns, with the values of their tokens, in parts of whole steps.

samples/steps-000001-000040.parquet

A part is written with each checkpoint, at the end, and now and then in between.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fivefold.observe.durable import replacing

if TYPE_CHECKING:
    import pyarrow

REWARD = "reward/"
"""Prefix of the names of rewards in a record."""
_NAME = re.compile(r"steps-(\d+)-(\d+)\.parquet")


@dataclass(frozen=True, eq=False)
class TokenValues:
    """The values of the n tokens that the policy sampled in one sample, in order."""

    tokens: list[str]
    """Text of each token."""
    rollout_logprobs: npt.NDArray[np.float32]
    """[n]: log-probs under the sampling distribution, in nats; NaN if unknown."""
    trainer_logprobs: npt.NDArray[np.float32] | None
    """[n]: log-probs that the trainer computed before the update; None if it computed none."""
    advantages: npt.NDArray[np.float32] | None
    """[n]: advantages; None if they are not known before the update."""
    versions: npt.NDArray[np.int32]
    """[n]: versions of the weights that sampled the tokens."""
    reads: list[dict[str, Any]] = field(default_factory=list)
    """What the model read between its turns: `text`, and the index `at` of the sampled token after it."""


def part_name(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the file name of a part with these rows."""
    return f"steps-{rows[0]['step']:06}-{rows[-1]['step']:06}.parquet"


def parts_of(folder: Path) -> list[tuple[Path, int, int]]:
    """Return the parts of a folder in the order of their steps, each with its first and last step."""
    found = [(path, match) for path in folder.glob("*.parquet") if (match := _NAME.fullmatch(path.name))]
    return sorted(((path, int(match[1]), int(match[2])) for path, match in found), key=lambda part: part[1:])


def cut_back_parts(folder: Path, step: int) -> None:
    """Delete the samples of steps after `step`."""
    for path, first, last in parts_of(folder):
        if last <= step:
            continue
        rows = [row for row in read_part(path) if row["step"] <= step] if first <= step else []
        if rows:
            write_part(path.with_name(part_name(rows)), rows)
        path.unlink()


def read_part(path: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of a part, with the given `columns` as far as it has them, or with all.

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
            "reads": pa.list_(pa.struct({"at": pa.int32(), "text": pa.string()})),
        }
    )


def _stored(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row in the form of the schema, with texts that UTF-8 can encode."""
    rewards = [{"name": name, "value": value} for name, value in row["rewards"].items()]
    reads = [{**read, "text": encodable(read["text"])} for read in row.get("reads") or ()]
    return {name: encodable(value) for name, value in row.items()} | {"rewards": rewards, "reads": reads}


def encodable(value: Any) -> Any:
    """Return a text, or a list of texts, with lone surrogates escaped; any other value unchanged."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [encodable(item) for item in value]
    return value
