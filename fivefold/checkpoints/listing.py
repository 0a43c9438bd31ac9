"""What a folder of checkpoints holds, for `fivefold checkpoints`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fivefold.checkpoints import manifest
from fivefold.checkpoints.manifest import DamagedCheckpointError, Manifest, NewerCheckpointError
from fivefold.checkpoints.run_state import MetricHistory, RunState
from fivefold.checkpoints.store import Checkpoint, CheckpointStore, checkpoint_in, what_is_in
from fivefold.config.paths import user_path


@dataclass(frozen=True)
class Row:
    """A checkpoint as a table shows it."""

    checkpoint: Checkpoint
    content: Manifest | None
    """The manifest; None if it cannot be read."""
    problems: tuple[str, ...]
    """What is wrong with it, one line for each file; none if it is whole."""


@dataclass(frozen=True)
class Listing:
    """The checkpoints of a run, or a single one."""

    rows: tuple[Row, ...]
    """The oldest step first."""
    history: MetricHistory | None
    """Values of the metric of `recover.keep_best` by step; None if the run kept none."""

    @property
    def best(self) -> int | None:
        """The step that has the best value of the metric of `recover.keep_best`."""
        steps = [row.checkpoint.step for row in self.rows]
        return None if self.history is None else self.history.best(steps)


def find_checkpoints(folder: str | Path) -> list[Checkpoint]:
    """Return the checkpoints of a run's folder, of its folder `checkpoints`, or of a checkpoint's own folder.

    Raises:
        ValueError: there is none; it says what is there.
    """
    path = user_path(folder).resolve()
    if not path.is_dir():
        raise ValueError(f"{path} {'is a file' if path.exists() else 'does not exist'}: give the folder of a run")
    for root in (path / "checkpoints", path):
        if found := CheckpointStore(root).all():
            return found
    single = checkpoint_in(path)
    if single is None:
        raise ValueError(f"{path} holds no complete checkpoint; {what_is_in(path)}")
    return [single]


def examine(
    checkpoints: list[Checkpoint], *, deep: bool, on_bytes: Callable[[int], None] = lambda count: None
) -> Listing:
    """Compare the files of checkpoints with their manifests.

    Args:
        checkpoints: the checkpoints.
        deep: whether the checksum of every file is compared; otherwise only the sizes are.
        on_bytes: called with the number of bytes of each block that was read, from several threads.
    """
    rows = [_row(checkpoint, deep, on_bytes) for checkpoint in checkpoints]
    whole = [row.checkpoint for row in rows if not row.problems]
    return Listing(tuple(rows), history(whole))


def history(checkpoints: list[Checkpoint]) -> MetricHistory | None:
    """Return the values of the metric of `recover.keep_best` that the newest of `checkpoints` knows."""
    return RunState.read(checkpoints[-1].path).kept_metric if checkpoints else None


def choose(checkpoints: list[Checkpoint], which: str) -> Checkpoint:
    """Return one of `checkpoints`: `latest`, `best`, or the one of a step.

    Raises:
        ValueError: there is no such checkpoint.
    """
    if which == "latest":
        return checkpoints[-1]
    steps = {str(each.step): each for each in checkpoints}
    listed = ", ".join(steps)
    if which != "best":
        if which not in steps:
            raise ValueError(f"there is no checkpoint {which!r}: give latest, best, or one of the steps {listed}")
        return steps[which]
    values = history(checkpoints)
    step = None if values is None else values.best([each.step for each in checkpoints])
    if step is None:
        raise ValueError(
            f"no checkpoint is the best one, for the run kept no metric (recover.keep_best): give latest or one of the "
            f"steps {listed}"
        )
    return steps[str(step)]


def _row(checkpoint: Checkpoint, deep: bool, on_bytes: Callable[[int], None]) -> Row:
    try:
        content = checkpoint.manifest()
    except (DamagedCheckpointError, NewerCheckpointError) as error:
        return Row(checkpoint, None, (str(error),))
    return Row(checkpoint, content, tuple(manifest.compare(checkpoint.path, content, deep=deep, on_bytes=on_bytes)))
