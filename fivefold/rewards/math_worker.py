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

MEMORY_BYTES = 2 << 30
"""Address space of a process, in bytes. An integer that needs more raises MemoryError; the answer then is wrong."""

ANSWERS_FAULT = {signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT}
"""Signals that end a fork if a comparison takes too long, recurses too deep for C, or runs out of memory in C."""

_WARM_UP = r"$x^2$ is \boxed{\frac{1}{2}}"
"""An answer that is compared before the first fork, so that all forks have the parser's tables filled."""

_BOX = "\\boxed{"
_MATH_DELIMITER = re.compile(r"(?<!\\)\$")
"""A dollar sign that begins or ends mathematics; `\\$` is an amount of money."""
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
    parsed = [answer for gold in golds for answer in parse(_as_answer(gold), parsing_timeout=None)]
    if not parsed:
        return {
            "error": f"the ground truth {golds!r} holds no mathematical answer: give a number or a LaTeX expression"
        }
    extraction = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    answer = parse(last_box(response) or response, extraction, parsing_timeout=None)
    return {"equal": verify(parsed, answer, timeout_seconds=None)}


def last_box(text: str) -> str | None:
    """Return the last complete `\\boxed{...}` of a text; math-verify would join neighbouring boxes to one set."""
    start = text.rfind(_BOX)
    while start >= 0:
        depth = 0
        for brace in _BRACE_OR_ESCAPE.finditer(text, start + len(_BOX) - 1):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                return text[start : brace.end()]
        start = text.rfind(_BOX, 0, start)
    return None


def _as_answer(gold: str) -> str:
    """Put bare LaTeX in a box, because math-verify recognises LaTeX only inside a box or between dollar signs."""
    return gold if "\\boxed" in gold or _MATH_DELIMITER.search(gold) else f"\\boxed{{{gold}}}"


if __name__ == "__main__":
    sys.exit(main())
