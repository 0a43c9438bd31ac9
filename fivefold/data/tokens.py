"""Tokenizes the texts of a data set. A few of them may be very long."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS_PER_TOKEN = 16
"""Characters of a beginning for each token that it is expected to have. Most texts have 4 a token, or fewer."""
MARGIN = 512
"""Tokens by which a beginning must exceed twice the limit: its end may be cut within a word, which then has more."""


def tokenize(
    text: str, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool, at_most: int | None, where: str
) -> list[int]:
    """Return the tokens of a text; of one that has far more than `at_most` tokens, only the first ones.

    A text of 10 MB takes a tokenizer a minute or more. Therefore a long text's beginning is tokenized first: if that
    alone has more than twice `at_most` tokens, the text has more than `at_most` too. If not, as in a text of spaces, a
    longer beginning is tried.

    Args:
        text: the text.
        tokenizer: the model's tokenizer.
        add_special_tokens: whether the tokenizer puts its special tokens around the text.
        at_most: number of tokens beyond which the text is of no use to the caller; None: no limit.
        where: the row, for error messages.

    Raises:
        ValueError: a text that is no Unicode text.
    """
    _check_unicode(text, where)
    if at_most is not None:
        enough = 2 * at_most + MARGIN
        n = CHARACTERS_PER_TOKEN * enough
        while n < len(text):
            token_ids = _token_ids(text[:n], tokenizer, add_special_tokens)
            if len(token_ids) > enough:
                return token_ids
            n *= 4
    return _token_ids(text, tokenizer, add_special_tokens)


def _token_ids(text: str, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool) -> list[int]:
    # Not verbose: the tokenizer would warn of errors for texts longer than its model, which are counted and dropped.
    token_ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    return token_ids


def _check_unicode(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: character {error.start + 1} of a text is {text[error.start]!r}, half of a surrogate pair, which "
            "no tokenizer takes: write the whole pair, or drop the row"
        ) from error
