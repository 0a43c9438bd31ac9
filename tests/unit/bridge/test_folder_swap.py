"""A saved model takes the place of an earlier one at once; what fails or is killed does not harm the earlier one."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fivefold.bridge import folder_swap
from fivefold.bridge.hf_reader import HFWeights
from fivefold.bridge.hf_writer import save_hf
from fivefold.bridge.shard_plan import TensorSpec


@pytest.fixture(params=["exchange", "two renames"])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a folder, on a file system that exchanges names and on one that does not."""
    if request.param == "two renames":
        monkeypatch.setattr(folder_swap, "_exchange", lambda one, other: False)
    return tmp_path / "model"


def put(target: Path, text: str) -> None:
    partial = folder_swap.begin(target)
    (partial / "file").write_text(text)
    folder_swap.commit(partial, target)


def test_a_folder_takes_the_place_of_the_earlier_one(target: Path) -> None:
    for text in ("first", "second", "third"):
        put(target, text)
        assert (target / "file").read_text() == text
        assert list(target.parent.iterdir()) == [target]


def test_this_file_system_exchanges_names_at_once(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert folder_swap._exchange(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one/other").exists()
    assert (tmp_path / "other/one").exists()
    with pytest.raises(FileNotFoundError, match="none"):
        folder_swap._exchange(tmp_path / "one", tmp_path / "none")


def test_what_a_killed_save_has_written_is_removed(target: Path) -> None:
    put(target, "first")
    partial = folder_swap.begin(target)
    (folder_swap.begin(partial / "inner") / "half").touch()
    (folder_swap.begin(partial) / "half").touch()
    put(target, "second")  # the process above was killed
    assert [file.name for file in target.iterdir()] == ["file"]
    assert list(target.parent.iterdir()) == [target]


class KilledError(BaseException):
    """Stands for the end of the process: nothing after it runs but what handles any exception."""


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"
    put(target, "first")
    with monkeypatch.context() as patched:
        patched.setattr(folder_swap, "_exchange", lambda one, other: False)
        rename = Path.rename

        def killed_after(self: Path, to: Path) -> None:
            rename(self, to)
            raise KilledError

        patched.setattr(Path, "rename", killed_after)
        with pytest.raises(KilledError):
            put(target, "second")
        assert not target.exists()
    folder_swap.begin(target)
    assert (target / "file").read_text() == "first"


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Return a folder in which a save takes milliseconds."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.usefixtures("target")
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_model(in_memory: Path) -> None:
    target, source = in_memory / "model", in_memory / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    # Made here, because a forked process must not start threads of its own.
    models = [{f"layer.{i}": torch.full((100_000,), value) for i in range(8)} for value in (1.0, 2.0)]
    tensors = {name: TensorSpec.of(tensor) for name, tensor in models[0].items()}

    def save_for_ever() -> None:
        for model in itertools.cycle(models):
            save_hf(target, model.items(), source, tensors=tensors, max_shard_bytes=1_000_000)

    save_hf(target, models[0].items(), source, tensors=tensors)
    for seed in range(10):
        process = multiprocessing.get_context("fork").Process(target=save_for_ever)
        process.start()
        time.sleep(random.Random(seed).uniform(0.005, 0.08))
        process.kill()
        process.join()
        if not target.exists():
            # Only two renames leave this, and the next save, which is killed too, begins by moving the folder back.
            assert folder_swap._old(target).exists()
            folder_swap.begin(target)
        with HFWeights(target) as weights:
            found = {float(weights.read(name).unique()) for name in tensors}
        assert found in ({1.0}, {2.0})
    save_hf(target, models[0].items(), source, tensors=tensors)
    assert {*target.parent.iterdir()} == {source, target}


def test_a_folder_that_cannot_be_moved_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_swap, "_exchange", lambda one, other: False)
    target = tmp_path / "model"
    put(target, "first")
    partial = folder_swap.begin(target)
    partial.rmdir()
    with pytest.raises(FileNotFoundError):
        folder_swap._put(partial, target)
    assert (target / "file").read_text() == "first"


def test_folders_with_similar_names_are_left_alone(target: Path) -> None:
    others = [target.with_name(name) for name in ("model.partial-1", ".models.partial-1", ".other", "model.old")]
    for other in others:
        other.mkdir()
    put(target, "first")
    assert {*target.parent.iterdir()} == {target, *others}


def test_no_two_saves_write_to_folders_of_one_name(target: Path) -> None:
    names = []
    for _ in range(3):
        partial = folder_swap.begin(target)
        names.append(partial.name)
        folder_swap.commit(partial, target)
    assert len({*names}) == 3
