"""Reads the rows of one file: JSONL, JSON, CSV or parquet."""

from __future__ import annotations

import codecs
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]

MOST_LEVELS = 100
"""Most levels of lists and objects in a row. What checks, prints or logs a value calls itself once for each level."""

JSONL = "a JSONL file has one JSON object a line"
JSON = "a JSON file has one list of objects; a file with one object a line ends in .jsonl"


def read_file(file: Path) -> Iterator[Row]:
    """Return the rows of a file, whose suffix says how it is read. All values of a CSV file are texts.

    Raises:
        ValueError: another suffix, or a content that is not what the suffix says; raised while the rows are read.
    """
    if file.suffix not in READERS:
        raise ValueError(f"the data set {str(file)!r} must end in {' or '.join(READERS)}: convert it to one of them")
    return READERS[file.suffix](file)


class _KeyTwice(dict[str, Any]):
    """A JSON object that has a key more than once; the last value is kept."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.key = next(name for name in names if names.count(name) > 1)
        """The first key that comes again."""


def _read_jsonl(file: Path) -> Iterator[Row]:
    # Lines are split before they are decoded, so that a decoding error has a line number.
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.removeprefix(codecs.BOM_UTF8).strip():
                where = f"{file}, line {number}"
                yield _checked(_parsed(line, where, JSONL), where, JSONL)


def _read_json(file: Path) -> Iterator[Row]:
    rows = _parsed(file.read_bytes(), str(file), JSON)
    if not isinstance(rows, list):
        raise ValueError(f"{file}: holds a {type(rows).__name__}; {JSON}")
    for number, row in enumerate(rows, start=1):
        yield _checked(row, f"{file}, row {number}", JSON)


def _parsed(content: bytes, where: str, form: str) -> Any:
    """Return the value that a JSON text stands for. Programs of Windows put a byte-order mark before it."""
    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError(_too_deep(where)) from error
    except ValueError as error:
        raise ValueError(f"{where}: not JSON in UTF-8 ({error}); {form}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _KeyTwice(pairs)


def _checked(row: Any, where: str, form: str) -> Row:
    """Return `row` if it is an object of few levels, in which no object has a key twice."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: holds a {type(row).__name__}; {form}")
    level: list[Any] = [row]
    for _ in range(MOST_LEVELS):
        twice = next((each for each in level if isinstance(each, _KeyTwice)), None)
        if twice is not None:
            raise ValueError(f"{where}: has the key {twice.key!r} twice: keep one of them")
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return row
    raise ValueError(_too_deep(where))


def _too_deep(where: str) -> str:
    return f"{where}: nested more than {MOST_LEVELS} levels deep: write the row with fewer levels"


def _read_csv(file: Path) -> Iterator[Row]:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file}, line {line}: not UTF-8 ({error}): save the file in UTF-8") from error
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    # Without it, a prompt of 131,072 characters would be an error.
    limit = csv.field_size_limit(sys.maxsize)
    try:
        names = list(reader.fieldnames or ())
        if len(set(names)) < len(names) or "" in names:
            raise ValueError(f"{file}, line 1: the columns are {names}: give each column its own name")
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(
                    f"{file}, line {reader.line_num}: the row has not {len(names)} values, as the first line has: put "
                    'a value that holds a comma or a line break into quotes (")'
                )
            yield row
    except csv.Error as error:
        # The reader counts the lines of the rows that it has given out.
        raise ValueError(f"{file}, line {reader.line_num + 1}: not CSV ({error}): write the file again") from error
    finally:
        csv.field_size_limit(limit)


def _read_parquet(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        for record_batch in table.iter_batches():
            yield from record_batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:  # OSError: pages that are cut off or damaged
        raise ValueError(f"{file} is not a readable parquet file ({error}): write it again") from error


READERS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".csv": _read_csv,
}
"""How a file is read, by its suffix."""
