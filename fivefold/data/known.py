"""Data sets whose columns are neither prompts nor conversations, for the recipe's `reader`.

    path: nvidia/HelpSteer3:preference               path: rajpurkar/squad
    reader: fivefold.data.known:helpsteer3           reader: fivefold.data.known:squad

A path is a name on the hub, or a file or folder with the same columns.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.data.files import Row
from fivefold.data.rows import read_path


def helpsteer3(path: str, split: str | None) -> Iterator[Row]:
    """Yield pairs of answers to a conversation: `prompt`, `chosen`, `rejected`.

    Pairs without a preference have the same answer twice, so that they count in a batch and teach nothing.

    Args:
        path: where the rows are, with `context`, `response1`, `response2` and `overall_preference`, which is below 0 if
            the first response is better.
        split: the split.
    """
    for row in read_path(path, split):
        first, second, preference = row["response1"], row["response2"], row["overall_preference"]
        context = row["context"]
        yield {
            "prompt": [{"role": "user", "content": context}] if isinstance(context, str) else list(context),
            "chosen": second if preference > 0 else first,
            "rejected": second if preference < 0 else first,
        }


def squad(path: str, split: str | None) -> Iterator[Row]:
    """Yield conversations, `messages`: the passage as the system's message, the question, and the first answer.

    Args:
        path: where the rows are, with `context`, `question` and `answers`, a mapping with a list of `text`.
        split: the split.
    """
    for row in read_path(path, split):
        yield {
            "messages": [
                {"role": "system", "content": row["context"]},
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answers"]["text"][0]},
            ]
        }
