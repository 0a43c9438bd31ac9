"""The self-test: two processes train the shipped model for one step, and must get the losses that one process gets.

    process alone   megatron:d1                    ─┐
    process 0       megatron:(attn:d1t2|ffn:e2)    ─┼─ losses before and after an update ─> equal?
    process 1                                      ─┘

The two processes split attention by tensor parallelism and experts by expert parallelism, so that all-reduce,
all-gather, reduce-scatter and all-to-all are all used. If there are two GPUs, they run there and communicate through
NCCL; otherwise they run on the CPU and communicate through gloo.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fivefold.cluster.role import loopback
from fivefold.doctor.finding import Finding
from fivefold.doctor.self_test_process import Seat

NAME = "two processes"
ALONE, SHARED = "megatron:d1", "megatron:(attn:d1t2|ffn:e2)"
WORLD_SIZE = 2
TOLERANCE = 1e-4
"""Largest relative difference of equal losses; the order of float32 sums differs between the layouts."""
TIME_LIMIT_S = 180.0
"""The test takes about ten seconds, but a machine that is busy may need this long for the imports alone."""
GRACE_S = 3.0
"""Seconds that the other processes get to end after one has failed; those that wait for it never end."""
POLL_S = 0.05
LOG_LINES = 12
Device = Literal["cpu", "cuda"]
Losses = tuple[float, float]

SKIPPED = Finding(NAME, "problem", "not run: torch cannot be imported", "repair torch first")


@dataclass(frozen=True)
class Member:
    """A process of the test, and its files."""

    name: str
    process: subprocess.Popen[bytes]
    progress: Path
    log: Path

    def records(self) -> list[dict[str, Any]]:
        """Return the lines that it has written to its progress file."""
        if not self.progress.is_file():
            return []
        return [json.loads(line) for line in self.progress.read_text(encoding="utf-8").splitlines()]

    def phase(self) -> str:
        """Return the last phase that it began."""
        return next((each["phase"] for each in reversed(self.records()) if "phase" in each), "start")

    def losses(self) -> Losses:
        """Return the losses before and after the update; the process must have ended well."""
        before, after = self.records()[-1]["losses"]
        return before, after

    def tail(self) -> tuple[str, ...]:
        """Return the last lines of its log."""
        return tuple(self.log.read_text(errors="replace").rstrip().splitlines()[-LOG_LINES:])


def run_self_test(n_gpus: int, *, time_limit_s: float = TIME_LIMIT_S) -> Finding:
    """Start the three processes, wait for them and compare their losses.

    Args:
        n_gpus: number of GPUs that torch can use.
        time_limit_s: seconds after which a process that has not ended counts as hung.
    """
    device: Device = "cuda" if n_gpus >= WORLD_SIZE else "cpu"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fivefold-doctor-") as folder:
        members: list[Member] = []
        try:
            members.append(_start(Path(folder), ALONE, 0, 1, device, time_limit_s))
            members += [
                _start(Path(folder), SHARED, rank, WORLD_SIZE, device, time_limit_s) for rank in range(WORLD_SIZE)
            ]
            blamed = _wait(members, began + time_limit_s)
            hung = blamed is not None and blamed.process.poll() is None
        finally:
            _end(members)
        if blamed is not None:
            return failure(blamed, device, time_limit_s if hung else None)
        losses = [member.losses() for member in members]
    return compare(losses[0], losses[1:], device, time.monotonic() - began)


def _start(folder: Path, layout: str, rank: int, world_size: int, device: Device, time_limit_s: float) -> Member:
    name = "the process alone" if world_size == 1 else f"process {rank} of {world_size}"
    files = folder / f"{world_size}-{rank}"
    progress, log = files.with_suffix(".jsonl"), files.with_suffix(".log")
    seat = Seat(layout, rank, world_size, device, str(folder / f"store-{world_size}"), str(progress), time_limit_s)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "fivefold.doctor.self_test_process", seat.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(device),
        )
    return Member(name, process, progress, log)


def _environment(device: Device) -> dict[str, str]:
    """Return the environment that the workers of a run have, too."""
    environment = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **os.environ, "PYTHONSAFEPATH": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if interface := loopback():
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return environment


def _wait(members: Sequence[Member], deadline: float) -> Member | None:
    """Wait for all processes. Return the one to blame unless all ended well in time.

    The one to blame is the first that failed or, if none failed, the one that hangs in the earliest phase.
    """
    blamed: Member | None = None
    while (running := [each for each in members if each.process.poll() is None]) and time.monotonic() < deadline:
        ended_badly = [each for each in members if each.process.poll()]
        if ended_badly and blamed is None:
            blamed = ended_badly[0]
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(POLL_S)
    bad = [each for each in members if each.process.poll()]
    return blamed or next(iter(bad), None) or min(running, key=lambda each: len(each.records()), default=None)


def _end(members: Sequence[Member]) -> None:
    for member in members:
        if member.process.poll() is None:
            member.process.kill()
        member.process.wait()


def failure(member: Member, device: Device, time_limit_s: float | None) -> Finding:
    """Return the finding about a process that failed or hung.

    Args:
        member: the process.
        device: where it ran.
        time_limit_s: limit that it exceeded; None: it did not hang, but failed.
    """
    phase, code = member.phase(), member.process.returncode
    fix = _advice(phase, device)
    if time_limit_s is not None:
        ended = f"did not end within {time_limit_s:.0f} s"
        if phase in ("start", "import"):
            fix = "the machine is too busy, or its disk too slow: try again later, or --no-self-test"
    elif code < 0:
        ended = f"was ended by {signal.Signals(-code).name}"
    else:
        ended = "failed"
    return Finding(NAME, "problem", f"{member.name} {ended} in phase '{phase}'", fix, member.tail())


def _advice(phase: str, device: Device) -> str:
    if phase in ("start", "import"):
        return "repair what is wrong above; if nothing is, install Fivefold in a new environment"
    if phase == "train":
        return "fivefold train would fail in the same way; the lines below say why"
    if device == "cpu":
        return "gloo does not connect: export GLOO_SOCKET_IFNAME=lo (ip link lists the interfaces)"
    return "NCCL does not connect: NCCL_DEBUG=INFO says why; try NCCL_P2P_DISABLE=1, and more shared memory"


def compare(alone: Losses, shared: Sequence[Losses], device: Device, seconds: float) -> Finding:
    """Compare the losses of the two processes with the single process's.

    Args:
        alone: loss before and after the update in the process alone.
        shared: loss before and after the update in each of the two processes.
        device: where the processes ran.
        seconds: time that the whole test took.
    """
    where = "on 2 GPUs through NCCL" if device == "cuda" else "on CPU through gloo"
    equal = all(
        math.isclose(mine, expected, rel_tol=TOLERANCE)
        for losses in shared
        for mine, expected in zip(losses, alone, strict=True)
    )
    if equal:
        found = f"loss {alone[0]:.4f}, then {alone[1]:.4f}, as in one; {where}, {seconds:.0f} s"
        return Finding(NAME, "ok", found, "layouts compute the same here: training can start")
    lines = tuple(
        f"{name}: {before:.6f} before, {after:.6f} after the update"
        for name, (before, after) in [
            ("one process", alone),
            *((f"process {i} of 2", pair) for i, pair in enumerate(shared)),
        ]
    )
    fix = "do not train in this state: install Fivefold in a new environment and try again"
    if device == "cuda":
        fix = "do not train in this state: try NCCL_P2P_DISABLE=1, then each pair of GPUs with CUDA_VISIBLE_DEVICES"
    return Finding(NAME, "problem", f"the losses differ from a single process's, {where}", fix, lines)
