"""Processes joined by torch.distributed on gloo, which start once and then run one function after another.

    test ── (function, arguments) ──> rank 0 .. n-1 ── results, by rank ──> test

They are forked from a server that has already imported everything, so that eight of them start in a second. After a
failure or a hang their state is unknown, so they are ended, and the next call starts new ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from fivefold.engine.compat import share_gloo_devices
from tests.forks import forking

START_LIMIT_S = 600.0
"""Seconds for the imports, and for the processes to join torch.distributed."""
GRACE_S = 3.0
"""Seconds that the other ranks have to answer after one has failed, before they count as waiting for it."""

STACKS_S = 30.0
"""Seconds that ranks have to begin with their stacks."""


class WorkerError(AssertionError):
    """A rank raised, died, or did not answer in time; the message has the report of every such rank."""


class WorkerPool:
    """`n` ranks of one torch.distributed world."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._scratch = tempfile.TemporaryDirectory(prefix=f"world-of-{n}-")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._starts = 0

    def run(self, function: Callable[..., Any], *args: Any, time_limit: float = 600.0) -> list[Any]:
        """Call `function(*args)` on every rank; return the results, by rank.

        Args:
            function: a function at the top level of a module, so that it can be sent by name.
            args: arguments that can be pickled.
            time_limit: seconds until the ranks that have not answered count as hung.

        Raises:
            WorkerError: some rank failed. It holds the tracebacks of ranks that raised, and the stacks of those that
                hung.
        """
        if not self._processes:
            self._start()
        message = pickle.dumps((function, args))
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # a process that died is reported with the answers
                pipe.send_bytes(message)
        return self._answers(f"{function.__module__}.{function.__qualname__}", time_limit)

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        # These tests run on CPUs, with one thread per process, even if the machine has GPUs.
        with patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}):
            self._start_processes()
        self._answers("start of the processes", START_LIMIT_S)

    def _start_processes(self) -> None:
        context = forking()
        self._starts += 1
        store = Path(self._scratch.name) / f"store-{self._starts}"
        for rank in range(self.n):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.n, store, there, self._stack_file(rank)), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def _answers(self, task: str, time_limit: float) -> list[Any]:
        """Return each rank's answer, by rank; raise WorkerError unless all succeeded at `task`."""
        answers = self._collect(time_limit)
        failures = {rank: text for rank, (ok, text) in answers.items() if not ok}
        if failures or len(answers) < self.n:
            stacks = self._stacks([rank for rank in range(self.n) if rank not in answers])
            self.stop()
            raise WorkerError(_report(task, failures, stacks, time_limit))
        return [answers[rank][1] for rank in range(self.n)]

    def _collect(self, time_limit: float) -> dict[int, tuple[bool, Any]]:
        """Return (succeeded, result or traceback) of each rank that answered."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + time_limit
        waiting = dict(zip(self._pipes, range(self.n), strict=True))
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), timeout=left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    answers[rank] = (False, "the process died")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _stack_file(self, rank: int) -> Path:
        return Path(self._scratch.name) / f"stacks-{self._starts}-{rank}"

    def _stacks(self, hung: list[int]) -> dict[int, str]:
        """Return the stacks of the ranks that did not answer."""
        for rank in hung:
            process = self._processes[rank]
            if process.is_alive() and process.pid is not None and self._stack_file(rank).exists():
                os.kill(process.pid, signal.SIGUSR1)
        files = {rank: self._stack_file(rank) for rank in hung if self._stack_file(rank).exists()}
        deadline = time.monotonic() + STACKS_S
        while not all(file.stat().st_size for file in files.values()) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)  # for the rest of a stack that has begun
        return {rank: file.read_text() for rank, file in files.items()}


Workers = Callable[[int], WorkerPool]
"""Returns the pool of n processes."""


def _report(task: str, failures: dict[int, str], stacks: dict[int, str], time_limit: float) -> str:
    lines = [f"{task} failed"]
    lines += [f"--- rank {rank} raised:\n{text}" for rank, text in sorted(failures.items())]
    limit = "while another had failed" if failures else f"within {time_limit:.0f} s"
    lines += [f"--- rank {rank} did not answer {limit}; it was at:\n{text}" for rank, text in sorted(stacks.items())]
    return "\n".join(lines)


@dataclass
class _Membership:
    """Membership of this process in its world; set in workers only."""

    rank: int
    world_size: int
    store: Path
    times_joined: int = 0

    def join(self) -> None:
        """Join the other ranks, through a new file each time."""
        self.times_joined += 1
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.store}-{self.times_joined}",
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=600),
        )
        # A rank that left at once would break the connections that others still make. The store is a file.
        store = dist.distributed_c10d._get_default_store()
        store.add("joined", 1)
        while store.add("joined", 0) < self.world_size:
            time.sleep(0.001)


_membership: _Membership | None = None


def rejoin() -> None:
    """In a worker: leave torch.distributed with all its groups, and join it again."""
    assert _membership is not None, "only a worker of a pool can rejoin it"
    dist.destroy_process_group()
    _membership.join()


def _serve(rank: int, world_size: int, store: Path, pipe: Connection, stack_file: Path) -> None:
    global _membership
    torch.set_num_threads(1)
    share_gloo_devices()
    _membership = _Membership(rank, world_size, store)
    with stack_file.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        try:
            _membership.join()
        except (RuntimeError, dist.DistError):
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
            return
        pipe.send_bytes(pickle.dumps((True, None)))
        while True:
            try:
                message = pipe.recv_bytes()
            except EOFError:  # the test session is gone
                return
            pipe.send_bytes(pickle.dumps(_answer(message)))


def _answer(message: bytes) -> tuple[bool, Any]:
    try:
        function, args = pickle.loads(message)
        return True, function(*args)
    except Exception:  # any failure must reach the test
        return False, traceback.format_exc()
