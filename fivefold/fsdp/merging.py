"""What adapters add to the rows of a weight that a rank holds.

rows of W (a shard) ──pieces──> rectangles of W + scale * (rows of B) (columns of A)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.bridge.pieces import Piece
from fivefold.bridge.weight_files import of_joint
from fivefold.families.adapters import MATRICES, AdapterShape, find_adapter


@dataclass(frozen=True)
class Addition:
    """What an adapter adds to a rectangle of a weight."""

    piece: Piece
    """The rectangle, [rows, columns]."""
    a: Tensor
    """[rank, columns]."""
    b: Tensor
    """[rows, rank]."""
    scale: float

    def add_to(self, values_N: Tensor, begin: int) -> None:
        """Add it in float32 to a range of the weight's shard, which begins at element `begin`."""
        self.piece.view(values_N, begin).add_(self.scale * (self.b.float() @ self.a.float()))


def additions(pieces: Iterable[Piece], matrices: Mapping[str, Tensor], shape: AdapterShape) -> Iterator[Addition]:
    """Yield what adapters add to pieces of a weight.

    Args:
        pieces: the pieces.
        matrices: the whole matrices of the adapters, by their Hugging Face names.
        shape: the adapters.
    """
    for piece in pieces:
        a, b = (find_adapter(matrices, piece.name, matrix) for matrix in MATRICES)
        if a is not None and b is not None:
            rank, (rows, columns) = len(a), piece.index
            if of_joint(piece.name) is not None:
                a, b = b.t(), a.t()  # the weight is [in, out]
            # Copies, so that nothing refers to the whole matrices.
            yield Addition(piece, a[:, columns].clone(), b[rows].clone(), shape.scale(rank))


def merged(values_N: Tensor, begin: int, added: Iterable[Addition]) -> Tensor:
    """Return a range of a weight's shard, which begins at element `begin`, with what adapters add, in its own dtype."""
    total_N = values_N.to(torch.float32, copy=True)
    for addition in added:
        addition.add_to(total_N, begin)
    return total_N.to(values_N.dtype)
