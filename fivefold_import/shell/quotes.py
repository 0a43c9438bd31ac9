"""Where quotes and brackets of a shell script end."""

from __future__ import annotations

BRACKETS = {"(": ")", "{": "}"}


class Unclosed(ValueError):
    """A quote or a bracket that nothing closes."""

    def __init__(self, at: int, message: str) -> None:
        super().__init__(message)
        self.at = at
        """The position of the quote or bracket in its text."""


def after(source: str, at: int) -> int:
    """Return the position after the quoted text, the substitution or the plain character at `at`.

    Raises:
        Unclosed: it does not end.
    """
    if source[at] == "\\":
        return at + 2
    if source[at] in "'\"`":
        return after_quotes(source, at)
    if source[at] == "$" and source[at + 1 : at + 2] in ("'", '"'):
        return after_quotes(source, at + 1, has_escapes=True)
    if source.startswith(("$(", "${"), at):
        return closing(source, at + 1)
    return at + 1


def after_quotes(source: str, at: int, *, has_escapes: bool = False) -> int:
    """Return the position after the quote that closes the one at `at`; a backslash hides one, except in plain `'...'`.

    Raises:
        Unclosed: nothing closes it.
    """
    quote, start = source[at], at
    at += 1
    while at < len(source) and source[at] != quote:
        if source[at] == "\\" and (quote != "'" or has_escapes):
            at += 2
        elif quote == '"' and source.startswith(("$(", "${"), at):
            at = closing(source, at + 1)
        else:
            at += 1
    if at >= len(source):
        raise Unclosed(start, f"a {quote} is not closed")
    return at + 1


def closing(source: str, at: int) -> int:
    """Return the position after the bracket that closes the one at `at`; brackets in quotes do not count.

    Raises:
        Unclosed: nothing closes it.
    """
    start, opening, closes = at, source[at], BRACKETS[source[at]]
    depth = 0
    while at < len(source):
        if source[at] in "'\"" and (end := source.find(source[at], at + 1)) > 0:
            at = end
        depth += (source[at] == opening) - (source[at] == closes)
        at += 2 if source[at] == "\\" else 1
        if depth == 0:
            return at
    raise Unclosed(start, f"`{opening}` is not closed; add `{closes}`")
