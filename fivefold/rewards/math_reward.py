"""Reward 1 for a response whose final answer is mathematically equal to the ground truth, else 0.

math-verify extracts the answer (the last `\\boxed{}`, else the last LaTeX, else the last plain number or expression)
and compares it with SymPy. A model under training finds answers on which SymPy takes hours (`9^{9^{9^9}}`), some of
them inside one big-integer operation that no Python-level time-out interrupts; and math-verify's own time-outs are
signal handlers, which work on the main thread alone. So the comparison runs in processes of its own, `math_worker`,
whose forks the kernel ends when their time is over. There are several, for a step may bring hundreds of such answers.

    this process, any thread  ── {"response", "golds", "timeout_s"} ──>  math_worker ── fork ──> math-verify
                              <── {"equal"} or {"error"} ──
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

MOST_PROCESSES = 8
"""Each takes some 100 MB, and much more while it works on a hard answer."""


@dataclass(frozen=True)
class MathReward:
    """`\\frac{1}{2}`, `0.5` and `1/2` are the same answer. A ground truth that is a list holds alternatives."""

    timeout_s: float = 5.0
    """Most processor time, in seconds, that one answer may take; beyond it the reward is 0."""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ValueError(f"reward.kwargs.timeout_s={self.timeout_s} must be greater than 0")

    @property
    def n_at_once(self) -> int:
        """How many answers can be judged at the same time, each from a thread of its own."""
        return n_processes()

    def __call__(self, response: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]) -> float:
        """1.0 or 0.0.

        Raises:
            ValueError: the ground truth holds nothing to compare with.
        """
        golds = [str(truth) for truth in _alternatives(ground_truth)]
        return float(_verifiers().is_equal(response, golds, self.timeout_s) or False)

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Find out whether answers can be compared with `ground_truth`.

        Raises:
            ValueError: it is neither text nor number, holds no mathematical answer, or cannot be read in time.
        """
        accepted = _alternatives(ground_truth)
        if strays := [
            truth for truth in accepted if isinstance(truth, bool) or not isinstance(truth, str | int | float)
        ]:
            raise ValueError(
                f"the ground truth holds {strays[0]!r}, a {type(strays[0]).__name__}: give a text, a number, or a "
                "list of them"
            )
        golds = [str(truth) for truth in accepted]
        if _verifiers().is_equal("", golds, self.timeout_s) is None:
            raise ValueError(
                f"the ground truth {golds!r} cannot be read within {self.timeout_s} s, so no answer would earn "
                "anything: simplify it, or raise reward.kwargs.timeout_s"
            )


def n_processes() -> int:
    """One for each core, up to `MOST_PROCESSES`."""
    return min(MOST_PROCESSES, os.cpu_count() or 1)


class VerifierProcess:
    """One `math_worker`, started when it is first needed; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[str] | None = None

    def is_equal(self, response: str, golds: list[str], timeout_s: float) -> bool | None:
        """Whether the answer in `response` equals one of `golds`; None if finding out takes longer than `timeout_s`.

        Raises:
            ValueError: no answer can be read from `golds`.
            RuntimeError: the process has ended.
        """
        with self._lock:
            process = self._process = self._process or _start()
            try:
                line = _ask(process, {"response": response, "golds": golds, "timeout_s": timeout_s})
            except BaseException:
                # Interrupted: the reply, when it comes, must not be taken for that to the next job.
                self.close()
                raise
            if not line:
                self._process = None
                raise RuntimeError(
                    f"the math-verify process ended with status {process.wait()}; its own message stands above"
                )
        reply = json.loads(line)
        if "error" in reply:
            raise ValueError(reply["error"])
        equal: bool | None = reply["equal"]
        return equal

    def close(self) -> None:
        """End the process and its fork, also in the middle of a comparison."""
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # The thread that waits for a reply, if any, has seen the end of the pipe by then.
        with self._lock:
            process.communicate()
            self._process = None


class VerifierPool:
    """Several `VerifierProcess`es, each of which works for one thread at a time."""

    def __init__(self, n: int) -> None:
        self._verifiers = [VerifierProcess() for _ in range(n)]
        # The one that came back last goes out first: a caller that never needs two at once starts no second one.
        self._free: queue.LifoQueue[VerifierProcess] = queue.LifoQueue()
        for verifier in self._verifiers:
            self._free.put(verifier)

    def is_equal(self, response: str, golds: list[str], timeout_s: float) -> bool | None:
        """As `VerifierProcess.is_equal`; waits until a process is free."""
        verifier = self._free.get()
        try:
            return verifier.is_equal(response, golds, timeout_s)
        finally:
            self._free.put(verifier)

    def close(self) -> None:
        """End all processes."""
        for verifier in self._verifiers:
            verifier.close()


@cache
def _verifiers() -> VerifierPool:
    verifiers = VerifierPool(n_processes())
    atexit.register(verifiers.close)
    return verifiers


def _alternatives(ground_truth: Any) -> Sequence[Any]:
    return ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        # -P: the worker's folder stays off sys.path.
        [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))],
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
