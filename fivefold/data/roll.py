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
SCORES: Mapping[str, str] = {
    "iou_max_label_first": "by_label",
    "iou_max_iou_first": "by_overlap",
    "iou_completeness": "completeness",
    "map": "map",
    "map50": "map50",
    "map75": "map75",
}
"""Weights of the scores of boxes by ROLL's names."""
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
        tag = str(row.get("tag") or row.get("data_source") or "")
        extra_info: dict[str, Any] = {"tag": tag, "id": str(row.get("id") or ""), **_of_reward(row)}
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
        return row["reward_model"]["ground_truth"] if "reward_model" in row else row.get("ground_truth")
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


def _of_reward(row: Row) -> dict[str, Any]:
    """Return what a row says of how its boxes are scored, as the reward `detection` reads it."""
    reward = row.get("reward_model")
    ratios = (reward.get("verifier_parm") or {}).get("det_reward_ratio") if isinstance(reward, Mapping) else None
    if not isinstance(reward, Mapping) or not isinstance(ratios, Mapping) or not any(ratios.values()):
        return {}
    # ROLL takes a weight outside of 0 to 1 for 0.
    own: dict[str, Any] = {
        to: value if isinstance(value := ratios.get(name), int | float) and 0 <= value <= 1 else 0.0
        for name, to in SCORES.items()
    }
    for name, to in (("accuracy_ratio", "accuracy_weight"), ("format_ratio", "format_weight")):
        if (value := reward.get(name)) is not None:
            own[to] = value
    if reward["verifier_parm"].get("det_verifier_normalized") is False:
        own["pixels_per_token"] = None
    return {"detection": own}


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
