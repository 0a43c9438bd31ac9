"""Training state on disk, against plain tensors, torch's own reader, and disks that are full."""

from __future__ import annotations

import itertools
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from xxhash import xxh3_128

from fivefold.bridge.pieces import Piece
from fivefold.engine.state.dcp_files import WrittenPart, finish
from fivefold.engine.state.state_store import HostSnapshot, StateWriter, StoredRange
from fivefold.engine.state.stored_state import StoredState

SHAPE = (37, 50)


def whole_piece(shape: tuple[int, ...], name: str = "w") -> Piece:
    return Piece(name, shape, (0,) * len(shape), shape, 0)


def ranges(shape: tuple[int, ...], cuts: tuple[int, ...], kind: str = "param") -> Iterator[StoredRange]:
    """Yield a tensor as the flat ranges into which a distributed optimizer cuts it, one for each rank."""
    n_elements = torch.Size(shape).numel()
    for begin, end in itertools.pairwise(sorted({0, n_elements, *cuts})):
        yield StoredRange(kind, begin, end - begin, tuple(whole_piece(shape).within(begin, end)))


def snapshots(folder: Path, tensor: Tensor, cuts: tuple[int, ...] = (700, 1333)) -> list[HostSnapshot]:
    return [
        StateWriter(rank, [part]).snapshot(
            folder,
            [tensor.flatten()[part.begin : part.begin + part.n_elements]],
            {f"seed/{rank}": torch.tensor([rank])},
        )
        for rank, part in enumerate(ranges(tuple(tensor.shape), cuts))
    ]


def save(folder: Path, tensor: Tensor, cuts: tuple[int, ...] = (700, 1333)) -> list[WrittenPart]:
    parts = [snapshot.write() for snapshot in snapshots(folder, tensor, cuts)]
    finish(folder, parts)
    return parts


@pytest.fixture
def tensor() -> Tensor:
    return torch.arange(torch.Size(SHAPE).numel(), dtype=torch.float32).view(SHAPE)


def test_torch_reads_what_was_written(tmp_path: Path, tensor: Tensor) -> None:
    save(tmp_path, tensor)
    loaded = {"param/w": torch.zeros(SHAPE), "seed/2": torch.zeros(1, dtype=torch.int64)}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert loaded["param/w"].equal(tensor)
    assert loaded["seed/2"].tolist() == [2]
    dcp_to_torch_save(tmp_path, tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt")
    assert state.keys() == {"param/w", "seed/0", "seed/1", "seed/2"}
    assert state["param/w"].equal(tensor)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 37 * 50 - 1), max_size=5),
    rows=st.tuples(st.integers(0, 37), st.integers(0, 37)),
    columns=st.tuples(st.integers(0, 50), st.integers(0, 50)),
)
def test_any_part_of_a_tensor_is_read_from_any_ranges(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    tensor, folder = torch.randn(SHAPE), tmp_path_factory.mktemp("state")
    save(folder, tensor, tuple(cuts))
    stored = StoredState(folder)
    assert (stored.names, stored.shape("w"), stored.file("w")) == ({"w"}, SHAPE, "__0_0.distcp")
    assert stored.read("w").equal(tensor)
    assert stored.read("w", slice(*rows)).equal(tensor[slice(*rows)])
    assert stored.read("w", slice(None), slice(*columns)).equal(tensor[:, slice(*columns)])
    pieces = [part for begin in range(0, tensor.numel(), 333) for part in whole_piece(SHAPE).within(begin, begin + 333)]
    targets = [(piece, torch.full(piece.sizes, torch.nan)) for piece in pieces]
    stored.fill(targets)
    assert all(target.equal(tensor[piece.index]) for piece, target in targets)


def test_large_pieces_are_read_in_blocks_and_several_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fivefold.engine.state.dcp_files._FILE_BYTES", 2000)
    monkeypatch.setattr("fivefold.engine.state.stored_state._BLOCK", 64)
    tensor = torch.randn(SHAPE)
    parts = save(tmp_path, tensor, (100, 700, 1333))
    assert {len(part.files) for part in parts} > {1}
    target = torch.zeros(SHAPE)
    StoredState(tmp_path).fill([(whole_piece(SHAPE), target)])
    assert target.equal(tensor)


def test_files_have_their_sizes_and_digests(tmp_path: Path, tensor: Tensor) -> None:
    parts = [snapshot.write() for snapshot in snapshots(tmp_path, tensor)]
    files = finish(tmp_path, parts)
    assert {file.name for file in files} == {path.name for path in tmp_path.iterdir()}
    for file in files:
        content = (tmp_path / file.name).read_bytes()
        assert (file.n_bytes, file.xxh3_128) == (len(content), xxh3_128(content).hexdigest())


def test_a_snapshot_is_of_the_moment_at_which_it_was_taken(tmp_path: Path, tensor: Tensor) -> None:
    wanted = tensor.clone()
    taken = snapshots(tmp_path, tensor)
    tensor.zero_()
    written: list[WrittenPart] = []
    threads = [threading.Thread(target=lambda one=one: written.append(one.write())) for one in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    finish(tmp_path, written)
    assert StoredState(tmp_path).read("w").equal(wanted)


def test_memory_is_used_again_for_the_next_snapshot(tmp_path: Path, tensor: Tensor) -> None:
    writer = StateWriter(0, list(ranges(SHAPE, ())))
    writer.snapshot(tmp_path / "a", [tensor], {}).write()
    part = writer.snapshot(tmp_path / "b", [tensor + 1], {}).write()
    finish(tmp_path / "b", [part])
    assert StoredState(tmp_path / "b").read("w").equal(tensor + 1)
    pending = writer.snapshot(tmp_path / "c", [tensor], {})
    with pytest.raises(ValueError, match=f"the snapshot for {tmp_path / 'c'} is not written yet"):
        writer.snapshot(tmp_path / "d", [tensor], {})
    del pending  # given up: its memory is free again
    writer.snapshot(tmp_path / "d", [tensor], {})


@pytest.mark.parametrize("chunk", [64, 2**24])
def test_state_is_written_without_a_copy_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("fivefold.engine.state.dcp_files._FILE_BYTES", 2000)
    monkeypatch.setattr("fivefold.engine.state.state_store.CHUNK_ELEMENTS", chunk)
    tensor, parts, given = torch.randn(SHAPE), [], 0

    def values(part: StoredRange) -> Iterator[Tensor]:
        nonlocal given
        given += 1
        yield tensor.flatten()[part.begin : part.begin + part.n_elements]

    for rank, part in enumerate(ranges(SHAPE, (700, 1333))):
        snapshot = StateWriter(rank, [part]).write(tmp_path, values(part), {f"seed/{rank}": torch.tensor([rank])})
        parts.append(snapshot.write())
    assert given == 3
    assert {len(part.files) for part in parts} == {2}
    files = finish(tmp_path, parts)
    assert {file.name: file.n_bytes for file in files} == {
        path.name: path.stat().st_size for path in tmp_path.iterdir()
    }
    assert StoredState(tmp_path).read("w").equal(tensor)


def test_a_write_without_a_copy_that_failed_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: Tensor
) -> None:
    monkeypatch.setattr("fivefold.engine.state.dcp_files._FILE_BYTES", 2000)
    writer = StateWriter(0, list(ranges(SHAPE, ())))
    with files_of_at_most(1000), pytest.raises(OSError, match=r"File too large: '.*/__0_\d\.distcp'"):
        writer.write(tmp_path, [tensor], {})
    finish(tmp_path, [writer.write(tmp_path, [tensor], {}).part])
    assert StoredState(tmp_path).read("w").equal(tensor)
    tensor.untyped_storage().resize_(0)  # as offloading does, which must stay possible


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """Let the kernel refuse to write larger files."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_write_that_failed_names_the_file_and_can_be_repeated(tmp_path: Path, tensor: Tensor) -> None:
    folder = tmp_path / "new" / "state"
    first, *others = snapshots(folder, tensor)
    parts = [other.write() for other in others]
    with files_of_at_most(2500), pytest.raises(OSError, match=r"File too large: '.*/new/state/__0_0\.distcp'"):
        first.write()
    finish(folder, [first.write(), *parts])
    assert StoredState(folder).read("w").equal(tensor)
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(OSError, match=str(blocked)):
        snapshots(blocked / "state", tensor)[0].write()


def test_an_index_that_cannot_be_written_leaves_no_index(tmp_path: Path, tensor: Tensor) -> None:
    parts = [snapshot.write() for snapshot in snapshots(tmp_path, tensor)]
    with files_of_at_most(100), pytest.raises(OSError, match=r"\.metadata"):
        finish(tmp_path, parts)
    with pytest.raises(ValueError, match=r"\.metadata is missing"):
        StoredState(tmp_path)
    finish(tmp_path, parts)
    assert StoredState(tmp_path).read("w").equal(tensor)


def test_parts_of_some_ranks_only_or_of_a_rank_twice_are_refused(tmp_path: Path, tensor: Tensor) -> None:
    parts = save(tmp_path, tensor)
    for wrong in (parts[:-1], [*parts, parts[0]]):
        with pytest.raises(ValueError, match=r"does not tile \d tensors .*param/w"):
            finish(tmp_path, wrong)


def test_damage_is_refused_and_names_the_file(tmp_path: Path, tensor: Tensor) -> None:
    save(tmp_path, tensor)
    file = tmp_path / "__1_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"__1_0\.distcp is truncated"):
        StoredState(tmp_path)
    file.write_bytes(bytes(len(content)))
    stored = StoredState(tmp_path)
    with pytest.raises(ValueError, match=r"__1_0\.distcp is damaged .*param/w"):
        stored.fill([(whole_piece(SHAPE), torch.empty(SHAPE))])
    file.unlink()
    with pytest.raises(ValueError, match=r"__1_0\.distcp is missing"):
        StoredState(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"\.metadata is not the metadata"):
        StoredState(tmp_path)


def test_tensors_of_another_model_are_named(tmp_path: Path, tensor: Tensor) -> None:
    save(tmp_path, tensor)
    stored = StoredState(tmp_path)
    stored.check({"w": SHAPE})
    with pytest.raises(ValueError, match=r"another model[\s\S]*missing \(1\):\s+v[\s\S]*w: \[37, 50\], expected \[2\]"):
        stored.check({"v": SHAPE, "w": (2,)})
    with pytest.raises(ValueError, match=r"no tensors exp_avg/"):
        StoredState(tmp_path, "exp_avg")
