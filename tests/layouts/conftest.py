"""Worker processes, which the tests of a file share, and tiny models, which all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import save_models
from worker_pool import WorkerPool, Workers


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """A function that returns the pool of n processes, which starts at its first use in a file.

    Pools are not shared between files, because interleaved layouts leave threads of gloo in a process and slow it down.
    """
    pools: dict[int, WorkerPool] = {}

    def pool(n: int) -> WorkerPool:
        if n not in pools:
            pools[n] = WorkerPool(n)
        return pools[n]

    yield pool
    for started in pools.values():
        started.stop()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny models: `models / name`."""
    folder = tmp_path_factory.mktemp("models")
    pool = WorkerPool(1)
    pool.run(save_models, folder)
    pool.stop()
    return folder
