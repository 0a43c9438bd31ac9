"""Credit by turn: advantages of the single moves of episodes that have several turns.

With rewards r_t of the moves of an episode, whose last one has all that was earned in the end:

    G_t = r_t + gamma G_{t+1}                               what is still earned from move t on

    turn    A_t = advantage of G_t among the moves number t of the group's episodes
    state   A_t = A + w * advantage of G_t among the group's moves in the same state

A is the episode's own advantage, and "advantage" the same method each time. `state` is GiGPO (Feng et al. 2025, arXiv
2505.10978, equations 3 to 8). Where the method compares, a move that can be compared with no other has A_t = A.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from fivefold.algorithms.advantages.compute import Scores, check_result


def returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Return what is earned from each move of an episode on, given the reward of each."""
    found, after = [], 0.0
    for reward in reversed(rewards):
        after = reward + discount * after
        found.append(after)
    return found[::-1]


@dataclass(frozen=True)
class Moves:
    """The M moves of a step's episodes, one episode after the other."""

    returns_M: torch.Tensor
    """float64: what is earned from each move on."""
    episodes_M: torch.Tensor
    """int64: index of its episode."""
    lengths_M: torch.Tensor
    """int64: sampled tokens."""
    turns: Sequence[int]
    """Number of each move in its episode."""
    states: Sequence[str]
    """Name of the state in which it was made."""
    groups: Sequence[int]
    """Group of its episode."""

    def by_turn(
        self, method: Callable[[Scores], torch.Tensor], advantages_N: torch.Tensor, *, compares: bool
    ) -> torch.Tensor:
        """Return float64 [M]: the advantage among the moves of the same number.

        Args:
            method: computes the advantages of each set of moves.
            advantages_N: the advantage of each episode.
            compares: whether the method compares the moves of a set, so that one that is alone has its episode's.
        """
        compared_M, is_alone_M = self._compared(list(zip(self.groups, self.turns, strict=True)), method)
        return torch.where(is_alone_M, advantages_N.double()[self.episodes_M], compared_M) if compares else compared_M

    def by_state(
        self, method: Callable[[Scores], torch.Tensor], advantages_N: torch.Tensor, weight: float
    ) -> torch.Tensor:
        """Return float64 [M]: the episode's advantage, and `weight` times the one among moves in the same state."""
        compared_M, is_alone_M = self._compared(list(zip(self.groups, self.states, strict=True)), method)
        compared_M = torch.where(is_alone_M, torch.zeros_like(compared_M), compared_M)
        return advantages_N.double()[self.episodes_M] + weight * compared_M

    def _compared(
        self, keys: Sequence[Hashable], method: Callable[[Scores], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the advantages among moves with the same key, and which moves are the only ones with theirs."""
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        sets_M = torch.tensor([numbers[key] for key in keys])
        scores = Scores(self.returns_M, sets_M, self.lengths_M)
        result_M = method(scores)
        check_result("actor.advantage", result_M, scores)
        return result_M.double(), (torch.bincount(sets_M) == 1)[sets_M]
