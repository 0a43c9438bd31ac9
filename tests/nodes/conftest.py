from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.nodes.cluster import PretendCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[PretendCluster]:
    """Four machines of eight GPUs. A test that kills one starts another in its place."""
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux has all addresses of 127.0.0.0/8 on its loopback interface")
    with PretendCluster.running(4, n_gpus=8) as cluster:
        yield cluster
