"""Reward 1 for a response whose final answer is mathematically equal to the ground truth, else 0.

math-verify extracts the answer (the last `\\boxed{}`, else the last LaTeX, else the last plain number or expression)
and compares it with SymPy. A model under training finds answers on which SymPy takes hours (`9^{9^{9^9}}`), some of
them inside one big-integer operation that no Python-level time-out interrupts; and math-verify's own time-outs are
signal handlers, which work on the main thread alone. So the comparison runs in a process of its own, `math_worker`,
which the kernel ends when its time is over; the next answer starts another one.

    this process, any thread  ── {"response", "golds", "timeout_s"} ──>  math_worker
                              <── {"equal"} or {"error"}, or the end of the pipe ──
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class MathReward:
    """`\\frac{1}{2}`, `0.5` and `1/2` are the same answer. A ground truth that is a list holds alternatives."""

    timeout_s: float = 5.0
    """Longest time, in seconds, that one answer may take; beyond it the reward is 0."""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ValueError(f"reward.kwargs.timeout_s={self.timeout_s} must be greater than 0")

    def __call__(self, response: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]) -> float:
        """1.0 or 0.0.

        Raises:
            ValueError: the ground truth holds nothing to compare with.
        """
        accepted = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
        return float(_verifier().is_equal(response, [str(truth) for truth in accepted], self.timeout_s))


class VerifierProcess:
    """One `math_worker`, started when it is first needed; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def is_equal(self, response: str, golds: list[str], timeout_s: float) -> bool:
        """Whether the answer in `response` equals one of `golds`; False if finding out takes longer than `timeout_s`.

        Raises:
            ValueError: no answer can be read from `golds`.
            RuntimeError: the process ended for another reason than its time limit.
        """
        with self._lock:
            if self._process is None:
                self._process = _start()
            line = _ask(self._process, {"response": response, "golds": golds, "timeout_s": timeout_s})
            if not line:
                status, self._process = self._process.wait(), None
                if status != -signal.SIGALRM:
                    raise RuntimeError(
                        f"the math-verify process ended with status {status}; its own message stands above"
                    )
                return False
        reply = json.loads(line)
        if "error" in reply:
            raise ValueError(reply["error"])
        return bool(reply["equal"])

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.communicate()
                self._process = None


@cache
def _verifier() -> VerifierProcess:
    verifier = VerifierProcess()
    atexit.register(verifier.close)
    return verifier


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fivefold.rewards.math_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        # Its own session: Ctrl-C is for the run to handle; the worker ends with its pipe.
        start_new_session=True,
    )


def _ask(process: subprocess.Popen[str], job: Mapping[str, Any]) -> str:
    """The reply's line; empty if the process ends instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline()
