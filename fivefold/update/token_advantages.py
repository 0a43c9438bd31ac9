"""Advantages of single tokens: a baseline for each, a KL penalty in their rewards, whitening over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from fivefold.algorithms.advantages.token_baseline import token_advantages
from fivefold.algorithms.batch_steps import InTurn
from fivefold.algorithms.gae import SOURCE, AdvantageMoments, Moments, Whitening
from fivefold.algorithms.kl import KLEstimator
from fivefold.algorithms.kl_in_reward import KLInReward
from fivefold.batch import Batch, Columns
from fivefold.cluster.group import fetch, put
from fivefold.engine.energies import Energies
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.update.step import Part, Prepared


@dataclass(frozen=True)
class TokenBaselines(Part):
    """Gives each token the advantage over its own baseline, with the old log-probs, which come with it."""

    actor: Actor
    temperature: float
    zero_tail: bool
    """The option of `token_advantages`."""
    timers: PhaseTimers

    def prepare(self, step: Prepared) -> Prepared:
        """Add the columns `old_logprobs` and `advantages`."""
        with self.timers.phase("old log-probs"):
            energies = self.actor.score(step.batch, Energies(self.temperature))
        with self.timers.phase("advantages"):
            batch = step.batch.with_pieces(energies)
            batch, moments = with_token_advantages(
                batch, energies, step.values_N, step.groups, zero_tail=self.zero_tail
            )
        return replace(step, batch=batch).measured({"advantage/mean": moments.mean, "advantage/std": moments.std})


@dataclass(frozen=True)
class PenaltyInReward(Part):
    """Subtracts a KL penalty from the reward of each token."""

    estimator: KLEstimator

    def prepare(self, step: Prepared) -> Prepared:
        """Change the advantages before they are trained on."""
        kl = KLInReward(step.state.algorithm.kl_ctl, self.estimator)
        return replace(step, changes=(*step.changes, kl.subtracted))


@dataclass(frozen=True)
class WhitenedAdvantages(Part):
    """Brings the advantages of a step's tokens to mean 0 and standard deviation 1."""

    actor: Actor
    by_source: bool = False
    """Whether the tokens of each data source are brought there apart from the others."""

    def prepare(self, step: Prepared) -> Prepared:
        """Change the advantages before they are trained on, after all other changes."""
        batch, numbers = step.batch, list[int | None]([None])
        if self.by_source:
            names = [sample.prompt.data_source for sample in step.samples]
            order = {name: number for number, name in enumerate(dict.fromkeys(names))}
            batch = batch.with_scalars(**{SOURCE: np.array([order[name] for name in names], np.float32)})
            numbers = [*order.values()]
        wanted = AdvantageMoments(InTurn(step.changes), len(numbers) if self.by_source else None)
        found = zip(numbers, self.actor.advantage_moments(batch, wanted), strict=True)
        whitened = [Whitening(moments.mean, moments.std, source=number).applied for number, moments in found]
        return replace(step, batch=batch, changes=(*step.changes, *whitened))


@dataclass(frozen=True)
class ClippedAdvantages(Part):
    """Clips the advantages of tokens to a range around 0."""

    limit: float

    def prepare(self, step: Prepared) -> Prepared:
        """Change the advantages before they are trained on, after all other changes."""
        return replace(step, changes=(*step.changes, Clipping(self.limit).applied))


@dataclass(frozen=True)
class Clipping:
    """Clips advantages to [-limit, limit]."""

    limit: float

    def applied(self, batch: Batch) -> Batch:
        """Return `batch` with its `advantages` clipped."""
        return batch.with_fields(advantages=batch.fields["advantages"].clamp(-self.limit, self.limit))


def with_token_advantages(
    batch: RemoteBatch,
    pieces: Sequence[Piece],
    rewards_N: npt.NDArray[np.float32],
    groups: Sequence[int],
    *,
    zero_tail: bool,
) -> tuple[RemoteBatch, Moments]:
    """Return `batch` with the column `advantages` (advantages/token_baseline.py), and the moments of all advantages.

    The energies of all tokens come to the driver, a number each, because a group may be on several replicas.

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
