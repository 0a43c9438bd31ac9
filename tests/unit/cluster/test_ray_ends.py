"""A driver that calls Ray after one of Ray's servers has ended."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from fivefold.cluster.errors import RayEnded
from fivefold.cluster.local_ray import Ending, LocalRay
from fivefold.cluster.session import Session
from fivefold.config.schema.machines import SchedulerConfig
from fivefold.observe.timers import PhaseTimers


class EndedRay:
    """A private Ray whose raylet has exited."""

    def ended(self) -> Ending:
        return Ending("raylet", 1)

    def keep_logs(self, folder: Path) -> None:
        pass

    def end(self, seen: object) -> None:
        pass


def test_an_error_of_the_driver_is_reported_as_the_end_of_ray(tmp_path: Path) -> None:
    own_ray = cast(LocalRay, EndedRay())
    session = Session([], tmp_path, PhaseTimers(), SchedulerConfig(), own_ray)
    with pytest.raises(RayEnded, match="its process raylet exited with 1") as caught, session:
        raise OSError("Broken pipe")
    assert str(tmp_path / "ray") in str(caught.value)
