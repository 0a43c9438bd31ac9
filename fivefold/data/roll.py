"""Rows in ROLL's schema, for the recipe's `reader`: tags become data sources, and tests of programs ground truths.

{"tag": "KodCode", "messages": "[...]", "ground_truth": "", "case_type": "pytest", "test_cases": "[...]", ...}

    reader: fivefold.data.roll:rows
    reader_kwargs: {domains: {KodCode: code}}      data_source: code, ground_truth: {"asserts": [...]}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fivefold.data.files import Row, read_file
from fivefold.json_text import parsed

OTHERWISE = "math_rule"
"""The domain of a row whose tag belongs to none."""
TEST_FUNCTION = re.compile(r"^\s*def (test_\w*)\(", re.MULTILINE)


def rows(path: str, split: str | None, domains: Mapping[str, str]) -> Iterator[Row]:
    """Yield the rows of a file, with `data_source`, `ground_truth` and `extra_info` as rewards read them.

    Args:
        path: JSONL, JSON, CSV or parquet file.
        split: no file has any.
        domains: the data source by tag. A column `domain` comes before it, and `math_rule` is for other tags.

    Raises:
        ValueError: a split, or tests of another form.
    """
    if split is not None:
        raise ValueError(f"{path} is one file, which has no split {split!r}: drop split")
    for number, row in enumerate(read_file(Path(path).expanduser()), start=1):
        tag = str(row.get("tag") or "")
        extra_info: dict[str, Any] = {"tag": tag, "id": str(row.get("id") or "")}
        with suppress(TypeError, ValueError):
            extra_info["difficulty"] = float(row["difficulty"]) if "difficulty" in row else 0.0
        try:
            truth = _ground_truth(row)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, row {number}: the tests have another form: {error}") from error
        source = row.get("domain") or domains.get(tag, OTHERWISE)
        yield {**row, "data_source": source, "ground_truth": truth, "extra_info": extra_info}


def _ground_truth(row: Row) -> Any:
    """Return what rewards compare answers with: of a task in programming, the tests as the reward `code` reads them."""
    kind = row.get("case_type")
    if not kind:
        return row.get("ground_truth")
    cases = row["test_cases"]
    cases = parsed(cases) if isinstance(cases, str) else cases
    match kind:
        case "assert" | "pytest":
            return {"asserts": [_with_calls(case["assert_code"]) for case in cases]}
        case "check_based":
            return {"asserts": _checks(cases[0])}
        case "text":
            raise ValueError("case_type=text tests a response as a text, which the reward code does not: drop the row")
        case _:
            return _calls(cases, row.get("test_case_function"))


def _with_calls(text: str) -> str:
    """Return a test with calls of the test functions that it defines."""
    return "\n".join([text, *(f"{name}()" for name in TEST_FUNCTION.findall(text))])


def _checks(case: Mapping[str, Any]) -> list[str]:
    """Return a test for each line behind the first one of a function `check`, which gets what the program defines."""
    if str(case.get("import_prefix") or "").strip():
        raise ValueError("import_prefix comes before a program: write it as reward.kwargs.preamble, and drop it here")
    head, *lines = [line for line in case["assert_code"].split("\n") if line]
    call = f"check({case.get('entry_point', 'candidate')})"
    return ["\n".join([head, line, call]) for line in lines] or [f"{head}\n{call}"]


def _calls(cases: Sequence[Mapping[str, Any]], function: Any) -> dict[str, Any]:
    inputs, outputs = [case["stdin"] for case in cases], [case["expected_stdout"] for case in cases]
    if function in (None, "", "None"):
        return {"inputs": inputs, "outputs": outputs}
    arguments = [[parsed(line) for line in text.split("\n")] for text in inputs]
    return {"fn_name": function, "inputs": arguments, "outputs": [parsed(text) for text in outputs]}
