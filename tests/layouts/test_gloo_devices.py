"""The process groups of a process share one thread of gloo that waits for messages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worker_pool import Workers

N_GROUPS = 6


def sums_and_waiting_threads() -> tuple[list[float], int]:
    """In a worker: return this rank's sums over new groups, and the number of threads that wait for messages."""
    totals = []
    for number in range(N_GROUPS):
        group = dist.new_group()
        total = torch.tensor(10.0**number * (1 + dist.get_rank()))
        dist.all_reduce(total, group=group)
        totals.append(total.item())
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return totals, names.count("gloo_tcp_loop")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux names threads in /proc")
def test_new_groups_bring_no_more_threads_that_wait(workers: Workers) -> None:
    for totals, n_waiting in workers(2).run(sums_and_waiting_threads):
        assert totals == [3.0 * 10**number for number in range(N_GROUPS)]
        assert n_waiting == 1
