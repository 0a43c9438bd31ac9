"""What a verification finds, and that its message names the file."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.checkpoints import manifest
from fivefold.checkpoints.manifest import NewerCheckpointError, verify
from fivefold.checkpoints.store import CheckpointStore
from tests.unit.checkpoints.examples import save


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(CheckpointStore(tmp_path), 12).path


def test_a_whole_checkpoint_has_no_problem(checkpoint: Path) -> None:
    n_bytes: list[int] = []
    assert verify(checkpoint, deep=False) == []
    assert verify(checkpoint, deep=True, on_bytes=n_bytes.append) == []
    assert sum(n_bytes) == manifest.read(checkpoint).n_bytes
    assert sum(n_bytes) == sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()) - (
        checkpoint / "manifest.json"
    ).stat().st_size  # fmt: skip


def test_a_flipped_bit_of_any_file_is_found(checkpoint: Path, tmp_path: Path) -> None:
    for file in sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size):
        content = file.read_bytes()
        for position in {0, len(content) // 3, len(content) // 2, len(content) - 1}:
            flipped = bytearray(content)
            flipped[position] ^= 1
            file.write_bytes(flipped)
            (problem,) = verify(checkpoint, deep=True)
            assert problem.startswith(f"{file} "), (position, problem)
        file.write_bytes(content)
    assert verify(checkpoint, deep=True) == []


def test_each_flipped_bit_of_the_manifest_is_found(checkpoint: Path) -> None:
    file = checkpoint / "manifest.json"
    content = file.read_bytes()
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 4
        file.write_bytes(flipped)
        if json_or_none(bytes(flipped)) != json.loads(content):
            (problem,) = verify(checkpoint, deep=False)
            assert problem.startswith(str(file))


def json_or_none(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None


@pytest.mark.parametrize("deep", [False, True])
def test_missing_and_truncated_files_are_found(checkpoint: Path, deep: bool) -> None:
    (checkpoint / "trainer/__1_0.distcp").unlink()
    with (checkpoint / "trainer/__0_0.distcp").open("ab") as file:
        file.truncate(999)
    assert verify(checkpoint, deep=deep) == [
        f"{checkpoint}/trainer/__0_0.distcp has 999 bytes, and 1,000 were written: it is truncated or another file",
        f"{checkpoint}/trainer/__1_0.distcp is missing",
    ]


def test_a_file_that_is_a_folder_cannot_be_read(checkpoint: Path) -> None:
    (checkpoint / "empty").unlink()
    (checkpoint / "empty").mkdir()
    (problem,) = verify(checkpoint, deep=True)
    assert problem.startswith(f"{checkpoint}/empty ")


def test_a_folder_without_a_manifest_is_no_checkpoint(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    (problem,) = verify(checkpoint, deep=False)
    assert problem.startswith(f"{checkpoint}/manifest.json does not exist")
    shutil.rmtree(checkpoint)
    assert len(verify(checkpoint, deep=False)) == 1


def test_a_newer_format_is_refused(checkpoint: Path) -> None:
    manifest.write(checkpoint, replace(manifest.read(checkpoint), format=manifest.FORMAT + 1))
    with pytest.raises(NewerCheckpointError, match=r"manifest\.json has format 3, .* use the newer version"):
        manifest.read(checkpoint)
    assert len(verify(checkpoint, deep=True)) == 1
