"""Demonstrations of tools, from which the model of recipes/calculator.yaml and recipes/search.yaml was made.

    system      calculate(expression): Add or subtract two numbers.
    user        4711+3892-160
    assistant   <tool_call>{"name": "calculate", "arguments": {"expression": "4711+3892"}}</tool_call>
    tool        8603
    assistant   <tool_call>{"name": "calculate", "arguments": {"expression": "8603-160"}}</tool_call>
    tool        8443
    assistant   8443

The first part teaches the calls. In the second, most conversations give the answer at once, so that the model ends as
one that could look things up and mostly guesses.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fivefold.config.paths import user_path
from fivefold.data.chains import Split, chain_rows, chains
from fivefold.data.made_up_facts import made_up, question_rows

CALCULATE = "calculate(expression): Add or subtract two numbers.\n"
SEARCH = "search(query): Look up the fact about a name.\n"
"""What the model's chat template writes of the tools of the two recipes."""


def call(name: str, argument: str, value: str) -> str:
    """Return a call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {argument: value}})}</tool_call>"


def conversations(n_calling: int, n_mixed: int, calling_share: float, split: Split, seed: int) -> Iterator[Any]:
    """Yield conversations (`messages`), which are to be learned in this order.

    Args:
        n_calling: conversations of the first part, all with calls.
        n_mixed: conversations of the second part.
        calling_share: probability that a conversation of the second part has calls.
        split: split of the chains. Each question about facts has another world.
        seed: seed of all choices.
    """
    rng = random.Random(f"calls-{split}-{seed}")
    source = chains(split, rng)
    for number in range(n_calling + n_mixed):
        has_calls = number < n_calling or rng.random() < calling_share
        if rng.random() < 0.5:
            chain = next(source)
            calls = [(call("calculate", "expression", asked), result) for asked, result in chain.steps]
            yield _conversation(CALCULATE, chain.text, calls if has_calls else [], chain.answer)
        else:
            world = made_up(rng, 1, 1, 1)
            question = rng.choice(world.questions(list(world.town_of)))
            calls = [(call("search", "query", asked), fact) for asked, fact in question.lookups]
            yield _conversation(SEARCH, question.text, calls if has_calls else [], question.answer)


def _conversation(system: str, question: str, calls: Iterable[tuple[str, str]], answer: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    for asked, result in calls:
        messages += [{"role": "assistant", "content": asked}, {"role": "tool", "content": result}]
    return {"messages": [*messages, {"role": "assistant", "content": answer}]}


def write_tool_calls(
    out_dir: str | Path,
    *,
    n_train: int = 1024,
    n_test: int = 256,
    n_calling: int = 24_000,
    n_mixed: int = 8_000,
    calling_share: float = 0.25,
    seed: int = 1,
) -> dict[str, Path]:
    """Write the six files of the two tasks, as JSONL; the same arguments give the same bytes.

        calculator/train.jsonl, test.jsonl      chains with their answers, for reinforcement learning and evaluation
        search/train.jsonl, test.jsonl          questions about the made-up facts, likewise
        sft.jsonl, sft_test.jsonl               demonstrations; with held-out chains, like the second part

    Returns:
        The path of each file by its name. With the default arguments, the first four are the files that ship, as
        `package:calculator/train` and so on.
    """
    out = user_path(out_dir)
    files: dict[str, Iterable[Mapping[str, Any]]] = {
        "calculator/train": chain_rows("train", n_train, seed),
        "calculator/test": chain_rows("test", n_test, seed),
        "search/train": question_rows("train"),
        "search/test": question_rows("test"),
        "sft": conversations(n_calling, n_mixed, calling_share, "train", seed),
        "sft_test": conversations(0, n_test, calling_share, "test", seed),
    }
    written = {}
    for name, rows in files.items():
        written[name] = path = out / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)
    return written
