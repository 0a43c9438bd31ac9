"""The reward `math`: 1 for a response whose final answer is mathematically equal to the ground truth, else 0.

math-verify extracts the answer (the last `\\boxed{}`, else the last LaTeX, else the last plain number or expression)
and compares it with SymPy. A model in training finds answers for which SymPy takes hours (`9^{9^{9^9}}`), some of
them inside one big-integer operation that no time-out in Python interrupts. math-verify's own time-outs are signal
handlers, which work only on the main thread. Therefore separate processes, `math_worker`, compare the answers, and the
kernel ends their forks when the time is over. There are several, because a step may have hundreds of such answers.

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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fivefold.json_text import parsed
from fivefold.rewards.reward import accepted_answers, as_text

MOST_PROCESSES = 8
"""Most processes: each takes some 100 MB, and much more while it works on a hard answer."""

MOST_SECONDS = 86_400
"""Longest time limit of one answer: a day."""


@dataclass(frozen=True)
class MathReward:
    """Compares answers by their mathematical value: `\\frac{1}{2}`, `0.5` and `1/2` are the same.

    If the ground truth is a list or a tuple, any of its items is right.
    """

    timeout_s: float = 5.0
    """Most processor time, in seconds, that one answer may take; beyond it the reward is 0."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= MOST_SECONDS:
            raise ValueError(
                f"reward.kwargs.timeout_s={self.timeout_s} must be greater than 0, and at most {MOST_SECONDS:,}"
            )

    @property
    def n_at_once(self) -> int:
        """Number of answers that can be judged at the same time, each from a separate thread."""
        return n_processes()

    def check_machine(self) -> None:
        """Accept every machine."""

    def __call__(self, response: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]) -> float:
        """Return 1.0 for a right answer and 0.0 for any other, or if the comparison takes too long.

        Raises:
            ValueError: the ground truth holds no answer to compare with.
        """
        golds = [as_text(truth) for truth in accepted_answers(ground_truth)]
        return float(_verifiers().is_equal(response, golds, self.timeout_s) or False)

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Refuse a ground truth with which no answer can be compared.

        Raises:
            ValueError: it is neither text nor number, holds no mathematical answer, or takes too long to read.
        """
        accepted = accepted_answers(ground_truth)
        if strays := [
            truth for truth in accepted if isinstance(truth, bool) or not isinstance(truth, str | int | float)
        ]:
            raise ValueError(
                f"the ground truth holds {strays[0]!r}, a {type(strays[0]).__name__}: give a text, a number, or a "
                "list of them"
            )
        golds = [as_text(truth) for truth in accepted]
        if _verifiers().is_equal("", golds, self.timeout_s) is None:
            raise ValueError(
                f"the ground truth {golds!r} cannot be read within {self.timeout_s} s, so no answer would earn "
                "anything: simplify it, or raise reward.kwargs.timeout_s"
            )


def n_processes() -> int:
    """Return the number of processes: one for each core, and at most `MOST_PROCESSES`."""
    return min(MOST_PROCESSES, os.cpu_count() or 1)


class VerifierProcess:
    """One `math_worker`, which is started when it is first needed. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[str] | None = None

    def is_equal(self, response: str, golds: list[str], timeout_s: float) -> bool | None:
        """Return whether the answer in `response` equals one of `golds`; None if it takes longer than `timeout_s`.

        Raises:
            ValueError: `golds` holds no answer.
            RuntimeError: the process has ended.
        """
        with self._lock:
            process = self._process = self._process or _start()
            try:
                line = _ask(process, {"response": response, "golds": golds, "timeout_s": timeout_s})
            except BaseException:
                # The wait was interrupted: a reply that comes later must not be taken for that to the next job.
                self.close()
                raise
            if not line:
                self._process = None
                raise RuntimeError(
                    f"the math-verify process ended with status {process.wait()}; its own message stands above"
                )
        reply = parsed(line)
        if "error" in reply:
            raise ValueError(reply["error"])
        equal: bool | None = reply["equal"]
        return equal

    def close(self) -> None:
        """End the process and its fork, even in the middle of a comparison."""
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A thread that waits for a reply holds the lock until it reads the end of the pipe.
        with self._lock:
            process.communicate()
            self._process = None


class VerifierPool:
    """Several `VerifierProcess`es; each works for one thread at a time."""

    def __init__(self, n: int) -> None:
        self._verifiers = [VerifierProcess() for _ in range(n)]
        # Last in, first out: a caller that needs one process at a time never starts a second one.
        self._free: queue.LifoQueue[VerifierProcess] = queue.LifoQueue()
        for verifier in self._verifiers:
            self._free.put(verifier)

    def is_equal(self, response: str, golds: list[str], timeout_s: float) -> bool | None:
        """Compare like `VerifierProcess.is_equal`, on a process that is free; wait until there is one."""
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


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        # -P keeps the worker's folder off sys.path.
        [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        # In a separate session, Ctrl-C does not reach the worker, which ends with its pipe.
        start_new_session=True,
    )


def _ask(process: subprocess.Popen[str], job: Mapping[str, Any]) -> str:
    """Return the line of the reply; it is empty if the process ended instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline()
