"""The rectangles of Hugging Face tensors that make up a rank's shard of a parameter.

    Hugging Face tensor [out, in]                    shard of rank r, flattened
    ┌───────┬───────┬───────┐                        0         start      start + n
    │       │ piece │       │  offsets, sizes  <──>  ├─────────┼──────────┼────────┤
    └───────┴───────┴───────┘                                  the same piece

Whatever has a parameter's shape can be taken apart and put together by its pieces: weights, gradients, an optimizer's
moments, and a flat range of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """A rectangle of a Hugging Face tensor, which is a contiguous run of a rank's flattened shard."""

    name: str
    """Hugging Face name of the tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor: [rows], [rows, columns], or [rows, 1, columns]."""
    offsets: tuple[int, ...]
    """Index of the rectangle's first element in the whole tensor."""
    sizes: tuple[int, ...]
    """Shape of the rectangle."""
    start: int
    """Index of the rectangle's first element in the flattened shard."""

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.offsets) == len(self.sizes) in (1, 2, 3) or prod(self.shape[1:-1]) != 1:
            raise ValueError(f"{self}: shape, offsets and sizes must all be rows, rows and columns, or these about a 1")

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def end(self) -> int:
        """Index of the first element after the rectangle in the flattened shard."""
        return self.start + self.n_elements

    @property
    def index(self) -> tuple[slice, ...]:
        """The rectangle as an index into the whole tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.offsets, self.sizes, strict=True))

    def view(self, shard: Tensor, begin: int = 0) -> Tensor:
        """Return the rectangle, [sizes], as a view.

        Args:
            shard: the shard or anything of its shape, contiguous; or a range of either one, flattened.
            begin: index in the flattened shard at which a range begins.
        """
        return shard.view(-1)[self.start - begin : self.end - begin].view(self.sizes)

    def within(self, begin: int, end: int) -> Iterator[Piece]:
        """Yield the parts that lie in elements [begin, end) of the flattened shard, in order, at most three.

        They are the end of a row, whole rows, and the beginning of a row.
        """
        width = prod(self.sizes[1:])
        first, last = max(begin - self.start, 0), min(end - self.start, self.n_elements)
        while first < last:
            row, column = divmod(first, width)
            if column or last - first < width:
                rows, columns = 1, min(width - column, last - first)
            else:
                rows, columns = (last - first) // width, width
            yield self._part((row, column), (rows, columns), self.start + first)
            first += rows * columns

    def _part(self, place: tuple[int, int], sizes: tuple[int, int], start: int) -> Piece:
        def of_all(first: int, last: int, between: int) -> tuple[int, ...]:
            return (first, *(between for _ in self.shape[1:-1]), last)[: len(self.shape)]

        offsets = tuple(offset + distance for offset, distance in zip(self.offsets, of_all(*place, 0), strict=True))
        return replace(self, offsets=offsets, sizes=of_all(*sizes, 1), start=start)
