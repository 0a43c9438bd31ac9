"""Worker processes, shared by the tests of a file, and tiny models, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import save_models
from worker_pool import WorkerPool, Workers


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """The pool of n processes, started at its first use in a file.

    Interleaved layouts leave a process some threads of gloo, so that the tests would get slower from file to file.
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
