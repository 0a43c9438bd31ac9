"""Advantages by token of a step whose completions are spread over the trainer's replicas.

The energies of all tokens come to the driver, a number each, because a group may be on several replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from fivefold.algorithms.advantages.token_baseline import token_advantages
from fivefold.algorithms.gae import Moments
from fivefold.cluster.group import fetch, put
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.types import Columns


def with_token_advantages(
    batch: RemoteBatch,
    pieces: Sequence[Piece],
    rewards_N: npt.NDArray[np.float32],
    groups: Sequence[int],
    *,
    zero_tail: bool,
) -> tuple[RemoteBatch, Moments]:
    """Return `batch` with the column `advantages` (advantages/token_baseline.py), and the moments of all advantages.

    Args:
        batch: the sequences.
        pieces: pieces with the column `energies`, NaN on tokens that are not trained.
        rewards_N: shaped reward of each sequence.
        groups: the group of each.
        zero_tail: the option of `token_advantages`.
    """
    energies = _by_sequence(pieces, len(batch))
    trained = [~np.isnan(values_L) for values_L in energies]
    own = [values_L[mask_L] for values_L, mask_L in zip(energies, trained, strict=True)]
    advantages = token_advantages(rewards_N.astype(np.float64), groups, own, zero_tail)
    advantages_T = np.zeros(batch.n_tokens, np.float32)
    advantages_T[np.concatenate(trained)] = every = np.concatenate(advantages)
    columns = Columns(batch.lengths_N.astype(np.int32), {"advantages": advantages_T})
    return batch.with_pieces([Piece(put(columns), np.arange(len(batch)))]), Moments.of(torch.from_numpy(every))


def _by_sequence(pieces: Sequence[Piece], n: int) -> list[npt.NDArray[np.float64]]:
    found: list[npt.NDArray[np.float64]] = [np.empty(0)] * n
    for piece in pieces:
        columns: Columns = fetch(piece.columns)
        values_T, ends = columns.values["energies"].astype(np.float64), np.cumsum(columns.lengths_N)
        for sequence, end, length in zip(piece.sequences_M, ends, columns.lengths_N, strict=True):
            found[sequence] = values_T[end - length : end]
    return found
