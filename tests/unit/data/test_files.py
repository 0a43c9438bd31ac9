"""Files of rows: what is read from each format, and what is refused, with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from fivefold.config.schema.data import DatasetConfig
from fivefold.data.rows import load_rows

ROWS = [{"question": '1 + 1, "twice"\n=', "answer": "4"}, {"question": "é", "answer": ""}]
JSON = json.dumps(ROWS, ensure_ascii=False)
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
CSV = 'question,answer\r\n"1 + 1, ""twice""\n=",4\r\n\r\né,\r\n'


def rows_of(tmp_path: Path, name: str, content: bytes, **options: Any) -> list[dict[str, Any]]:
    (tmp_path / name).write_bytes(content)
    return load_rows(DatasetConfig(path=str(tmp_path / name), **options))


@pytest.mark.parametrize(("name", "text"), [("a.json", JSON), ("a.jsonl", JSONL), ("a.csv", CSV)])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_text_formats_are_read_with_and_without_a_byte_order_mark(
    tmp_path: Path, name: str, text: str, encoding: str
) -> None:
    assert rows_of(tmp_path, name, text.encode(encoding)) == ROWS
    assert rows_of(tmp_path, name, text.encode(encoding), limit=1) == ROWS[:1]


def test_a_value_of_a_csv_file_may_be_long(tmp_path: Path) -> None:
    text = "x" * 200_000
    assert rows_of(tmp_path, "a.csv", f"prompt,answer\n{text},1\n".encode()) == [{"prompt": text, "answer": "1"}]


def nested(levels: int) -> bytes:
    """Return a row of so many levels."""
    return b'{"a": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def test_a_row_of_a_hundred_levels_is_read(tmp_path: Path) -> None:
    assert len(rows_of(tmp_path, "a.jsonl", nested(100))) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\nnonsense\n', "line 2: not JSON in UTF-8"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n', "line 2: not JSON in UTF-8 .*can't decode byte 0xe9"),
        ("a.jsonl", b'{"a": ' + b"9" * 5000 + b"}\n", "line 1: not JSON in UTF-8 .*digits"),
        ("a.jsonl", b"[1, 2]\n", "line 1: holds a list"),
        ("a.jsonl", b"{}\n" + nested(101), "line 2: nested more than 100 levels deep"),
        ("a.jsonl", b"{}\n" + nested(3000), "line 2: nested more than 100 levels deep"),
        ("a.json", b"[" + nested(3000) + b"]", r"a\.json(, row 1)?: nested more than 100 levels deep"),
        ("a.json", b"[{}, " + nested(101) + b"]", "a.json, row 2: nested more than 100 levels deep"),
        ("a.json", b'{"a": 1}', "a.json: holds a dict; a JSON file has one list of objects"),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', "not JSON .*; a JSON file has .* with one object a line ends in .jsonl"),
        ("a.json", b'[{"a": 1}, 2]', "row 2: holds a int"),
        ("a.json", b'[{"a": 1}, {"a": 1, "b": 2, "a": 3}]', "a.json, row 2: has the key 'a' twice"),
        ("a.jsonl", b'{}\n{"c": [{"b": 1, "b": 1}]}\n', "a.jsonl, line 2: has the key 'b' twice"),
        ("a.csv", b"a,b\n", "has no rows"),
        ("a.csv", b"a,a\n1,2\n", r"line 1: the columns are \['a', 'a'\]"),
        ("a.csv", b"a,b\n1,2\n3\n", "line 3: the row has not 2 values"),
        ("a.csv", b"a,b\n1,2\n3,4,5\n", "line 3: the row has not 2 values"),
        ("a.csv", b'a,b\n1,2\n"3,4\n', "line 3: not CSV"),
        ("a.csv", b"a,b\n1,2\n3,\xe9\n", "line 3: not UTF-8"),
        ("a.parquet", b"not parquet", "not a readable parquet file"),
        ("a.txt", b"a,b\n", "must end in .jsonl or .parquet or .json or .csv"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_its_place(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path, name, content)


def test_a_parquet_file_with_a_damaged_page_is_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"a": [f"row {i}" for i in range(100)]}), tmp_path / "a.parquet")
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[4:20] = b"\xff" * 16  # the header of the first page
    with pytest.raises(ValueError, match=r"a\.parquet is not a readable parquet file"):
        rows_of(tmp_path, "a.parquet", bytes(content))


def test_a_home_folder_that_does_not_exist_is_told() -> None:
    with pytest.raises(ValueError, match=r"~no-such-user/rows\.jsonl: there is no home folder"):
        load_rows(DatasetConfig(path="~no-such-user/rows.jsonl"))
