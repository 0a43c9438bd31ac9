"""Where a run's weights are saved, and which of them stay."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fivefold.checkpoints.weights import WeightSaver
from fivefold.config.schema.run import SaverConfig


def saver(folder: Path, keep: int | None) -> WeightSaver:
    def save(target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text(target.name)

    return WeightSaver(SaverConfig(max_to_keep=keep), folder, save)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_folder_is_replaced_by_default(tmp_path: Path) -> None:
    one = saver(tmp_path / "weights", SaverConfig().max_to_keep)
    one.save(10)
    one.save(20)
    assert names(tmp_path / "weights") == ["config.json"]


def test_the_newest_folders_stay(tmp_path: Path) -> None:
    for step in (8, 9, 10, 1_000_000):
        # A saver of its own each time: a run that is started again keeps as many.
        saver(tmp_path, 2).save(step)
    assert names(tmp_path) == ["step-000010", "step-1000000"]


def test_an_old_folder_with_a_file_in_use_goes_at_once_and_its_files_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_use(folder: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(16, "Device or resource busy", str(folder))

    monkeypatch.setattr(shutil, "rmtree", in_use)
    for step in (1, 2, 3):
        saver(tmp_path, 2).save(step)
    left, *kept = names(tmp_path)
    assert left.startswith(".deleted-step-000001-")
    assert kept == ["step-000002", "step-000003"]
    monkeypatch.undo()
    saver(tmp_path, 2).save(4)
    assert names(tmp_path) == ["step-000003", "step-000004"]


def test_all_folders_stay_without_a_limit(tmp_path: Path) -> None:
    every = saver(tmp_path, None)
    for step in (1, 2, 3):
        every.save(step)
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000003"]


@pytest.mark.parametrize("keep", [2, None])
def test_the_one_model_of_an_earlier_start_goes_when_more_are_kept(tmp_path: Path, keep: int | None) -> None:
    saver(tmp_path, 1).save(10)
    assert names(tmp_path) == ["config.json"]
    for step in (20, 30):
        saver(tmp_path, keep).save(step)
    assert names(tmp_path) == ["step-000020", "step-000030"]
