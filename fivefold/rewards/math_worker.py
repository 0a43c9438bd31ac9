"""The process in which math-verify compares answers: JSON lines in, JSON lines out (see `math_reward`)."""

from __future__ import annotations

import json
import logging
import re
import resource
import signal
import sys
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

MEMORY_BYTES = 4 << 30
"""Address space of the process: a big integer that needs more raises MemoryError, which counts as unequal."""

_BOX = "\\boxed{"
_BRACE_OR_ESCAPE = re.compile(r"\\.|[{}]", re.DOTALL)


def main() -> None:
    """Answer jobs until the pipe closes; SIGALRM's default action ends the process when a job's time is over."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    if hard_limit == resource.RLIM_INFINITY or hard_limit > MEMORY_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard_limit))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    replies, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed must not get between the replies
    for line in sys.stdin:
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, job["timeout_s"])
        reply = compare(job["response"], job["golds"])
        signal.setitimer(signal.ITIMER_REAL, 0)
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
    main()
