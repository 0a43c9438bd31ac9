"""Rows of a batch on their way from an episode to the loss: arrays by reference, then tensors of one replica's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fivefold.types import ROUTES, UNKNOWN_EXPERT, Cuts, Episode, PlacedImage

RowImages = tuple[tuple[PlacedImage, ...], ...]
"""The images among the tokens of each row."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Per-token values of N rows laid end to end, T tokens in all. The object store shares arrays uncopied."""

    lengths_N: npt.NDArray[np.int32]
    """Tokens of each row; they sum to T."""
    values: Mapping[str, npt.NDArray[Any]]
    """Arrays [T, ...], by name."""
    cuts: Cuts | None = None
    """Tokens of each sequence of each row; None: each row is one sequence."""
    images: RowImages | None = None
    """None: no row has an image."""

    @staticmethod
    def of(episodes: Sequence[Episode]) -> Columns:
        """Lay episodes end to end, a row each. There is a column `routes` if a trajectory has routes.

        Raises:
            ValueError: no episode, or images in an episode of several sequences.
        """
        if not episodes:
            raise ValueError("there are no episodes to lay end to end: give at least one")
        trajectories = [trajectory for episode in episodes for trajectory in episode.trajectories]
        values: dict[str, npt.NDArray[Any]] = {
            "tokens": np.concatenate([t.tokens_T for t in trajectories]),
            "mask": np.concatenate([t.mask_T for t in trajectories]),
            "rollout_logprobs": np.concatenate([t.logprobs_T for t in trajectories]),
            "versions": np.concatenate([t.versions_T for t in trajectories]),
        }
        if known := [t.routes_TLK for t in trajectories if t.routes_TLK is not None]:
            unknown = np.full((1, *known[0].shape[1:]), UNKNOWN_EXPERT, known[0].dtype)
            values[ROUTES] = np.concatenate(
                [unknown.repeat(len(t.tokens_T), 0) if t.routes_TLK is None else t.routes_TLK for t in trajectories]
            )
        lengths_N = np.array([e.n_tokens for e in episodes], dtype=np.int32)
        return Columns(lengths_N, values, cuts_of(episodes), _images_of(episodes))


def _images_of(episodes: Sequence[Episode]) -> RowImages | None:
    """Return the images of each episode; None: there are none."""
    if not any(trajectory.images for episode in episodes for trajectory in episode.trajectories):
        return None
    if any(len(episode.trajectories) > 1 for episode in episodes):
        raise ValueError("an episode of several sequences has images: only prompts of a single turn may have some")
    return tuple(episode.trajectories[0].images for episode in episodes)


def cuts_of(episodes: Sequence[Episode]) -> Cuts | None:
    """Return the tokens of each trajectory of each episode; None: each episode has one trajectory."""
    if len(episodes) == sum(len(episode.trajectories) for episode in episodes):
        return None
    return tuple(tuple(len(t.tokens_T) for t in episode.trajectories) for episode in episodes)


def joined_cuts(parts: Sequence[tuple[Sequence[int], Cuts | None]]) -> Cuts | None:
    """Return the cuts of the rows of several parts, one part after the other; None: each row is one sequence.

    Args:
        parts: lengths and cuts of the rows of each part.
    """
    if all(cuts is None for _, cuts in parts):
        return None
    return tuple(row for lengths, cuts in parts for row in (cuts or ((int(length),) for length in lengths)))


@dataclass(frozen=True)
class Totals:
    """Sizes of a whole mini-batch, over all data-parallel replicas: what losses are divided by."""

    n_sequences: int
    n_tokens: int
    """All tokens, prompts included."""
    n_trained_tokens: int
    n_trained_sequences: int
    """Sequences with at least one trained token."""


@dataclass(frozen=True)
class Batch:
    """Rows laid end to end without padding. A row is a sequence, or the sequences of one episode.

    A per-token field holds, at token t, what belongs to *predicting token t* from the tokens before it:
    `logprobs[t] = log p(token[t] | token[<t])` in its sequence. The first token of a sequence is predicted by nothing,
    so its mask is 0 and its other fields are ignored.

        tokens   p p p r r r | p p r r          lengths (6, 4)
        mask     0 0 0 1 1 1 | 0 0 1 1
    """

    lengths: tuple[int, ...]
    """Tokens of each row; they sum to T."""
    tokens_T: torch.Tensor
    """int64 [T]: token ids."""
    mask_T: torch.Tensor
    """float32 [T]: 1 on tokens that are trained (the response), else 0."""
    fields: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[T, ...] each, by name: `advantages`, `old_logprobs`, `rollout_logprobs`, `ref_logprobs`, `versions`, ..."""
    cuts: Cuts | None = None
    """Tokens of each sequence of each row; None: each row is one sequence."""
    images: RowImages | None = None
    """On the host; None: no row has an image."""

    def __post_init__(self) -> None:
        total = sum(self.lengths)
        tensors = {"tokens_T": self.tokens_T, "mask_T": self.mask_T, **self.fields}
        for name, tensor in tensors.items():
            flat = name in ("tokens_T", "mask_T")
            if tensor.shape[:1] != (total,) or (flat and tensor.ndim != 1):
                wanted = f"({total},)" if flat else f"({total}, ...)"
                raise ValueError(
                    f"Batch.{name} has shape {tuple(tensor.shape)}; the lengths sum to {total}, so it must be {wanted}"
                )

        if self.cuts is not None and tuple(map(sum, self.cuts)) != self.lengths:
            raise ValueError(
                f"Batch.cuts={self.cuts} do not sum to the lengths {self.lengths}: give the tokens of each sequence of "
                "each row"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, which attends to itself alone; they sum to T."""
        return self.lengths if self.cuts is None else tuple(length for row in self.cuts for length in row)

    @property
    def n_tokens(self) -> int:
        """All tokens, prompts included."""
        return self.tokens_T.numel()

    def totals(self) -> Totals:
        """Return the sizes of this batch, which must be a whole mini-batch if a loss is to be divided by them."""
        trained = [int(mask.sum()) for mask in self.split(self.mask_T)]
        return Totals(len(self), self.n_tokens, sum(trained), sum(count > 0 for count in trained))

    def offsets(self) -> list[int]:
        """Return the start of each row, and T at the end: len(self) + 1 entries."""
        offsets = [0]
        for length in self.lengths:
            offsets.append(offsets[-1] + length)
        return offsets

    def select(self, indices: Sequence[int]) -> Batch:
        """Return the rows at `indices`, in that order."""
        offsets = self.offsets()
        rows = [torch.arange(offsets[i], offsets[i + 1]) for i in indices]
        tokens = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
        return Batch(
            lengths=tuple(self.lengths[i] for i in indices),
            tokens_T=self.tokens_T[tokens],
            mask_T=self.mask_T[tokens],
            fields={name: value[tokens] for name, value in self.fields.items()},
            cuts=None if self.cuts is None else tuple(self.cuts[i] for i in indices),
            images=None if self.images is None else tuple(self.images[i] for i in indices),
        )

    def without(self, name: str) -> Batch:
        """Return the batch without a field; the batch itself if it has no such field."""
        if name not in self.fields:
            return self
        return replace(self, fields={other: value for other, value in self.fields.items() if other != name})

    def to(self, device: torch.device) -> Batch:
        """Return a copy on `device`."""
        fields = {name: value.to(device, non_blocking=True) for name, value in self.fields.items()}
        return Batch(
            self.lengths,
            self.tokens_T.to(device, non_blocking=True),
            self.mask_T.to(device, non_blocking=True),
            fields,
            self.cuts,
            self.images,
        )

    def with_fields(self, **fields: torch.Tensor) -> Batch:
        """Return a copy with per-token fields added or replaced."""
        return replace(self, fields={**self.fields, **fields})

    def split(self, values_T: torch.Tensor) -> list[torch.Tensor]:
        """Split a per-token tensor [T, ...] into one tensor for each row."""
        return list(values_T.split(list(self.lengths)))
