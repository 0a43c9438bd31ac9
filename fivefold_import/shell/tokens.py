"""The tokens of a shell script: words as they are written, arrays, operators and line ends.

Comments and here-documents are left out. Words keep their quotes, and `shell.expand` fills their variables in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from fivefold_import.shell.quotes import Unclosed, after, closing

OPERATOR = re.compile(r"(?:\d+(?=[<>]))?(;;|&&|\|\||\|&|&>>|&>|<<<|<<-|<<|>>|>&|<&|>\||[;&|()<>])")
"""An operator; a number before a redirection, as in `2>&1`, belongs to it."""
REDIRECTIONS = frozenset({"<", ">", ">>", "<<<", "<<", "<<-", "&>", "&>>", ">&", "<&", ">|"})
BLANKS = re.compile(r"(?:[ \t]|\\\n|#[^\n]*)*")
"""What separates tokens: blanks, a line that continues, and comments, in which a backslash does not continue a line."""
ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\(")
PLACEHOLDER = re.compile(r"<[\w./-]+>")
"""A word such as `<path/to/model>`, which manuals print for the reader to replace; to bash, it is a redirection."""
OPENERS = frozenset({"for", "if", "elif", "while", "until", "then", "else", "do", "!"})
"""Keywords that a command may follow."""


@dataclass(frozen=True)
class Token:
    """One token of a script."""

    kind: Literal["word", "array", "operator", "newline", "arithmetic"]
    line: int
    text: str = ""
    """The word with its quotes, the operator, the array's name, or the expression between `((` and `))`."""
    items: tuple[str, ...] = ()
    """The words of an array."""
    appends: bool = False
    """Whether an array is added to, with `+=`."""

    def is_operator(self, *texts: str) -> bool:
        """Return whether the token is one of the operators `texts`."""
        return self.kind == "operator" and self.text in texts


def tokenize(text: str) -> list[Token]:
    """Return the tokens of a script.

    Raises:
        ValueError: a quote, a substitution or an array is not closed; the message names the line.
    """
    lexer = _Lexer(text.replace("\r\n", "\n"))
    try:
        return lexer.tokens()
    except Unclosed as error:
        raise ValueError(f"line {lexer.line(error.at)}: {error}") from error


class _Lexer:
    """Reads a script once, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def tokens(self) -> list[Token]:
        found: list[Token] = []
        heredocs: list[str] = []
        while self._skip_blanks():
            token = self._token(found)
            if token.kind == "word" and found and found[-1].is_operator("<<", "<<-"):
                heredocs.append(re.sub(r"[\"'\\]", "", token.text))
            found.append(token)
            if token.kind == "newline":
                self._skip_heredocs(heredocs)
                heredocs = []
        return found

    def line(self, at: int) -> int:
        """Return the line of a position, counted from 1."""
        return self._text.count("\n", 0, at) + 1

    def _token(self, before: list[Token]) -> Token:
        start, line = self._at, self.line(self._at)
        if self._text[start] == "\n":
            self._at += 1
            return Token("newline", line)
        if array := ARRAY.match(self._text, start):
            self._at = array.end()
            return Token("array", line, array[1], self._array_items(start), appends=array[2] == "+")
        if self._text.startswith("((", start) and _may_begin_command(before):
            self._at = closing(self._text, start)
            return Token("arithmetic", line, self._text[start + 2 : self._at - 2])
        if placeholder := PLACEHOLDER.match(self._text, start):
            self._at = placeholder.end()
            return Token("word", line, f"'{placeholder[0]}'")
        if operator := OPERATOR.match(self._text, start):
            self._at = operator.end()
            return Token("operator", line, operator[1])
        return Token("word", line, self._word())

    def _array_items(self, start: int) -> tuple[str, ...]:
        items: list[str] = []
        while self._skip_blanks():
            if self._text[self._at] == ")":
                self._at += 1
                return tuple(items)
            if self._text[self._at] == "\n":
                self._at += 1
            else:
                items.append(self._word())
        raise Unclosed(start, "the array that begins here is not closed; add `)`")

    def _word(self) -> str:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in " \t\n;&|<>)":
            if self._text[self._at] != "(":
                self._at = after(self._text, self._at)
            elif "=" in self._text[start : self._at]:
                # The shell needs quotes around `actor.backend=megatron:(attn:d1|ffn:e2)`, but manuals print it without.
                self._at = closing(self._text, self._at)
            else:
                break
        self._at = max(self._at, start + 1)  # A bracket that opens or closes nothing is a word.
        return self._text[start : self._at]

    def _skip_blanks(self) -> bool:
        """Skip what separates tokens; return False at the end of the text."""
        blanks = BLANKS.match(self._text, self._at)
        self._at = blanks.end() if blanks is not None else self._at
        return self._at < len(self._text)

    def _skip_heredocs(self, delimiters: list[str]) -> None:
        """Skip the here-documents that the line before has announced."""
        for delimiter in delimiters:
            end = re.compile(rf"^\t*{re.escape(delimiter)}$", re.MULTILINE).search(self._text, self._at)
            self._at = len(self._text) if end is None else end.end()


def _may_begin_command(before: list[Token]) -> bool:
    """Return whether a command can begin after the tokens `before`."""
    return not before or before[-1].kind in ("newline", "operator") or before[-1].text in OPENERS


class Cursor:
    """Reads a list of tokens in order."""

    def __init__(self) -> None:
        self._tokens: list[Token] = []
        self._at = 0

    def _peek(self) -> Token | None:
        """Return the next token; None at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _is_operator(self, *texts: str) -> bool:
        """Return whether the next token is one of the operators `texts`."""
        token = self._peek()
        return token is not None and token.is_operator(*texts)

    def _skip(self, *operators: str) -> None:
        """Skip ends of lines, and `operators`."""
        while (token := self._peek()) is not None and (token.kind == "newline" or token.is_operator(*operators)):
            self._at += 1

    def _keyword(self) -> str | None:
        """Return the next token's text if it is a word, which may be a keyword."""
        token = self._peek()
        return token.text if token is not None and token.kind == "word" else None

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
            raise ValueError(f"line {line}: {expected} is expected for the `{opened.text}` of line {opened.line}")
        self._at += 1
        return found
