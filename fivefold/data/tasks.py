"""Public data sets of mathematics as parquet files in verl's schema, from a hub or from files that were downloaded.

{"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "..."}], "ability": "math",
 "reward_model": {"style": "rule", "ground_truth": "72"}, "extra_info": {"split": "train", "index": 0, ...}}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.config.paths import user_path
from fivefold.config.schema.data import RowsConfig
from fivefold.data.files import Row
from fivefold.data.rows import load_rows, require_column

BOXED = "Let's think step by step and output the final answer within \\boxed{}."
HASHES = 'Let\'s think step by step and output the final answer after "####".'

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BARE = re.compile(r"[^\s${}]+")
"""The content of a box without braces."""


def after_hashes(solution: str) -> str:
    """Return what stands behind the last `####` of a solution, without commas between digits.

    Raises:
        ValueError: there is nothing behind one.
    """
    answer = solution.rpartition("####")[2].strip().replace(",", "")
    if "####" not in solution or not answer:
        raise ValueError(f"no answer behind #### in {solution[-80:]!r}")
    return answer


def last_boxed(solution: str) -> str:
    """Return what stands in the last box of a solution: `\\boxed{...}` or `\\fbox{...}`, braces nested, or `\\boxed 5`.

    Raises:
        ValueError: there is no box, or its brace is not closed.
    """
    boxes = list(_BOX.finditer(solution))
    start = boxes[-1].end() if boxes else len(solution)
    if not solution.startswith("{", start):
        if bare := _BARE.match(solution, start):
            return bare[0].rstrip(".,")
        raise ValueError(f"no \\boxed{{...}} in {solution[-80:]!r}")
    depth = 0
    for place in range(start, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[place], 0)
        if depth == 0:
            return solution[start + 1 : place]
    raise ValueError(f"the brace of the last box is not closed in {solution[-80:]!r}")


def as_written(answer: str) -> str:
    """Return an answer without blanks around it."""
    return answer.strip()


@dataclass(frozen=True)
class Task:
    """One data set: where it is, which columns it has, and how its answers are written."""

    hub: str
    """Name on the hub, with the configuration if it has several; the `data_source` of the rows is the name alone."""
    question: str
    """Column of the question."""
    answer: str
    """Column from which the answer is taken."""
    extract: Callable[[str], str]
    """Takes the answer from its column."""
    instruction: str
    """Follows the question in the prompt."""
    splits: tuple[str, ...]
    held_out_every: int = 0
    """One of so many rows of `train` is held out as `test`, for a data set without that split; 0: none."""


TASKS = {
    "gsm8k": Task("openai/gsm8k:main", "question", "answer", after_hashes, HASHES, ("train", "test")),
    "math": Task("DigitalLearningGmbH/MATH-lighteval", "problem", "solution", last_boxed, BOXED, ("train", "test")),
    "math500": Task("HuggingFaceH4/MATH-500", "problem", "answer", as_written, BOXED, ("test",)),
    "deepscaler": Task(
        "agentica-org/DeepScaleR-Preview-Dataset", "problem", "answer", as_written, BOXED, ("train",), held_out_every=80
    ),
    "aime24": Task("HuggingFaceH4/aime_2024", "problem", "answer", as_written, BOXED, ("train",)),
}
"""The tasks by the names of `fivefold data`."""


def write_task(name: str, source: str | None, out_dir: str | Path) -> dict[Path, int]:
    """Write a task's splits as parquet files.

    Args:
        name: a key of `TASKS`.
        source: a folder with files that are named after splits, a single file, or a name on the hub or ModelScope;
            None: the task's on the hub.
        out_dir: the folder to write to.

    Returns:
        The rows of each file.

    Raises:
        ValueError: a source that is empty, that cannot be read, that lacks a column, or with an answer that is not
            written as the task's are.
    """
    from datasets import Dataset

    task, out = TASKS[name], user_path(out_dir)
    source = task.hub if source is None else source
    if not source.strip():
        raise ValueError(f"the source {source!r} is empty: give a folder, a file or a name on a hub, or leave it out")
    out.mkdir(parents=True, exist_ok=True)
    is_file = user_path(source).is_file()
    counts = {}
    for split in (user_path(source).stem,) if is_file else task.splits:
        rows = load_rows(RowsConfig(path=source, split=None if is_file else split))
        for column in (task.question, task.answer):
            remedy = f"give the files of {task.hub}, or rename the columns"
            require_column(rows, column, f"fivefold data {name}", source, remedy)
        for part_name, part in _parts(task, list(_converted(task, rows, split, source)), split).items():
            path = out / f"{part_name}.parquet"
            Dataset.from_list(part).to_parquet(path)
            counts[path] = len(part)
    return counts


def _parts(task: Task, rows: list[dict[str, Any]], split: str) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of a split by the file that they go to: itself, and `test` for those that are held out."""
    every = task.held_out_every
    if not every or split not in task.splits or len(rows) < every:
        return {split: rows}
    held_out = rows[every - 1 :: every]
    for row in held_out:
        row["extra_info"]["split"] = "test"
    return {split: [row for row in rows if row["extra_info"]["split"] == split], "test": held_out}


def _converted(task: Task, rows: list[Row], split: str, source: str) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(rows):
        question, answer = str(row[task.question]), str(row[task.answer])
        try:
            truth = task.extract(answer)
        except ValueError as error:
            raise ValueError(f"row {index + 1} of {source!r}, column {task.answer!r}: {error}") from error
        yield {
            "data_source": task.hub.partition(":")[0],
            "prompt": [{"role": "user", "content": f"{question} {task.instruction}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
        }
