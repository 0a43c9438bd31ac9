"""A signal that comes while Ray starts reaches the program's own handler, after Ray has connected."""

from __future__ import annotations

import signal
from types import FrameType

import pytest
import ray._private.utils
import ray._raylet

from fivefold.cluster.compat import signals_kept

ENDS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def heard() -> list[int]:
    """Return what the program's own handler has heard; the handlers of the test run come back afterwards."""
    return []


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_waits_while_ray_connects(
    number: signal.Signals, heard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    def connect(name: str) -> str:
        signal.raise_signal(number)
        # Ray's handler in C++ takes the place of any other.
        signal.signal(signal.SIGTERM, lambda number, frame: pytest.fail("Ray's handler"))
        assert number in signal.sigpending()
        return name

    monkeypatch.setattr(ray._raylet, "CoreWorker", connect)
    before = {end: signal.signal(end, handle) for end in ENDS}
    try:
        with signals_kept():
            ray._private.utils.set_sigterm_handler(lambda number, frame: pytest.fail("Ray's handler"))
            assert ray._raylet.CoreWorker("its result") == "its result"
            signal.raise_signal(number)
            assert heard == []
        assert heard == [number, number]
        assert [signal.getsignal(end) for end in ENDS] == [handle, handle]
    finally:
        for end, handler in before.items():
            signal.signal(end, handler)


def test_a_signal_before_ray_connects_is_handled_at_once(heard: list[int]) -> None:
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with signals_kept():
            signal.raise_signal(signal.SIGTERM)
            assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ray._raylet.CoreWorker.__name__ == "CoreWorker"
