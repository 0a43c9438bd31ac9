"""A reward that holds a run back after a checkpoint, so that a test can end the run at a step that it knows."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ANSWER = re.compile(r"(?:^|=)(\d+)$")


def right(response: str, ground_truth: Any, *, hold: str, **_: Any) -> float:
    """Return 1 for a right answer. While the file `hold` names a checkpoint that is complete, do not return."""
    while _is_complete(Path(hold)):
        time.sleep(0.01)
    answer = ANSWER.search(response)
    return float(answer is not None and answer[1] == str(ground_truth))


def _is_complete(hold: Path) -> bool:
    try:
        return Path(hold.read_text(), "manifest.json").exists()
    except FileNotFoundError:
        return False


@contextmanager
def held_after(checkpoint: Path, hold: Path) -> Iterator[None]:
    """Inside the block, runs with `hold` judge no response once the checkpoint in a folder is complete."""
    whole = hold.with_suffix(".new")
    whole.write_text(str(checkpoint))
    whole.rename(hold)
    try:
        yield
    finally:
        hold.unlink()
