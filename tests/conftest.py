"""Set-up of all tests: exit statuses of child processes are kept, as in the command line, and imports are quick."""

from __future__ import annotations

import gc

import pytest

from fivefold.cluster.interrupt import keep_exit_statuses

keep_exit_statuses()
# Test modules import all libraries, and pytest makes an object of every test. Passes of the garbage collector over all
# of them would take seconds; what exists when the first test begins stays to the end.
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()
