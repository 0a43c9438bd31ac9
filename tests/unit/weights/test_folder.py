"""Weights for servers: all replicas of a node read one copy in memory, which is then removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.weights import folder as folder_module
from fivefold.weights.folder import PREFIX, NodePlace, WeightFolder

LONGEST_S = 120.0
"""Most seconds that a wait for another thread may take, which only a failure uses up."""
FILES = {"model-1.safetensors": b"one", "model-2.safetensors": b"two", "config.json": b"{}"}
WEIGHTS = [("a", torch.zeros(2)), ("b", torch.ones(3))]


class Saver:
    """Writes files that stand for the weights, and counts how often."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def __call__(self, folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
        folder.mkdir(parents=True)
        self.seen.append([name for name, _ in weights])
        for name, data in FILES.items():
            (folder / name).write_bytes(data)


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(folder_module, "SHARED_MEMORY", folder)
    return folder


def test_replicas_of_a_node_read_the_same_files(memory: Path) -> None:
    count, save = 3, Saver()
    folders = [WeightFolder(NodePlace("run", index, count), save, 100) for index in range(count)]
    all_read, n_given = threading.Barrier(count), [0] * count

    def stream(index: int) -> Iterator[tuple[str, Tensor]]:
        for item in WEIGHTS:
            n_given[index] += 1
            yield item

    def read(index: int) -> list[tuple[Path, dict[str, int]]]:
        found = []
        for version in range(4):
            with folders[index].holding(stream(index), version) as own:
                assert {file.name: file.read_bytes() for file in own.iterdir()} == FILES
                found.append((own, {file.name: file.stat().st_ino for file in own.iterdir()}))
                all_read.wait(LONGEST_S)
            all_read.wait(LONGEST_S)
        return found

    with ThreadPoolExecutor(count) as threads:
        by_replica = list(threads.map(read, range(count), timeout=LONGEST_S))
    for of_version in zip(*by_replica, strict=True):
        paths, inodes = zip(*of_version, strict=True)
        assert len(set(paths)) == count
        assert all(found == inodes[0] for found in inodes)
    assert save.seen == [["a", "b"]] * 4
    assert n_given == [8] * count
    assert list(memory.iterdir()) == []


def test_a_replica_that_has_read_keeps_the_files_of_the_others(memory: Path) -> None:
    folders = [WeightFolder(NodePlace("run", index, 2), Saver(), 100) for index in range(2)]
    with folders[0].holding(WEIGHTS, 5):
        pass
    with folders[1].holding(WEIGHTS, 5) as own:
        assert {file.name for file in own.iterdir()} == FILES.keys()
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize("names", [("ours", "theirs"), ("theirs", "ours")])
def test_runs_on_the_same_node_read_their_own_files(memory: Path, names: tuple[str, str]) -> None:
    first, second = (WeightFolder(NodePlace(name, 0, 1), Saver(), 100) for name in names)
    with first.holding(WEIGHTS, 1) as one, second.holding(WEIGHTS, 1) as other:
        found = [path.parent.parent.name for path in (one, other)]
    assert found == [f"{PREFIX}{name}" for name in names]
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize("where", ["weights", "block"])
def test_a_failure_leaves_no_files_of_its_own(memory: Path, where: str) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from WEIGHTS
        if where == "weights":
            raise ValueError("the stream broke")

    folder = WeightFolder(NodePlace("run", 0, 2), Saver(), 100)
    with pytest.raises(ValueError, match="broke"), folder.holding(broken(), 0) as own:
        raise ValueError(f"the server broke on {own}")
    if where == "block":  # the links of the other replica stay
        assert [path.name for path in memory.glob("*/0/*")] == ["1"]
    else:
        assert list(memory.iterdir()) == []


@pytest.mark.parametrize(("index", "is_removed"), [(0, True), (1, False)])
def test_replica_0_removes_the_folders_of_killed_runs(memory: Path, index: int, is_removed: bool) -> None:
    living = WeightFolder(NodePlace("living", 0, 2), Saver(), 100)
    with living.holding(WEIGHTS, 3):
        pass
    abandoned, in_use, other = memory / f"{PREFIX}dead", memory / f"{PREFIX}living", memory / "someone-elses"
    for folder in (abandoned, other):
        (folder / "3" / "0").mkdir(parents=True)
    WeightFolder(NodePlace("run", index, 2), Saver(), 100)
    assert abandoned.exists() is not is_removed
    assert (in_use / "3" / "1").exists()
    assert other.exists()


def test_a_lock_ends_with_its_process(memory: Path) -> None:
    abandoned = memory / f"{PREFIX}dead"
    abandoned.mkdir()
    lock = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); print(1, flush=True)"
    command = [sys.executable, "-c", f"{lock}; input()", str(abandoned)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    WeightFolder(NodePlace("run", 0, 1), Saver(), 100)
    assert abandoned.exists()
    holder.kill()
    holder.communicate()
    WeightFolder(NodePlace("run", 0, 1), Saver(), 100)
    assert not abandoned.exists()


def before_next(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, action: Callable[[], object]) -> None:
    """Let `action` happen right before the next call of `module.name`, as another process may do it."""
    real = getattr(module, name)

    def after_action(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(module, name, real)
        action()
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, after_action)


def test_a_folder_that_another_new_run_removes_meanwhile_is_passed_over(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned = memory / f"{PREFIX}dead"
    abandoned.mkdir()
    before_next(monkeypatch, os, "open", abandoned.rmdir)
    WeightFolder(NodePlace("run", 0, 1), Saver(), 100)
    assert not abandoned.exists()


def test_another_users_folder_is_left_alone(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise PermissionError("Permission denied")

    (memory / f"{PREFIX}theirs").mkdir()
    before_next(monkeypatch, os, "open", refuse)
    WeightFolder(NodePlace("run", 0, 1), Saver(), 100)
    assert (memory / f"{PREFIX}theirs").exists()


@pytest.mark.parametrize(("module", "call"), [(os, "open"), (fcntl, "flock")])
def test_a_folder_that_another_run_removes_before_it_is_locked_is_made_again(
    memory: Path, monkeypatch: pytest.MonkeyPatch, module: Any, call: str
) -> None:
    folder, root = WeightFolder(NodePlace("run", 0, 1), Saver(), 100), memory / f"{PREFIX}run"
    for version in range(2):
        before_next(monkeypatch, module, call, lambda: shutil.rmtree(root))
        with folder.holding(WEIGHTS, version) as own:
            WeightFolder(NodePlace("other", 0, 1), Saver(), 100)
            assert {file.name for file in own.iterdir()} == FILES.keys(), "another run takes the folder for abandoned"
    assert list(memory.iterdir()) == []


def test_a_replica_that_is_done_late_does_not_remove_the_next_updates_folder(memory: Path) -> None:
    def save(path: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
        with suppress(OSError):
            (memory / f"{PREFIX}run").rmdir()
        Saver()(path, weights)

    folder = WeightFolder(NodePlace("run", 0, 1), save, 100)
    with folder.holding(WEIGHTS, 0) as own:
        WeightFolder(NodePlace("other", 0, 1), Saver(), 100)
        assert own.exists(), "the folder is not the one that was locked"


def test_the_folder_of_the_next_update_is_not_taken_for_the_abandoned_one_before_it(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living = WeightFolder(NodePlace("living", 0, 1), Saver(), 100)
    with ExitStack() as updates:
        first = updates.enter_context(ExitStack())
        first.enter_context(living.holding(WEIGHTS, 0))

        def update_again() -> None:
            first.close()
            updates.enter_context(living.holding(WEIGHTS, 1))

        before_next(monkeypatch, fcntl, "flock", update_again)
        WeightFolder(NodePlace("new", 0, 1), Saver(), 100)
        assert (memory / f"{PREFIX}living" / "1" / "0").exists()


def with_room(monkeypatch: pytest.MonkeyPatch, rooms: dict[Path, int]) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=rooms[Path(path)]))
    monkeypatch.setattr(folder_module.tempfile, "gettempdir", lambda: str(list(rooms)[-1]))


def test_weights_go_where_there_is_room(memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with_room(monkeypatch, {memory: 999, temporary: 2000})
    with WeightFolder(NodePlace("run", 0, 1), Saver(), 1000).holding(WEIGHTS, 0) as own:
        assert own.is_relative_to(temporary)
    with WeightFolder(NodePlace("run", 0, 1), Saver(), 900).holding(WEIGHTS, 0) as own:
        assert own.is_relative_to(memory)
    with pytest.raises(
        ValueError, match=r"2\.0 GB of files, for which there is no room .*--shm-size.*TMPDIR"
    ) as caught:
        WeightFolder(NodePlace("run", 0, 1), Saver(), 2_000_000_000)
    assert str(memory) in str(caught.value)
    assert str(temporary) in str(caught.value)


def test_replicas_that_see_room_in_different_folders_find_the_same_files(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    rooms = {memory: 2000, temporary: 2000}
    with_room(monkeypatch, rooms)
    first = WeightFolder(NodePlace("run", 0, 2), Saver(), 1000)
    rooms[memory] = 500  # another run has taken the room meanwhile
    second = WeightFolder(NodePlace("run", 1, 2), Saver(), 1000)
    found: list[set[str]] = []

    def read() -> None:
        with second.holding(WEIGHTS, 0) as own:
            found.append({file.name for file in own.iterdir()})

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with first.holding(WEIGHTS, 0):
        reader.join(LONGEST_S)
    assert found == [set(FILES)]


@pytest.mark.parametrize("trap", ["open to others", "of another user", "link"])
def test_a_folder_that_another_user_could_change_is_refused(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    folder, root = WeightFolder(NodePlace("run", 0, 1), Saver(), 100), memory / f"{PREFIX}run"
    if trap == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        root.symlink_to(tmp_path / "theirs")
    else:
        root.mkdir(mode=0o777 if trap == "open to others" else 0o700)
        root.chmod(0o777 if trap == "open to others" else 0o700)
    if trap == "of another user":
        monkeypatch.setattr(os, "geteuid", lambda: root.stat().st_uid + 1)
    with pytest.raises(RuntimeError, match=r"was made by another user .*remove it"), folder.holding(WEIGHTS, 0):
        raise AssertionError("weights were written")


def test_only_the_user_may_enter_the_folder_of_the_weights(memory: Path) -> None:
    with WeightFolder(NodePlace("run", 0, 1), Saver(), 100).holding(WEIGHTS, 0):
        assert (memory / f"{PREFIX}run").stat().st_mode & 0o777 == 0o700
