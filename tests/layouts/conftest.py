"""Worker processes and tiny models, made once and shared by all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_models import save_models
from worker_pool import WorkerPool, Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """The pool of n processes, started at its first use."""
    pools: dict[int, WorkerPool] = {}

    def pool(n: int) -> WorkerPool:
        if n not in pools:
            pools[n] = WorkerPool(n)
        return pools[n]

    yield pool
    for started in pools.values():
        started.stop()


@pytest.fixture(scope="session")
def models(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny models: `models / name`."""
    folder = tmp_path_factory.mktemp("models")
    workers(1).run(save_models, folder)
    return folder
