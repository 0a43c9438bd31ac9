"""The images of one micro-batch, and where their features belong among the tokens that a rank has of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from fivefold.batch import RowImages
from fivefold.types import PlacedImage
from fivefold.vision.positions import positions_with
from fivefold.vision.tower import Features, VisionTower, rows_of


@dataclass(frozen=True)
class LocalImages:
    """Images, and I tokens of this rank that they become, in rising order."""

    images: tuple[PlacedImage, ...]
    """All images of the micro-batch."""
    rows_I: Tensor
    """int64 [I]: rows of the hidden states that are tokens of images."""
    features_I: Tensor
    """int64 [I]: rows of the tower's features that belong there."""
    positions_3T: Tensor
    """int64 [3, T]: positions of this rank's tokens."""

    @staticmethod
    def of(
        images: RowImages, lengths: Sequence[int], spans: Sequence[int], sources_T: Tensor, padded_T: Tensor
    ) -> LocalImages:
        """Return what a rank has of rows with images; all tensors are on the CPU.

        Args:
            images: images of each row, which is one sequence.
            lengths: tokens of each row.
            spans: tokens of each row with its padding, and of a filler sequence after the last if there is one.
            sources_T: int64 [T], index of each of the rank's tokens in the ragged batch; -1: filler.
            padded_T: int64 [T], index of the same tokens in the padded batch.
        """
        starts = [0, *accumulate(lengths)][: len(lengths)]
        total = sum(lengths)
        flat = tuple(image for row in images for image in row)
        features = torch.full((total + 1,), -1, dtype=torch.int64)  # the extra element is the filler's
        tokens = [
            torch.arange(i.n_tokens) + start + i.start for start, row in zip(starts, images, strict=True) for i in row
        ]
        if tokens:
            features[torch.cat(tokens)] = rows_of(flat)
        own_T = features[sources_T]
        rows_I = (own_T >= 0).nonzero().flatten()
        filled = (*images, *[()] * (len(spans) - len(images)))
        positions = [positions_with(row, span) for row, span in zip(filled, spans, strict=True)]
        return LocalImages(flat, rows_I, own_T[rows_I], torch.cat(positions, dim=1)[:, padded_T])

    def to(self, device: torch.device) -> LocalImages:
        """Return a copy with its tensors on a device."""
        moved = (tensor.to(device, non_blocking=True) for tensor in (self.rows_I, self.features_I, self.positions_3T))
        return LocalImages(self.images, *moved)

    def part(self, rank: int, size: int) -> LocalImages:
        """Return the tokens of one of `size` equal parts of the rows; positions stay."""
        width = self.positions_3T.shape[1] // size
        rows_I = self.rows_I - rank * width
        mine = (rows_I >= 0) & (rows_I < width)
        return replace(self, rows_I=rows_I[mine], features_I=self.features_I[mine])

    def turning(self, axes_F: Tensor) -> Tensor:
        """Return by which position each channel pair turns, int64 [T, F], with the axes of `rope_axes`."""
        return self.positions_3T[axes_F].T

    def seen(self, tower: VisionTower) -> Features:
        """Return the features of these tokens."""
        return tower.features(self.images).select(self.features_I)
