"""Reads training state that `state_store` wrote, on any layout: each rank only its pieces.

No process group is needed, and only the index file is read before something is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fivefold.bridge.audit import listed, raise_if_any, strays
from fivefold.bridge.dcp_folder import DCPFolder
from fivefold.bridge.pieces import Piece
from fivefold.observe.progress import Count, counting

_THREADS = 4
"""Most threads that read at one time."""
_BLOCK = 8 * 2**20
"""Elements that are read at one time, unless a single row is larger."""

Target = tuple[Piece, Tensor]
"""A piece, and the contiguous tensor of its size that it is read to."""


class StoredState:
    """One kind of tensors of a training state: a `TensorReader`, and a reader of many pieces.

    Args:
        folder: the folder of the training state, or its reader.
        kind: `param` for the weights in float32, `exp_avg` or `exp_avg_sq` for the moments.

    Raises:
        ValueError: the folder holds no complete training state: the index file or another file is missing, damaged or
            truncated; or there are no tensors of this kind, in float32.
    """

    def __init__(self, folder: Path | DCPFolder, kind: str = "param") -> None:
        self._files = folder if isinstance(folder, DCPFolder) else DCPFolder(folder)
        self.folder = self._files.folder
        self._kind = kind
        prefix = f"{kind}/"
        keys = {key for key in self._files.names if key.startswith(prefix)}
        self._shapes = {key.removeprefix(prefix): self._files.shape(key) for key in keys}
        if not keys:
            raise ValueError(f"{self.folder} holds no training state: it has no tensors {prefix}...")
        if wrong := sorted(key for key in keys if self._files.dtype(key) != torch.float32):
            raise ValueError(f"{wrong[0]} in {self.folder} is {self._files.dtype(wrong[0])}; training state is float32")

    @property
    def names(self) -> frozenset[str]:
        """Hugging Face names of all tensors."""
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._shapes[name]

    def file(self, name: str) -> str:
        """Return the name of the file that holds the first elements of a tensor."""
        return self._files.file(self._key(name))

    def read(self, name: str, *index: slice) -> Tensor:
        """Return the float32 tensor `name`, or the part of it that `index` selects along its first dimensions.

        Raises:
            ValueError: the file is damaged.
        """
        shape = self._shapes[name]
        bounds = [bound.indices(size) for bound, size in zip(index, shape, strict=False)]
        given = [slice(first, max(first, last)) for first, last, _ in bounds]
        return self._files.read(self._key(name), *given, *(slice(0, size) for size in shape[len(index) :]))

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the tensors have the names and shapes of a model.

        Raises:
            WeightMismatchError: naming tensors that are missing, unknown or of another shape.
        """
        missing, unknown = expected.keys() - self._shapes.keys(), self._shapes.keys() - expected.keys()
        shapes = [
            f"{name}: {list(self._shapes[name])}, expected {list(shape)}"
            for name, shape in expected.items()
            if self._shapes.get(name, shape) != shape
        ]
        raise_if_any(
            f"the training state in {self.folder} belongs to another model; load it with its run's model",
            strays(f"Tensors {self._kind}/... that are missing", missing, unknown),
            strays(f"Tensors {self._kind}/... that no parameter uses", unknown, missing),
            listed(f"Tensors {self._kind}/... of the wrong shape", len(shapes), shapes),
        )

    def fill(self, targets: Iterable[Target]) -> None:
        """Read many pieces, in several threads.

        Raises:
            ValueError: a file is damaged.
        """
        blocks = [block for target in targets for block in _blocks(*target)]
        if not blocks:
            return
        n_threads = min(_THREADS, len(blocks))
        n_bytes = sum(target.nbytes for _, target in blocks)
        with (
            ThreadPoolExecutor(n_threads, "state-reader") as pool,
            counting("loading the checkpoint", n_bytes) as count,
        ):
            parts = [blocks[first::n_threads] for first in range(n_threads)]
            list(pool.map(partial(self._read_all, count), parts))

    def _read_all(self, count: Count, targets: Sequence[Target]) -> None:
        with self._files.for_another_thread() as files:
            for piece, target in targets:
                target.copy_(files.read(self._key(piece.name), *piece.index))
                count(target.nbytes)

    def _key(self, name: str) -> str:
        return f"{self._kind}/{name}"


def _blocks(piece: Piece, target: Tensor) -> Iterable[Target]:
    """Yield the rows of a piece in parts that are read at one time."""
    rows = max(1, _BLOCK * piece.sizes[0] // piece.n_elements)
    step = rows * piece.n_elements // piece.sizes[0]
    for begin in range(piece.start, piece.end, step):
        for block in piece.within(begin, begin + step):
            yield block, block.view(target, piece.start)
