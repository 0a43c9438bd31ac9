"""The tokens of an episode, as they were sampled: they are never decoded and encoded again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fivefold.rollout.tokenizer import decoded
from fivefold.types import NOT_SAMPLED, UNKNOWN_EXPERT, Completion, Episode, Routes, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Transcript:
    """One sequence that the policy and its environment write in turns.

    prompt | sampled | given | sampled ...        only what was sampled is trained
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        """Begin with the tokens of a prompt.

        Raises:
            ValueError: there are none, so nothing would predict the first sampled token.
        """
        if not len(token_ids):
            raise ValueError("an episode has a prompt without tokens: a prompt needs at least one")
        self._tokens: list[int] = [int(token) for token in token_ids]
        self._turns: list[tuple[int, Completion]] = []
        """Where each completion begins."""
        self._digest = hashlib.blake2b(digest_size=8)
        self._n_digested = 0

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens so far: what the next completion continues."""
        return tuple(self._tokens)

    @property
    def n_turns(self) -> int:
        """Number of completions."""
        return len(self._turns)

    @property
    def state(self) -> str:
        """A name of all tokens so far, which is the same for the same tokens."""
        new = np.array(self._tokens[self._n_digested :], np.int32)
        self._digest.update(new.tobytes())
        self._n_digested = len(self._tokens)
        return self._digest.hexdigest()

    def sampled(self, completion: Completion) -> None:
        """Append what the policy has sampled."""
        self._turns.append((len(self._tokens), completion))
        self._tokens += completion.token_ids.tolist()

    def given(self, token_ids: Sequence[int]) -> None:
        """Append what the environment answers."""
        self._tokens += [int(token) for token in token_ids]

    def trajectory(self) -> Trajectory:
        """Return the sequence up to the last sampled token: what comes after it is read by nobody."""
        begin, last = self._turns[-1]
        n = begin + len(last.token_ids)
        mask_T = np.zeros(n, np.bool_)
        logprobs_T = np.zeros(n, np.float32)
        versions_T = np.full(n, NOT_SAMPLED, np.int32)
        for start, completion in self._turns:
            end = start + len(completion.token_ids)
            mask_T[start:end] = True
            logprobs_T[start:end] = completion.logprobs
            versions_T[start:end] = completion.versions
        return Trajectory(np.array(self._tokens[:n], np.int32), mask_T, logprobs_T, versions_T, self._routes(n))

    def _routes(self, n: int) -> Routes | None:
        """Return the experts of the first `n` tokens; None: the engine reports none.

        A token has the experts with which it was computed first: in the turn that sampled it, or that it came before.
        """
        known = [completion.routes for _, completion in self._turns if completion.routes is not None]
        if not known:
            return None
        routes_TLK = np.full((n, *known[0].shape[1:]), UNKNOWN_EXPERT, known[0].dtype)
        for routes in known:
            own = routes_TLK[: len(routes)]
            own[:] = np.where(own == UNKNOWN_EXPERT, routes, own)
        return routes_TLK


def transcript_text(tokenizer: PreTrainedTokenizerBase, episode: Episode) -> str:
    """Return what comes after an episode's prompt as a text, with the environment's answers in ⟦brackets⟧.

    Sequences that do not continue the one before are separate paragraphs. Of an episode that failed: what failed.
    """
    if episode.failure is not None:
        return episode.failure
    return "\n\n".join(_marked(tokenizer, trajectory) for trajectory in episode.trajectories)


def _marked(tokenizer: PreTrainedTokenizerBase, trajectory: Trajectory) -> str:
    mask_T = trajectory.mask_T
    changes = np.flatnonzero(mask_T[1:] != mask_T[:-1]) + 1
    _, *spans = np.split(trajectory.tokens_T, changes)
    texts = decoded(tokenizer, spans)
    return "".join(text if number % 2 == 0 else f"⟦{text}⟧" for number, text in enumerate(texts))
