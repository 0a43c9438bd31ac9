"""The worker processes themselves: a test learns of a rank that fails or hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from worker_pool import WorkerError, WorkerPool


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2)
    yield pool
    pool.stop()


def sum_of_ranks() -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def fail_on_rank_1() -> None:
    dist.barrier()  # Both ranks are in this function when one of them fails.
    if dist.get_rank() == 1:
        raise KeyError("the reason")
    dist.barrier()


def hang_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(1000)


def die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os._exit(3)
    dist.barrier()


def test_calls_run_in_the_same_processes(pool: WorkerPool) -> None:
    pids = pool.run(os.getpid)
    assert len(set(pids)) == 2
    assert pool.run(sum_of_ranks) == [1, 1]
    assert pool.run(os.getpid) == pids


def test_a_failure_is_reported_with_its_traceback_and_the_stacks_of_waiting_ranks(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError) as error:
        pool.run(fail_on_rank_1)
    report = str(error.value)
    assert "rank 1 raised" in report
    assert "KeyError: 'the reason'" in report
    assert "rank 0 did not answer while another had failed" in report
    assert "in fail_on_rank_1" in report.split("rank 0 did not answer")[1]
    assert pool.run(sum_of_ranks) == [1, 1], "new processes take over"


def test_a_hang_ends_at_the_time_limit_and_its_stack_is_reported(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 0 did not answer within 6 s.*in hang_on_rank_0") as error:
        pool.run(hang_on_rank_0, time_limit=6.0)
    assert "rank 1" not in str(error.value)


def test_a_process_that_dies_is_reported(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="rank 0 raised:\nthe process died"):
        pool.run(die_on_rank_0)
