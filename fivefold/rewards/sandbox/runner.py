"""Starts a process for each program, collects what it writes, and ends it when it breaks a limit.

runner ── job, standard input ──> child: limits, Landlock, seccomp, then the program
       <── standard output, report ──
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from fivefold.rewards.sandbox import landlock, seccomp
from fivefold.rewards.sandbox.child import READY

CHILD = Path(__file__).with_name("child.py")
MOST_OUTPUT = 16 << 20
"""Bytes that a program may write to each of its streams."""
MOST_FILES = 256
MOST_FILE_BYTES = 64 << 20
"""Files, and bytes of them, that a program may have in its folder."""
LOOK_S = 0.05
"""Seconds between two looks at the folder of a program that writes nothing else."""


@dataclass(frozen=True)
class Sandbox:
    """What a program may use."""

    timeout_s: float = 10.0
    """Seconds of wall-clock time."""
    memory_mb: int = 512
    """Address space in MiB."""
    without: frozenset[str] = frozenset()
    """Mechanisms, `landlock` or `seccomp`, that are left out because the machine lacks them."""


@dataclass(frozen=True)
class Result:
    """What became of a program."""

    ended: str
    """`exit 0`, `signal 9`, or the limit that it broke: `time`, `output` or `files`."""
    output: bytes
    """Standard output."""
    report: bytes
    """What the child told about the test, after the program had run to its end."""

    @property
    def is_complete(self) -> bool:
        """Whether the program ended by itself and without an error."""
        return self.ended == "exit 0"


@cache
def missing() -> Mapping[str, str]:
    """Return what this machine lacks for a closed sandbox, in words, by the name of the mechanism."""
    lacks = {}
    if landlock.abi() == 0:
        lacks["landlock"] = "Landlock in the kernel (Linux 5.13 or newer, and allowed in the container)"
    if (reason := seccomp.missing()) is not None:
        lacks["seccomp"] = reason
    return lacks


def run(program: str, asks: Mapping[str, Any], stdin: str = "", *, sandbox: Sandbox) -> Result:
    """Run a program in a separate process and folder.

    Args:
        program: source code in Python.
        asks: what to do when the program has run: `{"asks": "output"}`, nothing; `{"asks": "value", "fn_name": ...,
            "argument": [...]}`, call a function and report its value as JSON; `{"asks": "asserts", "argument": [...],
            "token": ...}`, run texts after it and report the token.
        sandbox: what the program may use.
        stdin: standard input.

    Raises:
        RuntimeError: the child could not restrict itself; the program did not run.
    """
    folder = tempfile.mkdtemp(prefix="fivefold-program-")
    try:
        with ExitStack() as files:
            job = files.enter_context(tempfile.TemporaryFile())
            settings = {
                "program": program,
                "folder": folder,
                "parent": os.getpid(),
                "timeout_s": sandbox.timeout_s,
                "memory_mb": sandbox.memory_mb,
                "landlock": 0 if "landlock" in sandbox.without else landlock.abi(),
                "seccomp": "seccomp" not in sandbox.without,
                **asks,
            }
            job.write(json.dumps(settings).encode())
            job.seek(0)
            source = files.enter_context(tempfile.TemporaryFile())
            source.write(stdin.encode(errors="replace"))
            source.seek(0)
            return _collect(*_start(job, source, folder), Path(folder), sandbox.timeout_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(job: IO[bytes], stdin: IO[bytes], folder: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start the child; return it, and the end of a pipe from which its report is read."""
    report, far_end = os.pipe()
    environment = {"LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"}
    if libraries := os.environ.get("LD_LIBRARY_PATH"):  # where the interpreter's own libraries may be
        environment["LD_LIBRARY_PATH"] = libraries
    try:
        process = subprocess.Popen(
            # Isolated, without site-packages, without writing byte code.
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(CHILD), str(job.fileno()), str(far_end)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(job.fileno(), far_end),
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
    except BaseException:
        os.close(report)
        raise
    finally:
        os.close(far_end)
    return process, report


def _collect(process: subprocess.Popen[bytes], report: int, folder: Path, timeout_s: float) -> Result:
    """Read what the child writes until it ends or breaks a limit."""
    assert process.stdout is not None
    assert process.stderr is not None
    streams = {"output": process.stdout.fileno(), "errors": process.stderr.fileno(), "report": report}
    written = {name: bytearray() for name in streams}
    try:
        broken = _watch(process, streams, written, folder, time.monotonic() + timeout_s)
    finally:
        # The child is not waited for yet, so its number still is its group's.
        os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        for stream in (process.stdout, process.stderr):
            stream.close()
        os.close(report)
    told = bytes(written["report"])
    if not told.startswith(READY.encode()):
        if broken is None:
            reason = (told + bytes(written["errors"]))[-2000:].decode(errors="replace")
            raise RuntimeError(f"the process that runs a program failed before it, with status {status}: {reason}")
        return Result(broken, b"", b"")
    ended = broken or (f"exit {status}" if status >= 0 else f"signal {-status}")
    return Result(ended, bytes(written["output"]), told.removeprefix(READY.encode()))


def _watch(
    process: subprocess.Popen[bytes],
    streams: Mapping[str, int],
    written: Mapping[str, bytearray],
    folder: Path,
    deadline: float,
) -> str | None:
    """Read the streams until the child has ended; return the limit that it broke, None if it ended by itself."""
    with selectors.DefaultSelector() as selector:
        for name, stream in streams.items():
            os.set_blocking(stream, False)
            selector.register(stream, selectors.EVENT_READ, name)
        looked = 0.0
        while True:
            has_ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            if (now := time.monotonic()) >= deadline and not has_ended:
                return "time"
            if now - looked >= LOOK_S:
                looked = now
                if _is_too_much(folder, process.pid):
                    return "files"
            open_streams = selector.get_map()
            wait_s = 0.0 if has_ended else max(0.0, min(LOOK_S, deadline - now))
            # When nothing more comes from the streams, only the end is waited for.
            ready = selector.select(wait_s) if open_streams else []
            if not open_streams and not has_ended:
                time.sleep(min(wait_s, 0.001))
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                written[key.data].extend(data)
                if not data:
                    selector.unregister(key.fd)
                elif len(written[key.data]) > MOST_OUTPUT:
                    return "output"
            if has_ended and not ready:
                return None


def _is_too_much(folder: Path, process: int) -> bool:
    """Return whether a program has too many or too large files; its folder has no subfolders.

    A file that was deleted takes its place on the disk as long as the process has it open.
    """
    named = _statuses(folder, follow_symlinks=False)
    opened = _statuses(Path(f"/proc/{process}/fd"), follow_symlinks=True)
    deleted = [each for each in opened if stat.S_ISREG(each.st_mode) and each.st_nlink == 0]
    return len(named) > MOST_FILES or sum(each.st_blocks * 512 for each in (*named, *deleted)) > MOST_FILE_BYTES


def _statuses(folder: Path, *, follow_symlinks: bool) -> list[os.stat_result]:
    """Return the status of all that is in a folder, without what goes meanwhile."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError, ProcessLookupError):
                found.append(entry.stat(follow_symlinks=follow_symlinks))
    return found
