"""The process in which math-verify compares answers: JSON lines in, JSON lines out (see `math_reward`).

It imports math-verify once and leaves the jobs to a fork of itself. A fork that the kernel ends, because a job's time
is over or because SymPy has crashed, is replaced by the next one within milliseconds.

Started by its file name: a module of the package would first import the package, and with it torch.
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
"""Address space of a process: a big integer that needs more raises MemoryError, which counts as unequal."""

ANSWERS_FAULT = {signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT}
"""What ends the fork when a comparison outlasts its time, recurses too deep for C, or runs out of memory in C."""

_WARM_UP = r"$x^2$ is \boxed{\frac{1}{2}}"
"""An answer to compare before the first fork: the parser's tables, once filled, are those of all forks."""

_BOX = "\\boxed{"
_BRACE_OR_ESCAPE = re.compile(r"\\.|[{}]", re.DOTALL)


def main() -> int:
    """Answer jobs until the pipe closes; returns the exit status.

    A job is `{"response", "golds", "timeout_s"}`, a reply what `compare` returns, or `{"equal": None}` if the fork was
    ended instead.
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    if hard_limit == resource.RLIM_INFINITY or hard_limit > MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard_limit))
    # Both may have been inherited as ignored; with SIGCHLD ignored, the kernel forgets how a fork ended.
    for number in (signal.SIGPROF, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    replies, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed must not get between the replies
    compare(_WARM_UP, ["0.5"])
    while (status := _fork(replies)) < 0:
        if -status not in ANSWERS_FAULT:
            return 128 - status
        _reply({"equal": None}, replies)
    return status


def _fork(replies: TextIO) -> int:
    """Let a fork answer jobs; returns its exit status, or the negative of the signal that ended it."""
    child = os.fork()
    if child == 0:
        _answer_jobs(replies)
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _answer_jobs(replies: TextIO) -> None:
    # A job is sent after the reply to the one before, so none is lost in this process's buffer when it ends.
    for line in sys.stdin:
        job = json.loads(line)
        # Processor time: what an answer earns must not depend on how busy the machine is.
        signal.setitimer(signal.ITIMER_PROF, job["timeout_s"])
        reply = compare(job["response"], job["golds"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(reply, replies)


def _reply(reply: dict[str, Any], replies: TextIO) -> None:
    print(json.dumps(reply), file=replies, flush=True)


def compare(response: str, golds: list[str]) -> dict[str, Any]:
    """`{"equal": bool}`, or `{"error": str}` if `golds` hold no answer."""
    parsed = [answer for gold in golds for answer in parse(_as_answer(gold), parsing_timeout=None)]
    if not parsed:
        return {
            "error": f"the ground truth {golds!r} holds no mathematical answer: give a number or a LaTeX expression"
        }
    extraction = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    answer = parse(last_box(response) or response, extraction, parsing_timeout=None)
    return {"equal": verify(parsed, answer, timeout_seconds=None)}


def last_box(text: str) -> str | None:
    """The last whole `\\boxed{...}` of a text: math-verify by itself would join neighbouring boxes to one set."""
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
    """Bare LaTeX is only recognised inside a box or dollar signs."""
    return gold if "\\boxed" in gold or "$" in gold else f"\\boxed{{{gold}}}"


if __name__ == "__main__":
    sys.exit(main())
