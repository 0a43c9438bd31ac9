"""Questions whose answers may use one tool: what stands between its tags goes there, and an answer without is judged.

    What is 7^9? ... ─> <code>print(7**9)</code> ─> Result: 40353607 ─> It is \\boxed{40353607}. ─> reward

A row says which tool, and how often it may be used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import urllib3

from fivefold.config.problems import did_you_mean
from fivefold.data.files import Row
from fivefold.data.rows import read_path
from fivefold.environments.agents.python_tool import check_python, run_program
from fivefold.rewards.exact_match import ExactMatch
from fivefold.rewards.math_reward import MathReward
from fivefold.rewards.sandbox.runner import Sandbox

NO_MORE = "The tool cannot be used again: give the final answer."
ANSWER_TAGS = r"(?s)<answer>(.*?)</answer>"
TIMEOUT_S, N_DOCUMENTS = 5.0, 3


def run_code(code: str, options: Mapping[str, Any]) -> str:
    """Run a Python program in the sandbox of the tool `python`."""
    return f"Result: {run_program(code, Sandbox(timeout_s=float(options.get('timeout_s') or TIMEOUT_S)))}"


def search(query: str, options: Mapping[str, Any]) -> str:
    """Ask a retrieval service as GEM does, with MessagePack: {query, topk, return_scores} -> {result: [{document}]}."""
    import msgpack  # type: ignore[import-untyped]  # comes with Ray, and only a search needs it

    body = {"query": query, "topk": int(options.get("n_documents") or N_DOCUMENTS), "return_scores": True}
    url, timeout = str(options["search_url"]), float(options.get("timeout_s") or TIMEOUT_S)
    reply = urllib3.request("POST", url, body=msgpack.packb(body), retries=False, timeout=timeout)
    if reply.status != 200:
        raise ValueError(f"{url} answered with status {reply.status}: {reply.data[:200]!r}")
    texts = [str(each["document"]["contents"]) for each in msgpack.unpackb(reply.data)["result"]]
    documents = (f"Document {number} ({title}): {text}" for number, (title, _, text) in _numbered(texts))
    return "<information>\n" + "\n".join(documents) + "\n</information>"


def _numbered(texts: list[str]) -> Iterator[tuple[int, tuple[str, str, str]]]:
    return enumerate((text.partition("\n") for text in texts), start=1)


@dataclass(frozen=True)
class Tool:
    """A tool, its tags, what the model reads of it, and how an answer is judged."""

    use: Callable[[str, Mapping[str, Any]], str]
    tags: re.Pattern[str]
    """What goes to the tool is the first group that takes part."""
    instructions: str
    judge: Callable[..., float]


TOOLS: Mapping[str, Tool] = {
    "code": Tool(
        run_code,
        re.compile(r"<code>(.*?)</code>|```\n?python(.*?)```", re.DOTALL),
        "You may run Python programs: write one between <code> and </code>, and print what you want to see. You then "
        "read its output, and continue. Programs have no network, and each needs its own imports.",
        MathReward(),
    ),
    "search": Tool(
        search,
        re.compile(r"<search>(.*?)</search>", re.DOTALL),
        "You may search for what you do not know: write a query between <search> and </search>. You then read what "
        "was found between <information> and </information>. Give the final answer between <answer> and </answer>.",
        ExactMatch(pattern=ANSWER_TAGS, plain_words=True),
    ),
}


def rows(
    path: str, split: str | None, tool: str, question_key: str = "question", answer_key: str = "answer", **options: Any
) -> Iterator[Row]:
    """Yield a data set's rows with a tool, as a recipe's `reader`.

    Args:
        path: where the rows are.
        split: the split.
        tool: a name of `TOOLS`.
        question_key: column of the question.
        answer_key: column of the right answer.
        options: what `TaggedTool.reset` reads besides.

    Raises:
        ValueError: there is no such tool, or it lacks `search_url`.
    """
    if tool not in TOOLS:
        raise ValueError(f"tool={tool!r} is none of {', '.join(TOOLS)}{did_you_mean(tool, TOOLS)}")
    if tool == "search" and not options.get("search_url"):
        raise ValueError("tool=search asks a service: add search_url, such as http://localhost:8000/retrieve")
    if tool == "code":
        check_python()
    for row in read_path(path, split):
        yield {
            "data_source": path,
            "prompt": row[question_key],
            "reward_model": {"style": "rule", "ground_truth": row[answer_key]},
            "extra_info": {"tool": tool, **options},
        }


class TaggedTool:
    """Answers with what a tool says as long as it is used, then judges the answer: 1 for a right one."""

    def reset(self, ground_truth: Any, extra_info: Mapping[str, Any]) -> str:
        """Begin with a row, and return how its tool is used.

        Args:
            ground_truth: the right answer.
            extra_info: `tool`, a name of `TOOLS`; `max_uses`, 5 unless given; `tool_reward` and `success_reward`, for
                each use and for one without an error; `timeout_s` of one; for searches, `search_url` and `n_documents`.
        """
        self._truth, self._options = ground_truth, extra_info
        self._tool, self._uses = TOOLS[str(extra_info["tool"])], 0
        return self._tool.instructions

    def step(self, move: str) -> tuple[str, float, bool]:
        """Use the tool, or judge the answer; return the observation, the reward, and whether the game is over."""
        found = self._tool.tags.search(move)
        most = int(self._options.get("max_uses") or 5)
        if found is None or self._uses >= most:
            reward = self._tool.judge(move, self._truth, data_source="", extra_info={})
            return "", float(reward), True
        self._uses += 1
        text = next(group for group in found.groups() if group is not None).strip()
        reward = float(self._options.get("tool_reward") or 0.0)
        shown = self._tool.use(text, self._options)
        if "Traceback (most recent call last)" not in shown:
            reward += float(self._options.get("success_reward") or 0.0)
        return shown if self._uses < most else f"{shown}\n\n{NO_MORE}", reward, False
