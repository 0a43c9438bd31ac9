from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from fivefold.cluster.session import Session
from fivefold.config.schema.machines import ClusterConfig, SchedulerConfig
from fivefold.observe.timers import PhaseTimers
from tests.forks import forked_workers

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="package")
def timers() -> PhaseTimers:
    return PhaseTimers()


@pytest.fixture(scope="module")
def session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, timers: PhaseTimers
) -> Iterator[Session]:
    """One Ray for all tests of a file, which may set `FORKS_WORKERS`: a failure ends the workers, not Ray."""
    logs = tmp_path_factory.mktemp("logs")
    variables = {"all": {"GIVEN": "to all", "OF_ALL": "yes"}, "rollout": {"GIVEN": "to the rollout"}}
    scheduler = SchedulerConfig.model_validate({"timeout_s": 180, "environment": variables})
    forked = forked_workers() if getattr(request.module, "FORKS_WORKERS", False) else nullcontext()
    with forked, Session.open(scheduler, ClusterConfig(n_gpus_per_node=0), logs, timers) as session:
        yield session


@pytest.fixture(autouse=True)
def _no_workers_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """End workers after each test, but for those that tests of a file share as `groups`."""
    yield
    if "session" in request.fixturenames and "groups" not in request.fixturenames:
        request.getfixturevalue("session").kill()
