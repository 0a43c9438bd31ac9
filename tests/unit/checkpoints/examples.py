"""Small checkpoints, and a child process that is killed in the middle of its work."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from fivefold.checkpoints.fingerprints import Fingerprints
from fivefold.checkpoints.manifest import FileEntry, Manifest
from fivefold.checkpoints.run_state import MetricHistory, RunState
from fivefold.checkpoints.store import Checkpoint, CheckpointStore
from fivefold.config.load import resolved_yaml
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.sampler import SamplerState

FINGERPRINTS = Fingerprints(config="c", weights="w", tokenizer="t")
STEPS_PER_EPOCH = 20


def run_state(step: int = 12, **changed: object) -> RunState:
    """Return the state of a run of 50 steps with 20 in an epoch."""
    values: dict[str, object] = {
        "step": step,
        "total_steps": 50,
        "sampler": SamplerState(
            seed=1, shuffle=True, n_items=40, fingerprint="d",
            batches=[[40 // STEPS_PER_EPOCH, step]],
        ),
        "weight_version": step,
        "skips_in_a_row": 1,
        "seconds": 61.5,
        "began": "2026-05-04T10:00:00+00:00",
        "versions": {"fivefold": "1"},
        "backend": "megatron:d2",
        "world_size": 2,
        "fingerprints": FINGERPRINTS,
        "evaluation_before": {"accuracy": 0.25},
        "kept_metric": MetricHistory("eval/accuracy", {4: 0.5, 8: 0.75}),
    }  # fmt: skip
    return RunState(**{**values, **changed})  # type: ignore[arg-type]


def manifest_of(folder: Path, step: int) -> Manifest:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {path.relative_to(folder).as_posix(): FileEntry.of(path) for path in files}
    return Manifest(step=step, saved="2026-05-04T10:00:00+00:00", model="c", files=entries)


def write_files(folder: Path, step: int, size: int = 1000) -> None:
    (folder / "trainer").mkdir()
    for rank in range(2):
        (folder / f"trainer/__{rank}_0.distcp").write_bytes(bytes([step % 256, rank]) * (size // 2))
    (folder / "empty").write_bytes(b"")


def save(
    store: CheckpointStore, step: int, recipe: TrainRecipe | None = None, state: RunState | None = None
) -> Checkpoint:
    """Commit a checkpoint of `step`."""
    folder = store.begin(step)
    write_files(folder, step)
    if recipe is not None:
        (folder / "recipe.yaml").write_text(resolved_yaml(recipe))
    (state or run_state(step)).write(folder)
    return store.commit(folder, manifest_of(folder, step))


def killed_at(number: int, root: Path, work: Callable[[], object]) -> bool:
    """Run `work` in a child that is killed before its file-system operation of this number, counted from 1, in `root`.

    Returns:
        whether it was killed; otherwise `work` has ended.
    """
    child = os.fork()
    if child == 0:
        count = 0

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            if event.startswith(("os.", "open", "shutil.")) and str(root) in str(arguments):
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(watch)
            work()
        except BaseException as error:  # noqa: BLE001 - a child that returned would run the other tests again
            sys.stderr.write(repr(error))
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0
