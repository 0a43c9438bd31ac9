"""Traces of some steps: which ranks of the roles that are trained record what they do, and where that is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fivefold.config.schema.run import ProfileConfig
from fivefold.roles.models import TrainedModel


@dataclass(frozen=True)
class StepProfiler:
    """Records the steps that the recipe names."""

    config: ProfileConfig
    folder: Path
    """Folder of all traces of the run."""
    roles: Mapping[str, TrainedModel]

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record the block, if step `step` is to be recorded."""
        if step not in self.config.steps:
            yield
            return
        for role in self.roles.values():
            role.start_profile(self.config)
        yield
        for name, role in self.roles.items():
            role.write_profile(self.folder / f"step-{step:06}" / name)
