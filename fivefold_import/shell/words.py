"""The tokens of a shell script: words with their quotes, arrays, operators and line ends.

Comments and here-documents are left out; variables are not filled in yet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

OPERATORS = (";;", "&&", "||", "|&", "&>>", "&>", "<<<", "<<-", "<<", ">>", ">&", "<&", ">|")
SINGLE = ";&|()<>"
CONTINUATION = "\ue000"
"""A character that stands for a backslash at the end of a line, so that lines can still be counted."""
BLANKS = " \t" + CONTINUATION
OPENERS = frozenset({"for", "if", "elif", "while", "until", "then", "else", "do", "!"})
"""Keywords that a command may follow."""
ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\(")
PLACEHOLDER = re.compile(r"<[\w./-]+>")
"""A word such as `<path/to/model>`, which manuals print for the reader to replace; to bash, it is a redirection."""
REDIRECTIONS = frozenset({"<", ">", ">>", "<<<", "<<", "<<-", "&>", "&>>", ">&", "<&", ">|"})
ESCAPES = {"n": "\n", "t": "\t"}
"""The escapes in `$'...'` that stand for another character than the one after the backslash."""
DESCRIPTOR = re.compile(r"\d+(?=[<>])")
"""The number before a redirection, as in `2>&1`, which is no word of the command."""


@dataclass(frozen=True)
class Piece:
    """A part of a word that is quoted in one way."""

    text: str
    quoted: bool
    """Whether the text is quoted, so that it is not split at blanks."""
    expands: bool
    """Whether `$` stands for a variable in the text."""


Word = tuple[Piece, ...]


@dataclass(frozen=True)
class Token:
    """One token of the script."""

    kind: Literal["word", "array", "operator", "newline", "arithmetic"]
    line: int
    text: str = ""
    """The operator, the array's name, or the expression between `((` and `))`; empty for words and line ends."""
    word: Word = ()
    """The pieces of a word."""
    items: tuple[Word, ...] = ()
    """The words of an array."""
    appends: bool = False
    """Whether an array is added to, with `+=`."""

    @property
    def bare(self) -> str | None:
        """The text of an unquoted word, which may be a keyword; None for other tokens."""
        if self.kind == "word" and len(self.word) == 1 and not self.word[0].quoted:
            return self.word[0].text
        return None


def tokenize(text: str) -> list[Token]:
    """Return the script's tokens.

    Raises:
        ValueError: a quote, a substitution or an array is not closed; the message has the line.
    """
    return _Lexer(text).tokens()


class _Lexer:
    """Reads a script's text once, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n").replace("\\\n", CONTINUATION)
        self._at = 0
        self._heredocs: list[str] = []

    def tokens(self) -> list[Token]:
        found: list[Token] = []
        while self._skip_blanks():
            token = self._token(found)
            found.append(token)
            if token.kind == "newline":
                self._skip_heredocs()
            elif len(found) > 1 and found[-2].text in ("<<", "<<-") and token.kind == "word":
                self._heredocs.append("".join(piece.text for piece in token.word))
        return found

    def _token(self, before: list[Token]) -> Token:
        line = self._line()
        character = self._text[self._at]
        if character == "\n":
            self._at += 1
            return Token("newline", line)
        if array := ARRAY.match(self._text, self._at):
            self._at = array.end()
            return Token("array", line, array[1], items=self._array_items(line), appends=array[2] == "+")
        if self._text.startswith("((", self._at) and _may_begin_command(before):
            end = self._end_of("((", "))", self._at)
            expression = self._text[self._at + 2 : end - 2]
            self._at = end
            return Token("arithmetic", line, expression)
        if placeholder := PLACEHOLDER.match(self._text, self._at):
            self._at = placeholder.end()
            return Token("word", line, word=(Piece(placeholder[0], quoted=True, expands=False),))
        if operator := self._operator():
            return Token("operator", line, operator)
        return Token("word", line, word=self._word())

    def _operator(self) -> str | None:
        if descriptor := DESCRIPTOR.match(self._text, self._at):
            self._at = descriptor.end()
        for operator in (*OPERATORS, *SINGLE):
            if self._text.startswith(operator, self._at):
                self._at += len(operator)
                return operator
        return None

    def _array_items(self, line: int) -> tuple[Word, ...]:
        items: list[Word] = []
        while self._skip_blanks():
            if self._text[self._at] == "\n":
                self._at += 1
            elif self._text[self._at] == ")":
                self._at += 1
                return tuple(items)
            else:
                items.append(self._word())
        raise ValueError(f"line {line}: the array that begins here is not closed; add `)`")

    def _word(self) -> Word:
        """Read a word as its pieces."""
        pieces: list[Piece] = []
        plain = ""
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in " \t\n;&|<>)":
            character = self._text[self._at]
            if character == CONTINUATION:
                self._at += 1
                continue
            if character == "(":
                if not plain.partition("=")[1]:
                    break
                # The shell needs quotes around `actor.backend=megatron:(attn:d1|ffn:e2)`, but manuals print it without.
                end = self._end_of("(", ")", self._at)
            elif character == "$" and self._opens_substitution():
                end = self._end_of_substitution(self._at)
            elif character == "`":
                end = self._close("`", self._at + 1) + 1
            elif character in "'\"\\" or self._text.startswith(("$'", '$"'), self._at):
                if plain:
                    pieces.append(Piece(plain, quoted=False, expands=True))
                pieces += self._quoted(character)
                plain = ""
                continue
            else:
                end = self._at + 1
            plain += self._text[self._at : end]
            self._at = end
        if self._at == start:
            self._at += 1  # a bracket that opens or closes nothing
            plain = self._text[start]
        return (*pieces, Piece(plain, quoted=False, expands=True)) if plain else tuple(pieces)

    def _quoted(self, quote: str) -> list[Piece]:
        """Read what is quoted by `quote`: a backslash, `'`, `"`, or `$` before one of the two."""
        if quote == "\\":
            escaped = self._text[self._at + 1 : self._at + 2]
            self._at += 2
            return [Piece(escaped, quoted=True, expands=False)]
        if quote == "'":
            end = self._close("'", self._at + 1)
            text = self._text[self._at + 1 : end].replace(CONTINUATION, "\\\n")
            self._at = end + 1
            return [Piece(text, quoted=True, expands=False)]
        self._at += 1
        if quote == "$":
            # `$"..."` is text to be translated, with the quotes of `"..."`; `$'...'` has escapes.
            return self._quoted('"') if self._text[self._at] == '"' else [self._escaped()]
        return self._double_quoted()

    def _escaped(self) -> Piece:
        """Read what stands in `$'...'`."""
        end = self._close("'", self._at + 1, has_escapes=True)
        text = re.sub(r"\\(.)", lambda match: ESCAPES.get(match[1], match[1]), self._text[self._at + 1 : end])
        self._at = end + 1
        return Piece(text, quoted=True, expands=False)

    def _double_quoted(self) -> list[Piece]:
        """Read up to the closing `"`; escaped characters become pieces of their own, in which nothing expands."""
        pieces: list[Piece] = []
        line, text = self._line(), ""
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == '"':
                self._at += 1
                return [*pieces, Piece(text, quoted=True, expands=True)]
            if character == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`"):
                escaped = Piece(self._text[self._at + 1], quoted=True, expands=False)
                pieces += [Piece(text, quoted=True, expands=True), escaped]
                text = ""
                self._at += 2
                continue
            is_open = character == "$" and self._opens_substitution()
            end = self._end_of_substitution(self._at) if is_open else self._at + 1
            text += self._text[self._at : end]
            self._at = end
        raise ValueError(f'line {line}: a `"` is not closed')

    def _opens_substitution(self) -> bool:
        return self._text[self._at + 1 : self._at + 2] in ("(", "{")

    def _end_of_substitution(self, at: int) -> int:
        bracket = self._text[at + 1]
        return self._end_of(bracket, ")" if bracket == "(" else "}", at + 1)

    def _end_of(self, opening: str, closing: str, at: int) -> int:
        """Return the position after the bracket that closes the one at `at`; brackets in quotes do not count."""
        start, depth = at, 0
        while at < len(self._text):
            if self._text[at] == "\\":
                at += 2
            elif self._text.startswith(opening, at):
                depth += 1
                at += len(opening)
            elif self._text.startswith(closing, at):
                depth -= 1
                at += len(closing)
                if depth == 0:
                    return at
            elif self._text[at] in "'\"" and opening != "((":
                at = self._close(self._text[at], at + 1) + 1
            else:
                at += 1
        raise ValueError(f"line {self._line(start)}: `{opening}` is not closed; add `{closing}`")

    def _close(self, quote: str, at: int, *, has_escapes: bool = False) -> int:
        """Return the position of the next `quote` from `at` on; a backslash hides one, except between plain `'`."""
        start = at
        while at < len(self._text) and self._text[at] != quote:
            at += 2 if self._text[at] == "\\" and (has_escapes or quote != "'") else 1
        if at >= len(self._text):
            raise ValueError(f"line {self._line(start)}: a {quote} is not closed")
        return at

    def _skip_blanks(self) -> bool:
        """Skip blanks and comments; return False at the end of the text."""
        while self._at < len(self._text):
            if self._text[self._at] in BLANKS:
                self._at += 1
            elif self._text[self._at] == "#":
                self._skip_comment()
            else:
                return True
        return False

    def _skip_comment(self) -> None:
        """Move to the end of the line, which a backslash in a comment does not continue."""
        end = re.compile(f"[\n{CONTINUATION}]").search(self._text, self._at)
        self._at = len(self._text) if end is None else end.start()
        if end is not None and end[0] == CONTINUATION:
            self._text = f"{self._text[: self._at]}\n{self._text[self._at + 1 :]}"

    def _skip_heredocs(self) -> None:
        """Skip the here-documents that the line before has announced."""
        for delimiter in self._heredocs:
            end = re.compile(rf"^\t*{re.escape(delimiter)}$", re.MULTILINE).search(self._text, self._at)
            self._at = len(self._text) if end is None else end.end()
        self._heredocs = []

    def _line(self, at: int | None = None) -> int:
        end = self._at if at is None else at
        return self._text.count("\n", 0, end) + self._text.count(CONTINUATION, 0, end) + 1


def _may_begin_command(before: list[Token]) -> bool:
    """Return whether a command can begin after the tokens `before`."""
    return not before or before[-1].kind in ("newline", "operator") or before[-1].bare in OPENERS
