"""The parent of a process that trains, which tells a run's end from an exit that only looks like one.

    parent      imports nothing large, waits, hands signals on, and ends as its child has ended
    child       the command; it reports signals that it has received, and at its end that it came there

Code of the user's runs in the child, and can end it with the exit code 0 in many ways: by `posix._exit`, by an exec, in
a C library. The parent then ends with 1.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NoReturn

WITNESSED = "a process that a shell has started"
"""The `obj` of the context of a command that may fork."""
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to end."""
REPORT_S = 0.2
"""Seconds that the child has to report a signal which was sent to both processes."""
FINISHED = b"\0"
"""The report of the end. The report of a signal is its number."""
PR_SET_PDEATHSIG = 1
"""Number of this option on Linux; see prctl(2)."""
SENT_BY_KERNEL = 0x80
"""`si_code` of a signal from the terminal, which the child has got, too."""


def under_a_witness(failed: int) -> Callable[[], None]:
    """Fork, and return in the child; the parent ends as the child ends.

    It is for a process of one thread, before anything large is imported.

    Args:
        failed: exit code of the parent if the child ends with 0 without having finished.

    Returns:
        Reports that the command came to its end: an exit code of 0 counts from then on.
    """
    reports, pipe = os.pipe()
    parent = os.getpid()
    # Until the parent waits for signals, they stay pending; the child has its mask back before it handles any.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*HANDED_ON, signal.SIGCHLD})
    child = os.fork()
    if child > 0:
        os.close(pipe)
        _end_as(_watch(child, reports), failed)
    os.close(reports)
    os.set_blocking(pipe, False)
    signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
    # What the command forks has its handlers, and must not report for it.
    os.register_at_fork(after_in_child=partial(signal.set_wakeup_fd, -1))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    # A killed parent takes the run with it: who kills a process for good means the run.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        signal.raise_signal(signal.SIGKILL)
    return lambda: _report_the_end(pipe)


def _report_the_end(pipe: int) -> None:
    os.write(pipe, FINISHED)


class _Reports:
    """What the child has reported."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        os.set_blocking(pipe, False)
        self.counts: Counter[int] = Counter()
        """Reports so far, by signal number; 0 is the end."""

    def read(self) -> None:
        """Take what has come."""
        with suppress(BlockingIOError):
            while found := os.read(self._pipe, 4096):
                self.counts.update(found)

    def wait(self, number: int, count: int) -> bool:
        """Return whether a signal has been reported `count` times, within `REPORT_S`."""
        self.read()
        while self.counts[number] < count and select.select([self._pipe], [], [], REPORT_S)[0]:
            before = self.counts.total()
            self.read()
            if self.counts.total() == before:
                break  # the child has closed the pipe
        return self.counts[number] >= count


def _watch(child: int, pipe: int) -> tuple[int, bool]:
    """Hand signals on until the child has ended; return its exit code and whether it had finished."""
    reports, received = _Reports(pipe), Counter[int]()
    while True:
        sent = signal.sigwaitinfo({*HANDED_ON, signal.SIGCHLD})
        if sent.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended == child:
                reports.read()
                return os.waitstatus_to_exitcode(status), reports.counts[FINISHED[0]] > 0
            continue
        number = sent.si_signo
        received[number] += 1
        # Who signals a group or a container signals both processes, and the child would count two.
        if sent.si_code == SENT_BY_KERNEL:
            continue
        if not reports.wait(number, received[number]):
            os.kill(child, number)
        # A signal to the child alone is reported, too, and must not stand for a later one to this process.
        received[number] = max(received[number], reports.counts[number])
        # timeout(1) signals its child and then the group, which is one request, too.
        signal.sigtimedwait({number}, 0)


def _end_as(ending: tuple[int, bool], failed: int) -> NoReturn:
    """End this process as the child has ended, but not with 0 if it had not finished."""
    code, finished = ending
    if code < 0:
        # The core dump is the child's.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
        # The first process of a container is not killed by itself, and exits as a shell would.
        code = 128 - code
    if code == 0 and not finished:
        message = (
            "\nError: the process of this command has ended with exit code 0 before the run did: code in it has ended "
            f"or replaced it. Exit code {failed}. Look at reward functions, environments, losses and what they import\n"
        )
        with suppress(OSError):
            os.write(2, message.encode())
        code = failed
    os._exit(code)
