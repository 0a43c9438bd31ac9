"""Checkpoints are committed whole or not at all, whatever ends the process."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from fivefold.checkpoints.manifest import verify
from fivefold.checkpoints.store import CheckpointStore
from tests.unit.checkpoints.examples import killed_at, manifest_of, save, write_files


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.all()]


def test_only_a_committed_folder_is_the_latest(store: CheckpointStore) -> None:
    assert (store.all(), store.latest()) == ([], None)
    first = save(store, 5)
    folder = store.begin(10)
    write_files(folder, 10)
    assert store.latest() == first
    second = store.commit(folder, manifest_of(folder, 10))
    assert store.latest() == second
    assert second.path.name == "step-000010"
    assert second.manifest().step == 10
    assert steps(store) == [5, 10]


def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint_as_the_latest(tmp_path: Path) -> None:
    ends = []
    for number in itertools.count(1):
        store = CheckpointStore(tmp_path / f"kill-{number}" / "checkpoints")
        save(store, 1)
        save(store, 2)

        def save_and_prune(store: CheckpointStore = store) -> None:
            save(store, 3)
            store.prune(1)

        was_killed = killed_at(number, store.root, save_and_prune)
        latest = store.latest()
        assert latest is not None
        for checkpoint in store.all():
            assert verify(checkpoint.path, deep=True) == [], number
        ends.append((latest.step, len(store.all())))
        again = store.latest().step + 1  # type: ignore[union-attr]
        save(store, again)
        store.prune(1)
        assert [path.name for path in store.root.iterdir()] == [f"step-{again:06d}"]
        if not was_killed:
            break
    assert ends[0] == (2, 2)
    assert ends[-1] == (3, 1)
    assert ends == sorted(ends, key=lambda end: (end[0], -end[1] if end[0] == 3 else 0))
    assert {(2, 2), (3, 3), (3, 2), (3, 1)} <= set(ends)


def test_an_incomplete_folder_does_not_become_a_checkpoint(store: CheckpointStore) -> None:
    save(store, 1)
    folder = store.begin(2)
    write_files(folder, 2)
    content = manifest_of(folder, 2)
    (folder / "trainer/__0_0.distcp").unlink()
    (folder / "trainer/__1_0.distcp").write_bytes(b"short")
    (folder / "stray").write_bytes(b"")
    with pytest.raises(ValueError, match="same file system") as caught:
        store.commit(folder, content)
    for words in ("__0_0.distcp is missing", "__1_0.distcp has 5 bytes", "stray is not in the manifest"):
        assert words in str(caught.value)
    assert steps(store) == [1]


def test_a_committed_checkpoint_is_never_written_over(store: CheckpointStore) -> None:
    saved = save(store, 1)
    with pytest.raises(ValueError, match="step-000001 is a committed checkpoint"):
        store.begin(1)
    assert verify(saved.path, deep=True) == []


def test_the_newest_and_the_protected_checkpoints_are_kept_after_a_restart_too(store: CheckpointStore) -> None:
    for step in (1, 2, 3, 4, 1_000_000):
        save(store, step)
    assert store.prune(2, protected=[1]) == [2, 3]
    assert steps(store) == [1, 4, 1_000_000]
    restarted = CheckpointStore(store.root)
    save(restarted, 1_000_001)
    assert restarted.prune(2, protected=[1]) == [4]
    assert steps(restarted) == [1, 1_000_000, 1_000_001]
    assert restarted.prune(2) == [1]
    assert restarted.prune(5) == []


def test_files_and_folders_of_the_user_are_left_alone(store: CheckpointStore) -> None:
    store.root.mkdir()
    (store.root / "notes.txt").write_text("mine")
    (store.root / "step-last").mkdir()
    save(store, 1)
    shutil.copytree(store.path(1), store.root / "step-000001-copy")
    save(store, 2)
    store.prune(1)
    assert {path.name for path in store.root.iterdir()} == {"notes.txt", "step-last", "step-000001-copy", "step-000002"}
