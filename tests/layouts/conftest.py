"""Worker processes, which the tests of a file share, and tiny models, which all tests share."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import hf_reference
import pytest
import ragged
from hf_reference import Reference
from ragged import uneven_batch
from tiny_models import save_models
from worker_pool import WorkerPool, Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.batch import Batch


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
    """The folder of the tiny models: `models / name`. All processes of the tests share it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "models"
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = tmp_path_factory.mktemp("unfinished") / "models"
            pool = WorkerPool(1)
            pool.run(save_models, unfinished)
            pool.stop()
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="module")
def reference(workers: Workers, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Returns what Hugging Face's model makes of `uneven_batch`, by the model's name."""
    scratch = tmp_path_factory.mktemp("gradients")

    @cache
    def of(model: str) -> Reference:
        batch, loss = uneven_batch(), SFTLoss()
        ((logprobs, entropies),) = workers(1).run(
            hf_reference.logprobs_and_entropies, models / model, batch, loss.temperature
        )
        ((value, gradients),) = workers(1).run(hf_reference.gradients, models / model, batch, loss, scratch / model)
        return logprobs, entropies, value, gradients

    return of


@pytest.fixture(scope="module")
def batch_for(workers: Workers, models: Path) -> Callable[[str], Batch]:
    """Returns a batch for a policy loss, by the model's name."""
    return cache(lambda model: workers(1).run(ragged.policy_batch, models / model)[0])
