"""Positions of tokens among images: three for each token, a time, a row and a column, by which channels turn.

tokens   a b [ 2 x 3 image ] c d
time     0 1  2 2 2 2 2 2    5 6      text: all three are equal
row      0 1  2 2 2 3 3 3    5 6      an image: its place in the grid, from the position where it begins
column   0 1  2 3 4 2 3 4    5 6      after it: as if it had as many tokens as its longer side
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.families.shape import ModelShape
from fivefold.types import PlacedImage


def positions_with(images: Sequence[PlacedImage], n_tokens: int) -> Tensor:
    """Return the positions of a sequence of so many tokens with images, int64 [3, T]."""
    parts, end, position = [], 0, 0
    for image in images:
        n_text = image.start - end
        parts.append(_text(position, n_text))
        position += n_text
        rows, columns = torch.arange(image.rows), torch.arange(image.columns)
        grid = (torch.zeros(1), rows.repeat_interleave(image.columns), columns.repeat(image.rows))
        parts.append(torch.stack([axis.long().expand(image.n_tokens) for axis in grid]) + position)
        position += max(image.rows, image.columns)
        end = image.start + image.n_tokens
    return torch.cat([*parts, _text(position, n_tokens - end)], dim=1)


def saved_by(images: Sequence[PlacedImage]) -> int:
    """Return by how much the positions of the tokens after images are lower than their places."""
    return sum(image.n_tokens - max(image.rows, image.columns) for image in images)


def _text(start: int, n: int) -> Tensor:
    return torch.arange(start, start + n).expand(3, n)


def rope_axes(shape: ModelShape) -> Tensor:
    """Return by which of the three positions each channel pair of a head turns, int64 [rotated / 2].

    Rows and columns have every third pair, up to the number in `rope_sections`; the time has all others. Or each axis
    has a piece, one after the other.
    """
    assert shape.vision is not None, "the model sees no images"
    if not shape.vision.is_interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(shape.vision.rope_sections))
    axes = torch.zeros(shape.rotated_channels // 2, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * shape.vision.rope_sections[axis] : 3] = axis
    return axes
