"""The reward `code`: runs the program in a response against the tests of the ground truth, in a sandbox."""

from __future__ import annotations

import functools
import os
import re
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fivefold.rewards.code_tests import Runs, read_tests
from fivefold.rewards.sandbox.remote import AT_ONCE, RemoteSandbox
from fivefold.rewards.sandbox.runner import Sandbox, missing, run
from fivefold.rewards.service import check_reachable, check_url

FENCE = re.compile(r"`{3,}")
IN_PYTHON = re.compile(r"\s*(python|py)3?\b", re.IGNORECASE)
"""What stands behind the fence of a block in Python."""
MOST_AT_ONCE = 1024
LEAST_MEMORY_MB = 64
"""What the interpreter alone needs, and some more."""


@dataclass(frozen=True)
class CodeReward:
    """Runs each test in a separate process; 1 if all pass."""

    timeout_s: float = 10.0
    """Seconds of wall-clock time of each test, the start of the interpreter included."""
    total_timeout_s: float = 300.0
    """Seconds of all tests of a response together; a test that has not ended by then is not passed."""
    memory_mb: int = 512
    """Address space of each program, in MiB."""
    concurrency: int | None = None
    """Responses that are judged at the same time; None: one for each core, or `AT_ONCE` in a service."""
    partial: bool = False
    """Whether the reward is the share of the tests that pass."""
    language: Literal["python"] = "python"
    preamble: str = ""
    """Python text that comes before each program, such as imports that answers are written with in mind."""
    allow_unsandboxed: bool = False
    """Whether programs run with what the machine has, if it lacks Landlock or seccomp."""
    sandbox_url: str | None = None
    """A service that runs the programs, as SandboxFusion's `/run_code`; None: the sandbox of this machine."""

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: one that is out of bounds.
        """
        bounds = {
            "timeout_s": (0.01, 86_400),
            "total_timeout_s": (0.01, 86_400),
            "memory_mb": (LEAST_MEMORY_MB, 1 << 20),
            "concurrency": (1, MOST_AT_ONCE),
        }
        for name, (least, most) in bounds.items():
            if (value := getattr(self, name)) is not None and not least <= value <= most:
                raise ValueError(f"reward.kwargs.{name}={value} must be from {least:g} to {most:,}")
        try:
            compile(self.preamble, "preamble", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"reward.kwargs.preamble={self.preamble[:200]!r} is not Python: {error}") from error
        if self.sandbox_url is not None:
            check_url("sandbox_url", self.sandbox_url)
            if self.allow_unsandboxed:
                raise ValueError(
                    "reward.kwargs.allow_unsandboxed=true is for the sandbox of this machine, and sandbox_url names a "
                    "service: drop one of them"
                )

    @property
    def n_at_once(self) -> int:
        """Number of responses that can be judged at the same time, each from a separate thread."""
        return self.concurrency or (os.cpu_count() or 1 if self.sandbox_url is None else AT_ONCE)

    def __call__(self, response: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]) -> float:
        """Return 1.0 if the program passes all tests, else 0.0, or with `partial` the share of tests that it passes.

        Raises:
            ValueError: the ground truth holds no tests.
            RuntimeError: the sandbox could not be closed, or its service has no answer.
        """
        tests, program = read_tests(ground_truth), self._with_preamble(program_of(response))
        deadline, n_passed = time.monotonic() + self.total_timeout_s, 0
        for test in tests:
            left = min(self.timeout_s, deadline - time.monotonic())
            passes = left > 0 and test.passes(program, self._within(left))
            if left <= 0 or not (passes or self.partial):
                break
            n_passed += passes
        return n_passed / len(tests) if self.partial else float(n_passed == len(tests))

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Refuse a ground truth that holds no tests.

        Raises:
            ValueError: see `read_tests`.
        """
        read_tests(ground_truth)

    def check_machine(self) -> None:
        """Refuse a machine on which programs could reach what is outside the sandbox, or cannot run in it.

        Raises:
            ValueError: a mechanism of the sandbox is missing, its service is, or a program that prints fails.
        """
        if self.sandbox_url is not None:
            check_reachable("sandbox_url", self.sandbox_url)
        elif (lacks := missing()) and not self.allow_unsandboxed:
            raise ValueError(
                "the reward 'code' runs programs that a model wrote in a sandbox, for which this machine lacks "
                f"{' and '.join(lacks.values())}: start fivefold on another machine, or set "
                "reward.kwargs.allow_unsandboxed: true to run the programs without"
            )
        try:
            result = self._within(60.0)("print(1)", {"asks": "output"})
        except RuntimeError as error:
            raise ValueError(f"the sandbox of the reward 'code' does not work: {error}") from error
        if not result.is_complete or result.output != b"1\n":
            raise ValueError(
                f"a program that prints 1 fails in the sandbox of the reward 'code' with {result.ended}: raise "
                f"reward.kwargs.memory_mb={self.memory_mb}"
            )

    def _with_preamble(self, program: str) -> str:
        return f"{self.preamble}\n{program}" if self.preamble else program

    def _within(self, seconds: float) -> Runs:
        """Return what runs a program for at most so many seconds."""
        if self._service is not None:
            return functools.partial(self._service.run, timeout_s=seconds)
        lacks = frozenset(missing()) if self.allow_unsandboxed else frozenset[str]()
        return functools.partial(run, sandbox=Sandbox(seconds, self.memory_mb, lacks))

    @functools.cached_property
    def _service(self) -> RemoteSandbox | None:
        if self.sandbox_url is None:
            return None
        return RemoteSandbox(self.sandbox_url, self.memory_mb, max(self.timeout_s, 60.0), self.n_at_once)


def program_of(response: str) -> str:
    """Return the last fenced block of a response that is marked as Python, else the last one, else all of it."""
    blocks = _blocks(response)
    if not blocks:
        return response
    marked = [block for block in blocks if IN_PYTHON.match(block.info)]
    return (marked or blocks)[-1].program


@dataclass(frozen=True)
class _Block:
    """A fenced block."""

    info: str
    """What stands behind the opening fence."""
    program: str


def _blocks(response: str) -> list[_Block]:
    """Return the closed blocks of a response.

    The opening fence may stand behind other text, such as `</think>`, and other text behind the closing one.
    """
    blocks: list[_Block] = []
    opening: tuple[str, str, str] | None = None
    content: list[str] = []
    for line in response.splitlines(keepends=True):
        if opening is None:
            opening, content = _opening(line), []
        elif line.lstrip(" \t").startswith(opening[1]):
            before, _, info = opening
            program = "".join(content)
            # Blocks in lists are indented as a whole.
            blocks.append(_Block(info, textwrap.dedent(program) if before else program))
            opening = None
        else:
            content.append(line)
    return blocks


def _opening(line: str) -> tuple[str, str, str] | None:
    """Return what stands before the fence that a line opens a block with, the fence, and what stands behind it.

    None: the line opens none. A fence that is closed on its line holds a piece of text.
    """
    start = 0
    while fence := FENCE.search(line, start):
        closing = line.find(fence[0], fence.end())
        if closing < 0:
            info = line[fence.end() :]
            return None if "`" in info else (line[: fence.start()], fence[0], info)
        start = closing + len(fence[0])
    return None
