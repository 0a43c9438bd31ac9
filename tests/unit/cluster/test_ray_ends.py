"""A driver that calls Ray after one of Ray's servers has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.cluster.errors import RayEnded
from fivefold.cluster.local_ray import Ending, LocalRay
from fivefold.cluster.session import Session
from fivefold.config.schema.machines import SchedulerConfig
from fivefold.observe.private_folder import PrivateFolder
from fivefold.observe.timers import PhaseTimers


class EndedRay(LocalRay):
    """A private Ray whose raylet has exited."""

    def ended(self) -> Ending:
        return Ending("raylet", 1)

    def end(self, seen: object = ()) -> None:
        pass


def test_an_error_of_the_driver_is_reported_as_the_end_of_ray(tmp_path: Path) -> None:
    its_logs = tmp_path / "its logs"
    its_logs.mkdir()
    (its_logs / "raylet.out").write_text("exited")
    own_ray = EndedRay(PrivateFolder.create(tmp_path), its_logs, {})
    session = Session([], tmp_path, PhaseTimers(), SchedulerConfig(), own_ray)
    with pytest.raises(RayEnded, match="its process raylet exited with 1") as caught, session:
        raise OSError("Broken pipe")
    assert str(tmp_path / "ray") in str(caught.value)
    assert (tmp_path / "ray" / "raylet.out").read_text() == "exited"
