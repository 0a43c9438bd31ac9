"""Rewards of single tokens: the tokens of a response that a function gets, and the numbers that it returns for them.

    function(response, ground_truth, *, token_ids, data_source, extra_info)
        ├─> 1.0                                             of the whole response, as any function
        ├─> [0.0, 0.5, ...]                                 of each token
        └─> {"token_rewards": [0.0, 0.5, ...], "score": 1.0}     of each token, and of the whole

A text may have other tokens than those that were sampled, so a function scores the tokens that it is given, and never
tokenizes the text itself. The module needs no torch, as a plan has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

TOKEN_IDS = "token_ids"
"""Argument by which a function is recognised that gets the tokens."""
TOKEN_REWARDS, SCORE = "token_rewards", "score"
"""Keys of a mapping that a function may return."""


class TokenizedText(str):
    """A response as text, with the tokens that were sampled."""

    token_ids: tuple[int, ...]
    places: tuple[int, ...]
    """Place of each among all tokens of the episode."""

    def __new__(cls, text: str, token_ids: Sequence[int], places: Sequence[int]) -> TokenizedText:
        """Return the text, which has these tokens at these places."""
        response = super().__new__(cls, text)
        response.token_ids, response.places = tuple(token_ids), tuple(places)
        return response


class TokenRewards(float):
    """The reward of a response. Its tokens have a part each, and the rest belongs to the response as a whole."""

    values: tuple[float, ...]
    """Reward of each sampled token."""
    places: tuple[int, ...]
    """Place of each among all tokens of the episode."""

    def __new__(cls, total: float, values: Sequence[float], places: Sequence[int]) -> TokenRewards:
        """Return the reward `total`, with the part of each token."""
        reward = super().__new__(cls, total)
        reward.values, reward.places = tuple(values), tuple(places)
        return reward

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenRewards, (float(self), self.values, self.places)


def of_tokens(value: object, response: TokenizedText) -> TokenRewards | None:
    """Return what a function gave to a response by its tokens; None: it gave one number for the whole.

    Raises:
        ValueError: not a finite number for each token. The message does not name the function and the response.
    """
    given, score = (value.get(TOKEN_REWARDS), value.get(SCORE, 0.0)) if isinstance(value, Mapping) else (value, 0.0)
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
        return None
    values = [float(each) for each in given]
    if len(values) != len(response.token_ids):
        raise ValueError(
            f"it returned {len(values)} rewards of tokens, and the response has {len(response.token_ids)} tokens: "
            "return one for each of token_ids"
        )
    if strays := [place for place, each in enumerate(values) if not math.isfinite(each)]:
        raise ValueError(f"its reward of token {strays[0] + 1} is {values[strays[0]]}: return finite numbers")
    if not math.isfinite(whole := float(score)):
        raise ValueError(f"its score is {whole}: return a finite number")
    return TokenRewards(math.fsum([whole, *values]), values, response.places)
