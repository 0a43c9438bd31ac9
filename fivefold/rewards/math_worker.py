"""The process in which math-verify compares answers: it reads and writes JSON lines (see `math_reward`).

It imports math-verify once, and a fork of it does the jobs. When the kernel ends a fork, because a job's time is over
or because SymPy has crashed, the next fork takes its place within milliseconds.

It is started by its file name, because a module of the package would import the package first, and with it torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from typing import Any, TextIO

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from mpmath import mpf
from sympy import Expr

MEMORY_BYTES = 2 << 30
"""Address space of a process, in bytes. An integer that needs more raises MemoryError; the answer then is wrong."""

ANSWERS_FAULT = {signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT}
"""Signals that end a fork if a comparison takes too long, recurses too deep for C, or runs out of memory in C."""

_WARM_UP = r"$x^2$ is \boxed{\frac{1}{2}}"
"""An answer that is compared before the first fork, so that all forks have the parser's tables filled."""

_BOX = "\\boxed{"
_MATH_DELIMITER = re.compile(r"(?<!\\)\$")
"""A dollar sign that begins or ends mathematics; `\\$` is an amount of money."""
_RELATIVE = 1.1e-6
"""Relative difference up to which two numbers are equal, so that 0.333333 is 1/3."""
_BASE = re.compile(r"_\s*(\d+)$")
"""The base of a number such as `101_2`."""
_WORD = re.compile(r"[A-Za-z]{4,}")
"""A word, which is no product of variables."""
_UNIT = re.compile(r"-?\$?[\d][\d.,:/ ]*((?:\\?[A-Za-z]+[ ^\d/]*)+)$")
"""A number and its unit, of one word or several."""
_LETTERS = re.compile(r"[A-Za-z]+")
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textrm|textbf|mathbf|mbox|operatorname)\b|\\[ ,;:!]")
_BRACE_OR_ESCAPE = re.compile(r"\\.|[{}]", re.DOTALL)


def main() -> int:
    """Answer jobs until the pipe closes; return the exit status.

    A job is `{"response", "golds", "timeout_s"}`. A reply is the result of `compare`, or `{"equal": None}` if the
    kernel ended the fork.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    if hard_limit == resource.RLIM_INFINITY or hard_limit > MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard_limit))
    # This process may have inherited that both are ignored. With SIGCHLD ignored, the kernel forgets how a fork ended.
    for number in (signal.SIGPROF, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    replies, sys.stdout = sys.stdout, sys.stderr  # nothing else that is printed may come between the replies
    compare(_WARM_UP, ["0.5"])
    while (status := _fork(replies)) < 0:
        if -status not in ANSWERS_FAULT:
            return 128 - status
        _reply({"equal": None}, replies)
    return status


def _fork(replies: TextIO) -> int:
    """Let a fork answer jobs; return its exit status, or the negative of the signal that ended it."""
    child = os.fork()
    if child == 0:
        _answer_jobs(replies)
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _answer_jobs(replies: TextIO) -> None:
    # A job is sent only after the reply to the one before, so that no job is in this process's buffer when it ends.
    for line in sys.stdin:
        job = json.loads(line)
        # Processor time is limited, so that a reward does not depend on how busy the machine is.
        signal.setitimer(signal.ITIMER_PROF, job["timeout_s"])
        reply = compare(job["response"], job["golds"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(reply, replies)


def _reply(reply: dict[str, Any], replies: TextIO) -> None:
    print(json.dumps(reply), file=replies, flush=True)


def compare(response: str, golds: list[str]) -> dict[str, Any]:
    """Return `{"equal": bool}`, or `{"error": str}` if `golds` hold no answer."""
    parsed = {gold: parse(_as_answer(gold), parsing_timeout=None) for gold in golds}
    if not any(parsed.values()):
        return {
            "error": f"the ground truth {golds!r} holds no mathematical answer: give a number or a LaTeX expression"
        }
    extraction = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    box = last_box(response)
    text = response if box is None else box
    answer = parse(text, extraction, parsing_timeout=None)
    return {
        "equal": any(
            verify(of_gold, answer, timeout_seconds=None) and not _differ(of_gold, gold, answer, box)
            for gold, of_gold in parsed.items()
        )
    }


def last_box(text: str) -> str | None:
    """Return the last `\\boxed{...}` of a text; math-verify would join neighbouring boxes to one set.

    It is empty if the text ends within it, such as at the limit of tokens: there is no final answer then. None: the
    text has no box.
    """
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 0
    for brace in _BRACE_OR_ESCAPE.finditer(text, start + len(_BOX) - 1):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : brace.end()]
    return ""


def _differ(of_gold: list[Any], gold: str, of_answer: list[Any], box: str | None) -> bool:
    """Return whether an answer that math-verify takes for equal has another value.

    math-verify rounds numbers to 6 places whatever their size, drops bases and units, and reads a word as a product.
    """
    numbers = [_number(parsed[0]) for parsed in (of_gold, of_answer)]
    if None not in numbers:
        mine, other = numbers
        scale = max(abs(mine), abs(other))
        percent = scale * _RELATIVE
        # A percentage is the same with and without its sign.
        if all(abs(mine * factor - other) > max(percent, percent * factor) for factor in (1, 100, mpf(1) / 100)):
            return True
    mine_text, other_text = _content(gold), str(of_answer[-1]) if box is None else _content(box)
    bases = [_BASE.search(text) for text in (mine_text, other_text)]
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return True
    if _WORD.fullmatch(mine_text) and _WORD.fullmatch(other_text):
        return mine_text.casefold() != other_text.casefold()
    units = [_UNIT.match(text) for text in (mine_text, other_text)]
    if units[0] and units[1]:
        words = [[word.casefold() for word in _LETTERS.findall(unit[1])] for unit in units if unit]
        return not any(_abbreviates(a, b) or _abbreviates(b, a) for a in words[0] for b in words[1])
    return False


def _number(parsed: Any) -> Any:
    """Return the value of a real number to 30 digits; None: it is something else."""
    if not isinstance(parsed, Expr) or parsed.free_symbols or not parsed.is_number:
        return None
    value = parsed.evalf(30)
    return mpf(value._mpf_) if value.is_Float else None


def _content(text: str) -> str:
    """Return what stands in a box or between dollar signs, without commands for text and font."""
    text = text.strip().strip("$")
    if text.startswith(_BOX):
        text = text[len(_BOX) : -1]
    return re.sub(r"\s+", " ", re.sub(r"[{}.]", "", _TEXT_COMMAND.sub(" ", text))).strip()


def _abbreviates(short: str, word: str) -> bool:
    """Return whether the letters of `short` occur in `word` in their order, from its first letter on."""
    letters = iter(word)
    return short[0] == word[0] and all(letter in letters for letter in short)


def _as_answer(gold: str) -> str:
    """Put bare LaTeX in a box, because math-verify recognises LaTeX only inside a box or between dollar signs."""
    return gold if "\\boxed" in gold or _MATH_DELIMITER.search(gold) else f"\\boxed{{{gold}}}"


if __name__ == "__main__":
    sys.exit(main())
