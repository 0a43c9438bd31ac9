"""Where a run's weights are saved, and which of them stay."""

from __future__ import annotations

from pathlib import Path

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


def test_all_folders_stay_without_a_limit(tmp_path: Path) -> None:
    every = saver(tmp_path, None)
    for step in (1, 2, 3):
        every.save(step)
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000003"]
