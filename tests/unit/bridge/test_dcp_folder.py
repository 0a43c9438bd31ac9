"""Folders that torch.distributed.checkpoint has written are read in parts, and no code in them is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from fivefold.bridge.dcp_folder import DCPFolder

TENSORS = {
    "matrix": torch.arange(60.0).view(12, 5),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "half": torch.arange(24).view(1, 4, 6).to(torch.bfloat16),
    "transposed": torch.arange(20, dtype=torch.float64).view(4, 5).t(),
    "part of a storage": torch.arange(40.0).view(8, 5)[2:5],
    "number": torch.tensor(3.0),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint.save({**TENSORS, "object": {"a": 1}}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    return tmp_path


def test_every_part_of_every_tensor_is_what_was_saved(folder: Path) -> None:
    with DCPFolder(folder) as stored:
        assert stored.names == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert (stored.shape(name), stored.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
            for index in _indices(tuple(tensor.shape)):
                assert torch.equal(stored.read(name, *index), tensor[index]), (name, index)


def _indices(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    whole = tuple(slice(0, size) for size in shape)
    inner = tuple(slice(size // 3, size - size // 4) for size in shape)
    last = tuple(slice(size - 1, size) for size in shape)
    return [whole, inner, last]


def test_a_part_that_lies_in_several_chunks_is_put_together(tmp_path: Path) -> None:
    whole = torch.arange(2 * 6 * 4.0).view(2, 6, 4)
    _save_chunks(tmp_path, whole, [(0, 0, 0), (0, 3, 0), (1, 0, 0), (1, 3, 0)], (1, 3, 4))
    with DCPFolder(tmp_path) as stored:
        assert torch.equal(stored.read("x", slice(0, 2), slice(0, 6), slice(0, 4)), whole)
        assert torch.equal(stored.read("x", slice(1, 2), slice(2, 5), slice(1, 3)), whole[1:2, 2:5, 1:3])


def _save_chunks(folder: Path, whole: torch.Tensor, places: list[tuple[int, ...]], sizes: tuple[int, ...]) -> None:
    """Save a tensor in chunks by torch's own writer, as ranks with a chunk each would."""
    chunks = [tuple(slice(first, first + size) for first, size in zip(place, sizes, strict=True)) for place in places]
    checkpoint.save(
        {f"chunk{i}": whole[chunk].clone() for i, chunk in enumerate(chunks)},
        storage_writer=FileSystemWriter(folder),
        no_dist=True,
    )
    metadata = FileSystemReader(folder).read_metadata()
    stored = metadata.state_dict_metadata.pop("chunk0")
    stored.size, stored.chunks = whole.shape, []
    data = metadata.storage_data
    for i, place in enumerate(places):
        metadata.state_dict_metadata.pop(f"chunk{i}", None)
        stored.chunks.append(checkpoint.ChunkStorageMetadata(torch.Size(place), torch.Size(sizes)))
        index = next(index for index in data if index.fqn == f"chunk{i}")
        data[checkpoint.metadata.MetadataIndex("x", place)] = data.pop(index)
    metadata.state_dict_metadata["x"] = stored
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trace}",)


def test_code_in_the_metadata_is_not_run(folder: Path, tmp_path: Path) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    metadata.planner_data = Evil(tmp_path / "trace")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with DCPFolder(folder) as stored:
        assert torch.equal(stored.read("matrix", slice(0, 12), slice(0, 5)), TENSORS["matrix"])
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "trace")))
    with pytest.raises(ValueError, match="is not the metadata of"):
        DCPFolder(folder)
    assert not (tmp_path / "trace").exists()


def test_a_folder_that_is_not_whole_is_refused_by_its_file(folder: Path) -> None:
    data = folder / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(content[:-3])
    with pytest.raises(ValueError, match=rf"__0_0\.distcp is truncated: it has {len(content) - 3:,} bytes"):
        DCPFolder(folder)
    data.unlink()
    with pytest.raises(ValueError, match=r"__0_0\.distcp is missing"):
        DCPFolder(folder)
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(metadata[: len(metadata) // 2])
    with pytest.raises(ValueError, match=r"\.metadata is not the metadata of a checkpoint .* fetch it again"):
        DCPFolder(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"\.metadata is missing: the checkpoint was not finished"):
        DCPFolder(folder)


def test_bytes_that_are_no_tensor_are_an_error_that_names_file_and_tensor(folder: Path) -> None:
    data = folder / "__0_0.distcp"
    data.write_bytes(b"\0" * data.stat().st_size)
    with (
        DCPFolder(folder) as stored,
        pytest.raises(ValueError, match=r"__0_0\.distcp is damaged at byte [\d,]+, where matrix should be: .*"),
    ):
        stored.read("matrix", slice(0, 1), slice(0, 5))


def test_chunks_that_do_not_make_the_tensor_are_refused(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(1, 6, 4)
    _save_chunks(tmp_path, whole, [(0, 0, 0)], (1, 3, 4))
    with pytest.raises(ValueError, match=r"x in .* has 12 elements of 24"):
        DCPFolder(tmp_path)
