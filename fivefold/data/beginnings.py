"""Tokens of many beginnings of one long text, without tokenizing all of it for each of them.

    <|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n ...
    ^ a part        ...  ^           ^ the beginning that ends here has the tokens of the parts before this one, and
                                                             ^ tokens of `<|im_start|>assistant\n`

A tokenizer first looks for special tokens, and tokenizes what is between two of them by itself. So a text may be
divided before any of them, and each part be tokenized once.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def beginnings(
    text: str,
    token_ids: Sequence[int],
    ends: Sequence[int],
    tokenized: Callable[[str], list[int]],
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[list[int]]:
    """Yield the tokens of `text[:end]` for each end: those that it has when it is tokenized by itself.

    Args:
        text: the text.
        token_ids: the tokens of all of it.
        ends: numbers of characters, in ascending order.
        tokenized: tokenizes a text, without special tokens around it.
        tokenizer: the tokenizer that it uses.
    """
    cuts = _cuts(text, ends, tokenizer)
    starts = sorted({0, *cuts})
    parts = {start: tokenized(text[start:stop]) for start, stop in pairwise([*starts, len(text)])}
    if [token for part in parts.values() for token in part] != list(token_ids):
        cuts, starts = [0] * len(ends), []  # parts depend on one another: each beginning is tokenized by itself
    known, n_known = list[int](), 0
    for end, cut in zip(ends, cuts, strict=True):
        n = bisect_left(starts, cut)
        known += [token for start in starts[n_known:n] for token in parts[start]]
        n_known = n
        yield known + tokenized(text[cut:end])


def _cuts(text: str, ends: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return for each end where the last special token begins that is whole there; 0 if there is none."""
    pattern, dividing = _specials(tokenizer)
    found = [match for match in pattern.finditer(text) if match[0] in dividing]
    stops = [match.end() for match in found]
    return [found[n - 1].start() if (n := bisect_right(stops, end)) else 0 for end in ends]


@lru_cache(maxsize=2)
def _specials(tokenizer: PreTrainedTokenizerBase) -> tuple[re.Pattern[str], frozenset[str]]:
    """Return a pattern of the special tokens, and the special tokens that do not depend on the text before them.

    They are the tokens that are looked for in the text as it is, before it is normalized.
    """
    specials = [token for token in tokenizer.added_tokens_decoder.values() if not token.normalized and token.content]
    longest_first = sorted((token.content for token in specials), key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"  # which matches nothing
    dividing = (token.content for token in specials if not token.lstrip and not token.single_word)
    return re.compile(pattern), frozenset(dividing)
