"""What the tests of experience have in common."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from fivefold.roles import remote_batch


@pytest.fixture
def local_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let columns stay in this process, without an object store."""
    monkeypatch.setattr(remote_batch, "put", lambda value: value)
    monkeypatch.setattr(remote_batch, "fetch", lambda kept: kept.result()[1] if isinstance(kept, Future) else kept)
