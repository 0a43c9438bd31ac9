"""Set-up of all tests: exit statuses of child processes are kept, as in the command line, and imports are quick."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from fivefold.cluster.interrupt import keep_exit_statuses
from tests.forks import share_server, use_shared_server

keep_exit_statuses()
# On a machine that is busy, an example may take any time.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
# Test modules import all libraries, and pytest makes an object of every test. Passes of the garbage collector over all
# of them would take seconds; what exists when the first test begins stays to the end.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        use_shared_server()
    elif config.getoption("numprocesses", None):
        share_server()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def no_code_of_other_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget modules that a test wrote and imported: the next test may write another one of the same name."""
    written = str(tmp_path_factory.getbasetemp())
    yield
    if any(folder.startswith(written) for folder in sys.path):
        sys.path[:] = [folder for folder in sys.path if not folder.startswith(written)]
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(written):
                del sys.modules[name]
