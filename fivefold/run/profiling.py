"""Traces of some steps: which ranks of the models that are trained record what they do, and where that is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from fivefold.config.schema.run import ProfileConfig
from fivefold.roles.models import TrainedModel
from fivefold.roles.profiler import Profiler

Recorder = Callable[[int], AbstractContextManager[object]]
"""Records the block in which a step, whose number it gets, trains."""


def recorder(config: ProfileConfig, folder: Path, models: Mapping[str, TrainedModel]) -> Recorder:
    """Return what records the steps that the recipe names.

    Args:
        config: the section of the recipe.
        folder: folder of all traces of the run.
        models: the models that are trained, by role.
    """
    return partial(_recorded, config, folder, models) if config.steps else nullcontext


@contextmanager
def _recorded(config: ProfileConfig, folder: Path, models: Mapping[str, TrainedModel], step: int) -> Iterator[None]:
    if step not in config.steps:
        yield
        return
    for model in models.values():
        model.trainer.group.call(Profiler.start, config)
    yield
    for name, model in models.items():
        model.trainer.group.call(Profiler.write, folder / f"step-{step:06}" / name)
