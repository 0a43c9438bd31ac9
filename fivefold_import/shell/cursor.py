"""A place in a list of tokens, from which they are read one by one."""

from __future__ import annotations

from fivefold_import.shell.words import Token


class Cursor:
    """Reads tokens in order."""

    def __init__(self) -> None:
        self._tokens: list[Token] = []
        self._at = 0

    def _peek(self) -> Token | None:
        """Return the next token; None at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _is_operator(self, *texts: str) -> bool:
        """Return whether the next token is one of the operators `texts`."""
        token = self._peek()
        return token is not None and token.kind == "operator" and token.text in texts

    def _skip(self, *operators: str) -> None:
        """Skip ends of lines, and `operators`."""
        while (token := self._peek()) is not None and (token.kind == "newline" or self._is_operator(*operators)):
            self._at += 1

    def _keyword(self) -> str | None:
        """Return the next token's text if it is an unquoted word, which may be a keyword."""
        token = self._peek()
        return None if token is None else token.bare

    def _expect(self, *keywords: str, opened: Token) -> str:
        """Read one of `keywords`, and return it.

        Raises:
            ValueError: another token is next, so that the compound command that begins with `opened` is not closed.
        """
        self._skip(";")
        found = self._keyword()
        if found not in keywords:
            expected = " or ".join(f"`{keyword}`" for keyword in keywords)
            line = self._tokens[min(self._at, len(self._tokens) - 1)].line
            raise ValueError(f"line {line}: {expected} is expected for the `{opened.bare}` of line {opened.line}")
        self._at += 1
        return found
