"""Filling in a script's variables: `$A`, `${A:-default}`, `$((A * 2))`, `"${LIST[@]}"`.

Commands are never run, so what `$(command)` would print is not known; it is left empty, and every text that it would
have gone into carries a note that says so.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fivefold.importing.shell.words import CONTINUATION, Word

NAME = re.compile(r"[A-Za-z_]\w*")
SPECIAL = frozenset("@*#?-$!0123456789")
PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[@*#?$!0-9])(\[[^\]]*\])?(.*)", re.DOTALL)
OPERATION = re.compile(r"(:?[-=+?])|(##?|%%?)|(//?)|(:)|(?:,,?|\^\^?)\Z")
MARK = "\0"
"""Stands where one word ends and the next begins."""
SPREAD = re.compile(r"\$@|\$\{@\}|\[@\]")
REPLACEMENT = re.compile(r"([#%]?)((?:\\.|'[^']*'|\"[^\"]*\"|\$\{[^}]*\}|[^/])*)(?:/(.*))?", re.DOTALL)
"""`old/new` of `${A/old/new}`; `#old` and `%old` stand only at the begin and at the end."""
KEEP = str.maketrans(" \t\n", "\ue001\ue002\ue003")
"""To what stands for blanks that quotes inside `${A:-"two words"}` keep together."""
RESTORE = {kept: blank for blank, kept in KEEP.items()}
CASES: Mapping[str, Callable[[str], str]] = {
    ",,": str.lower,
    "^^": str.upper,
    ",": lambda text: text[:1].lower() + text[1:],
    "^": lambda text: text[:1].upper() + text[1:],
}


@dataclass(frozen=True)
class Text:
    """A value, and what is not known about it."""

    text: str
    notes: tuple[str, ...] = ()


@dataclass
class Variables:
    """What a script knows: its own variables and arrays, then the environment."""

    environment: Mapping[str, str]
    texts: dict[str, Text] = field(default_factory=dict)
    arrays: dict[str, list[Text]] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    """Names that were asked for."""
    positional: list[Text] = field(default_factory=list)
    """The arguments of the function that is being followed: `$1`, `$2`, ..."""

    def get(self, name: str) -> Text | None:
        """The value of `name`; None if it is not set."""
        if name.isdigit():
            return self.positional[int(name) - 1] if 0 < int(name) <= len(self.positional) else None
        self.read.add(name)
        if name in self.texts:
            return self.texts[name]
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else Text("")
        return Text(self.environment[name]) if name in self.environment else None


class Expander:
    """Turns words into texts."""

    def __init__(self, variables: Variables) -> None:
        self._variables = variables

    def fields(self, word: Word) -> list[Text]:
        """The texts that a word becomes: one, or more where an unquoted value holds blanks or an array is spread."""
        parts: list[str] = []
        notes: list[str] = []
        for piece in word:
            text = self._text(piece.text, notes, in_quotes=piece.quoted) if piece.expands else piece.text
            # Only a substitution is split at blanks; the lexer has split what was written.
            splits = piece.expands and not piece.quoted and "$" in piece.text
            parts.append(re.sub(r"[ \t\n]+", MARK, text) if splits else text)
        found = [text for text in "".join(parts).split(MARK) if text]
        if not found and (not word or any(piece.quoted and not SPREAD.search(piece.text) for piece in word)):
            found = [""]
        return [Text(text.translate(RESTORE), tuple(dict.fromkeys(notes))) for text in found]

    def text(self, word: Word) -> Text:
        """The word as one text."""
        notes: list[str] = []
        parts = [
            self._text(piece.text, notes, in_quotes=piece.quoted) if piece.expands else piece.text for piece in word
        ]
        return Text("".join(parts).replace(MARK, " ").translate(RESTORE), tuple(dict.fromkeys(notes)))

    def arithmetic(self, expression: str, notes: list[str]) -> str:
        """The number that `expression` comes to; empty, with a note, if that cannot be worked out."""
        filled = self._text(expression, notes)
        try:
            return str(_number(ast.parse(filled.strip(), mode="eval").body, self._integer))
        except (SyntaxError, ValueError, ZeroDivisionError):
            notes.append(f"$(({expression.strip()})) cannot be worked out")
            return ""

    def _integer(self, name: str) -> int:
        value = self._variables.get(name)
        return int(value.text or "0") if value is not None else 0

    def _text(
        self, source: str, notes: list[str], keep: Callable[[str], str] | None = None, *, in_quotes: bool = False
    ) -> str:
        """`source`, filled in.

        Args:
            source: what stands in the script.
            notes: receives what is not known about it.
            keep: quotes mean something in it, and this marks what stands in them; None: they are text.
            in_quotes: all of it stands in double quotes, between which `'` is text, and `\\` before most characters.
        """
        result, at = "", 0
        quotes = "" if keep is None else '"\\' if in_quotes else "'\"\\"
        while at < len(source):
            if keep is not None and source[at] in quotes and not (in_quotes and _is_plain_backslash(source, at)):
                quoted, end = self._quoted(source, at, notes)
                result += keep(quoted)
            elif source[at] == "`":
                end = source.index("`", at + 1) + 1
                result += self._command(source[at + 1 : end - 1], notes)
            elif source[at] == "$":
                filled, end = self._substitution(source, at, notes, in_quotes)
                result += filled
            else:
                end = at + 1
                result += "" if source[at] == CONTINUATION else source[at]
            at = end
        return result

    def _quoted(self, source: str, at: int, notes: list[str]) -> tuple[str, int]:
        """What stands in the quotes at `at`, or after the backslash there, and where that ends."""
        if source[at] == "\\":
            return source[at + 1 : at + 2], at + 2
        end = source.find(source[at], at + 1)
        inner = source[at + 1 : end if end >= 0 else len(source)]
        text = inner if source[at] == "'" else self._text(inner, notes, in_quotes=True)
        return text, at + len(inner) + 2

    def _substitution(self, source: str, at: int, notes: list[str], in_quotes: bool) -> tuple[str, int]:
        """What stands for the `$...` at `at`, and where it ends."""
        if source.startswith("$((", at):
            end = _closing(source, at + 1)
            return self.arithmetic(source[at + 3 : end - 2], notes), end
        if source.startswith("$(", at):
            end = _closing(source, at + 1)
            return self._command(source[at + 2 : end - 1], notes), end
        if source.startswith("${", at):
            end = _closing(source, at + 1)
            return self._parameter(source[at + 2 : end - 1], source[at:end], notes, in_quotes), end
        if name := NAME.match(source, at + 1):
            return self._value(name[0], notes), name.end()
        if source[at + 1 : at + 2] in SPECIAL and source[at + 1 : at + 2]:
            return self._special(source[at + 1], notes), at + 2
        return "$", at + 1

    def _command(self, command: str, notes: list[str]) -> str:
        notes.append(f"$({' '.join(command.split())}) is not run, and left empty")
        return ""

    def _special(self, name: str, notes: list[str]) -> str:
        """`$@`, `$#`, `$1` and their like."""
        positional = self._variables.positional
        if name in "@*":
            notes += [note for text in positional for note in text.notes]
            return MARK.join(text.text for text in positional)
        return str(len(positional)) if name == "#" else self._value(name, notes)

    def _value(self, name: str, notes: list[str]) -> str:
        value = self._variables.get(name)
        if value is None:
            is_name = NAME.fullmatch(name) is not None
            fix = f"; set it before the command: {name}=... fivefold import" if is_name else ""
            notes.append(f"${name} is not set, and left empty{fix}")
            return ""
        notes += value.notes
        return value.text

    def _parameter(self, inner: str, whole: str, notes: list[str], in_quotes: bool) -> str:
        """`${inner}`; `whole` is returned where that is none of the shell's, as in OmegaConf's `${actor.path}`."""
        match = PARAMETER.fullmatch(inner)
        if match is None or (match[4] and not OPERATION.match(match[4])):
            return whole
        length, name, index, rest = match.groups()
        if index in ("[@]", "[*]") and not rest:
            items = self._variables.arrays.get(name, [])
            self._variables.read.add(name)
            notes += [note for item in items for note in item.notes]
            return str(len(items)) if length else MARK.join(item.text for item in items)
        if index is not None and name in self._variables.arrays:
            return self._item(name, index, notes)
        if length:
            return str(len(self._value(name, notes)))
        if not rest:
            return self._special(name, notes) if name in SPECIAL else self._value(name, notes)
        return self._operation(name, rest, notes, in_quotes)

    def _item(self, name: str, index: str, notes: list[str]) -> str:
        items, place = self._variables.arrays[name], self.arithmetic(index[1:-1], notes)
        if not place or not 0 <= int(place) < len(items):
            return ""
        notes += items[int(place)].notes
        return items[int(place)].text

    def _operation(self, name: str, rest: str, notes: list[str], in_quotes: bool) -> str:
        value = self._variables.get(name)
        operation = OPERATION.match(rest)
        assert operation is not None, "the caller has looked"
        sign, argument = operation[0], rest[operation.end() :]
        if sign == ":" and name in "@*":
            notes.append(f"${{{name}{rest}}} is not followed, and left empty")
            return ""
        if sign == ":":
            return self._slice(self._value(name, notes), argument, notes)
        if sign in CASES:
            return CASES[sign](self._value(name, notes))
        if operation[1] is None:
            return self._trimmed(self._value(name, notes), sign, argument, notes)
        is_given = value is not None and (bool(value.text) or not sign.startswith(":"))
        if sign[-1] == "+":
            return self._text(argument, notes, _kept_together, in_quotes=in_quotes) if is_given else ""
        if is_given or sign[-1] == "?":
            return self._value(name, notes)
        own: list[str] = []
        default = self._text(argument, own, _kept_together, in_quotes=in_quotes)
        notes += own
        if sign[-1] == "=":
            self._variables.texts[name] = Text(default.translate(RESTORE), tuple(own))
        return default

    def _slice(self, value: str, bounds: str, notes: list[str]) -> str:
        """`${A:1:2}`: from a place on, so many characters; what is negative is counted from the end."""
        first, _, length = bounds.partition(":")
        start = int(self.arithmetic(first, notes) or "0") if first.strip() else 0
        start += len(value) if start < 0 else 0
        if start < 0:
            return ""
        if not length.strip():
            return value[start:] if ":" not in bounds else ""
        count = int(self.arithmetic(length, notes) or "0")
        return value[start : start + count if count >= 0 else max(start, len(value) + count)]

    def _trimmed(self, value: str, sign: str, argument: str, notes: list[str]) -> str:
        """`${A##*/}`, `${A%.*}`, `${A//old/new}` and their like."""
        if sign not in ("/", "//"):
            return _cut(value, sign, re.compile(_regex(self._text(argument, notes, _taken_literally)), re.DOTALL))
        match = REPLACEMENT.fullmatch(argument)
        assert match is not None, "it matches any text"
        place, old, new = match[1], match[2], self._text(match[3] or "", notes, str)
        pattern = {"#": r"\A", "": "", "%": ""}[place] + _regex(self._text(old, notes, _taken_literally))
        return re.sub(pattern + (r"\Z" if place == "%" else ""), lambda _: new, value, count=0 if sign == "//" else 1)


def _is_plain_backslash(source: str, at: int) -> bool:
    """Whether a backslash in double quotes stands for itself, since nothing follows that it could quote."""
    return source[at] == "\\" and source[at + 1 : at + 2] not in ('"', "\\", "$", "`", "}")


def _kept_together(quoted: str) -> str:
    return quoted.translate(KEEP)


def _taken_literally(quoted: str) -> str:
    return re.sub("(.)", r"\\\1", quoted, flags=re.DOTALL)


def _closing(source: str, at: int) -> int:
    """The position after the bracket that closes the one at `at`; quotes in between are skipped, where they close."""
    pairs = {"(": ")", "{": "}"}
    opening, closing, depth = source[at], pairs[source[at]], 0
    while at < len(source):
        if source[at] in "'\"":
            at = max(at, source.find(source[at], at + 1))
        depth += (source[at] == opening) - (source[at] == closing)
        at += 2 if source[at] == "\\" else 1
        if depth == 0:
            return at
    return len(source)


def _cut(value: str, sign: str, pattern: re.Pattern[str]) -> str:
    """`value` without the shortest (`#`, `%`) or longest (`##`, `%%`) part at its begin or end that matches."""
    lengths = range(len(value) + 1) if len(sign) == 1 else range(len(value), -1, -1)
    for length in lengths:
        cut = length if sign[0] == "#" else len(value) - length
        if pattern.fullmatch(value[:cut] if sign[0] == "#" else value[cut:]):
            return value[cut:] if sign[0] == "#" else value[:cut]
    return value


def _regex(pattern: str) -> str:
    """Of the shell's `*` and `?`; a character after a backslash stands for itself."""
    wild = {"*": ".*", "?": "."}
    tokens = re.findall(r"\\?.", pattern, flags=re.DOTALL)
    return "".join(wild.get(token, re.escape(token[-1])) for token in tokens)


def _number(node: ast.expr, integer: Callable[[str], int]) -> int:
    """The value of an arithmetic expression in the shell's whole numbers, read as a Python tree but not run."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            return integer(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, integer)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATIONS:
            return OPERATIONS[type(sign)](_number(left, integer), _number(right, integer))
        case ast.Compare(left=left, ops=[sign], comparators=[right]) if type(sign) in COMPARISONS:
            return int(COMPARISONS[type(sign)](_number(left, integer), _number(right, integer)))
    raise ValueError("not an expression of whole numbers")


def _quotient(left: int, right: int) -> int:
    """The shell rounds towards 0."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _remainder(left: int, right: int) -> int:
    return left - right * _quotient(left, right)


OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: _remainder,
}
COMPARISONS: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
