"""The end of a worker's log, which lies on the worker's machine: nodes need not share storage."""

from __future__ import annotations

import ray
from ray.exceptions import RayError

from fivefold.cluster.errors import Member, tail

READ_S = 10.0
"""Seconds that another machine gets to send the lines."""


def last_lines(member: Member) -> str:
    """Return the last lines of the log of `member`, read by a process on its machine if the file is not on this one."""
    if member.log.is_file():
        return tail(member.log)
    read = ray.remote(tail).options(num_cpus=0, max_retries=0, scheduling_strategy=member.strategy)
    answer = read.remote(member.log)
    ready, _ = ray.wait([answer], timeout=READ_S)
    try:
        return str(ray.get(answer)) if ready else f"(no answer from {member.host} in {READ_S:g} s)"
    except RayError:
        return f"({member.host} cannot be asked for it)"
