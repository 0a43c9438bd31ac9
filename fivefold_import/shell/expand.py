"""Expansion of a script's variables: `$A`, `${A:-default}`, `$((A * 2))`, `"${LIST[@]}"`.

Commands are never run, so what `$(command)` would print is not known. It is left empty, and each text that it would be
part of carries a note that says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fivefold_import.shell.arithmetic import evaluate
from fivefold_import.shell.quotes import after_quotes, closing

NAME = re.compile(r"[A-Za-z_]\w*")
SPECIAL = frozenset("@*#?-$!0123456789")
"""The names of the shell's own parameters, such as `$@` and `$1`."""
PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[@*#?$!0-9])(\[[^\]]*\])?(.*)", re.DOTALL)
"""What `${...}` holds: `#` for the length, the name, an array's index, and an operation."""
OPERATION = re.compile(r"(:?[-=+?])|(##?|%%?)|(//?)|(:)|(?:,,?|\^\^?)\Z")
"""The operation in `${A:-x}`, `${A##x}`, `${A/x/y}`, `${A:1:2}` or `${A,,}`; the first group is for defaults."""
MARK = "\0"
"""A character that stands where one word ends and the next begins."""
SPREAD = re.compile(r"\$@|\$\{@\}|\[@\]")
"""A reference that becomes one word for each item, even in quotes."""
REPLACEMENT = re.compile(r"([#%]?)((?:\\.|'[^']*'|\"[^\"]*\"|\$\{[^}]*\}|[^/])*)(?:/(.*))?", re.DOTALL)
"""`old/new` in `${A/old/new}`; `#old` matches only at the beginning of the value, `%old` only at the end."""
KEEP = str.maketrans(" \t\n", "\ue001\ue002\ue003")
"""Replaces blanks that quotes protect, as in `${A:-"two words"}`, so that the value is not split at them."""
QUOTED = "\ue004"
"""Stands where quotes begin, so that a word of empty quotes is one."""
RESTORE = {**{kept: blank for blank, kept in KEEP.items()}, ord(QUOTED): None}
"""Turns the replacements back into blanks, once words are split."""
ESCAPED_IN_QUOTES = ('"', "\\", "$", "`", "}", "\n")
"""The characters before which a backslash between double quotes does not stand for itself."""
ESCAPES = {"n": "\n", "t": "\t"}
"""The escapes in `$'...'` that stand for another character than the one after the backslash."""
TWO_OUTCOMES = re.compile(r"&&\s*echo\s+(\S+)\s*\|\|\s*echo\s+(\S+)\s*\Z")
"""The end of a command that prints one of two words."""
CASES: Mapping[str, Callable[[str], str]] = {
    ",,": str.lower,
    "^^": str.upper,
    ",": lambda text: text[:1].lower() + text[1:],
    "^": lambda text: text[:1].upper() + text[1:],
}


class Unknown(str):
    """A note on a part of a value that is not known, because commands are not run."""


@dataclass(frozen=True)
class Text:
    """A value, with notes on what of it is not known or not set."""

    text: str
    notes: tuple[str, ...] = ()

    @property
    def unknown(self) -> tuple[str, ...]:
        """Why the value is not known; empty if it is, as for a variable that is not set."""
        return tuple(note for note in self.notes if isinstance(note, Unknown))


@dataclass
class Variables:
    """The variables that a script can read: its own, its arrays, then the environment."""

    environment: Mapping[str, str]
    texts: dict[str, Text] = field(default_factory=dict)
    arrays: dict[str, list[Text]] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    """Names that the script has read."""
    positional: list[Text] = field(default_factory=list)
    """The arguments of the function that is being read: `$1`, `$2`, ..."""

    def get(self, name: str) -> Text | None:
        """Return the value of `name`; None if it is not set."""
        if name.isdigit():
            return self.positional[int(name) - 1] if 0 < int(name) <= len(self.positional) else None
        self.read.add(name)
        if name in self.texts:
            return self.texts[name]
        if name in self.arrays:
            return self.arrays[name][0] if self.arrays[name] else Text("")
        return Text(self.environment[name]) if name in self.environment else None


class Expander:
    """Turns a script's words into texts, with its variables filled in."""

    def __init__(self, variables: Variables) -> None:
        self._variables = variables

    def fields(self, word: str) -> list[Text]:
        """Return the texts that a word becomes: several, if an unquoted value holds blanks or an array is spread."""
        notes: list[str] = []
        found = [text for text in self._text(word, notes, _kept_together, splits=True).split(MARK) if text]
        return [Text(text.translate(RESTORE), tuple(dict.fromkeys(notes))) for text in found]

    def text(self, word: str) -> Text:
        """Return the word as one text."""
        notes: list[str] = []
        text = self._text(word, notes, _kept_together).replace(MARK, " ")
        return Text(text.translate(RESTORE), tuple(dict.fromkeys(notes)))

    def arithmetic(self, expression: str, notes: list[str]) -> str:
        """Return the value of an arithmetic expression; empty, with a note, if it cannot be computed."""
        filled = self._text(expression, notes, str, in_quotes=True).translate(RESTORE)
        try:
            return str(evaluate(filled, self._integer))
        except (SyntaxError, ValueError, ZeroDivisionError):
            notes.append(Unknown(f"$(({expression.strip()})) cannot be computed, and is left empty"))
            return ""

    def _integer(self, name: str) -> int:
        value = self._variables.get(name)
        return int(value.text or "0") if value is not None else 0

    def _text(
        self,
        source: str,
        notes: list[str],
        keep: Callable[[str], str],
        *,
        in_quotes: bool = False,
        splits: bool = False,
    ) -> str:
        """Return `source` with its variables filled in.

        Args:
            source: text as the script has it.
            notes: receives notes on what is not known.
            keep: called with each quoted part of `source`; returns what stands for it.
            in_quotes: whether all of `source` is between double quotes, where `'` is plain text, and so is `\\`
                before most characters.
            splits: whether blanks of a value that no quotes protect end a word.
        """
        result, at = "", 0
        while at < len(source):
            if source[at] == "\\" and not (in_quotes and source[at + 1 : at + 2] not in ESCAPED_IN_QUOTES):
                part, end = keep(source[at + 1 : at + 2].replace("\n", "")), at + 2
            elif source[at] == '"' or (source[at] == "'" and not in_quotes):
                part, end = self._quoted(source, at, notes, keep)
            elif not in_quotes and source.startswith(("$'", '$"'), at):
                # `$"..."` is text to be translated, with the quotes of `"..."`; `$'...'` has escapes.
                part, end = self._quoted(source, at + 1, notes, keep, has_escapes=source[at + 1] == "'")
            elif source[at] in "$`":
                part, end = self._substitution(source, at, notes, in_quotes)
                part = re.sub(r"[ \t\n]+", MARK, part) if splits else part
            else:
                part, end = source[at], at + 1
            result += part
            at = end
        return result

    def _quoted(
        self, source: str, at: int, notes: list[str], keep: Callable[[str], str], *, has_escapes: bool = False
    ) -> tuple[str, int]:
        """Return what stands for the text in the quotes at `at`, and the position after it."""
        end = after_quotes(source, at, has_escapes=has_escapes)
        inner = source[at + 1 : end - 1]
        if has_escapes:
            return keep(re.sub(r"\\(.)", lambda match: ESCAPES.get(match[1], match[1]), inner)), end
        if source[at] == "'":
            return keep(inner), end
        text = self._text(inner, notes, str, in_quotes=True)
        # An array without items leaves no word, even in quotes.
        return keep(text) if text or not SPREAD.search(inner) else "", end

    def _substitution(self, source: str, at: int, notes: list[str], in_quotes: bool) -> tuple[str, int]:
        """Return the value of the `$...` or of the command in backticks at `at`, and the position after it."""
        if source[at] == "`":
            end = after_quotes(source, at)
            return self._command(source[at + 1 : end - 1], notes), end
        if source.startswith("$((", at):
            end = closing(source, at + 1)
            return self.arithmetic(source[at + 3 : end - 2], notes), end
        if source.startswith("$(", at):
            end = closing(source, at + 1)
            return self._command(source[at + 2 : end - 1], notes), end
        if source.startswith("${", at):
            end = closing(source, at + 1)
            return self._parameter(source[at + 2 : end - 1], source[at:end], notes, in_quotes), end
        if name := NAME.match(source, at + 1):
            return self._value(name[0], notes), name.end()
        if source[at + 1 : at + 2] in SPECIAL and source[at + 1 : at + 2]:
            return self._special(source[at + 1], notes), at + 2
        return "$", at + 1

    def _command(self, command: str, notes: list[str]) -> str:
        """Return the empty text, with a note that the command is not run."""
        either = TWO_OUTCOMES.search(command)
        outcomes = f"; it prints {either[1]} or {either[2]}" if either is not None else ""
        notes.append(Unknown(f"$({' '.join(command.split())}) is not run, and left empty{outcomes}"))
        return ""

    def _special(self, name: str, notes: list[str]) -> str:
        """Return the value of `$@`, `$#`, `$1` or another of the shell's own parameters."""
        positional = self._variables.positional
        if name in "@*":
            notes += [note for text in positional for note in text.notes]
            return MARK.join(text.text for text in positional)
        return str(len(positional)) if name == "#" else self._value(name, notes)

    def _value(self, name: str, notes: list[str]) -> str:
        """Return a variable's value; empty, with a note, if it is not set."""
        value = self._variables.get(name)
        if value is None:
            is_name = NAME.fullmatch(name) is not None
            fix = f"; set it before the command: {name}=... fivefold import" if is_name else ""
            notes.append(f"${name} is not set, and left empty{fix}")
            return ""
        notes += value.notes
        return value.text

    def _parameter(self, inner: str, whole: str, notes: list[str], in_quotes: bool) -> str:
        """Return the value of `${inner}`; `whole` if that is not the shell's, as OmegaConf's `${actor.path}`."""
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
        """Return `${name[index]}`; empty if the array has no such item."""
        items, place = self._variables.arrays[name], self.arithmetic(index[1:-1], notes)
        if not place or not 0 <= int(place) < len(items):
            return ""
        notes += items[int(place)].notes
        return items[int(place)].text

    def _operation(self, name: str, rest: str, notes: list[str], in_quotes: bool) -> str:
        """Return `${name...}` with a default, a slice, a change of case, or a part cut off or replaced."""
        value = self._variables.get(name)
        operation = OPERATION.match(rest)
        assert operation is not None, "the caller has matched it"
        sign, argument = operation[0], rest[operation.end() :]
        if sign == ":" and name in "@*":
            notes.append(Unknown(f"${{{name}{rest}}} is not followed, and left empty"))
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
        """Return `${A:1:2}`: 2 characters from position 1; negative numbers count from the end."""
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
        """Return `${A##*/}`, `${A%.*}`, `${A//old/new}` or another value with a part cut off or replaced."""
        if sign not in ("/", "//"):
            return _cut(value, sign, re.compile(_regex(self._text(argument, notes, _taken_literally)), re.DOTALL))
        match = REPLACEMENT.fullmatch(argument)
        assert match is not None, "the pattern matches any text"
        place, old, new = match[1], match[2], self._text(match[3] or "", notes, str)
        pattern = {"#": r"\A", "": "", "%": ""}[place] + _regex(self._text(old, notes, _taken_literally))
        return re.sub(pattern + (r"\Z" if place == "%" else ""), lambda _: new, value, count=0 if sign == "//" else 1)


def _kept_together(quoted: str) -> str:
    return QUOTED + quoted.translate(KEEP)


def _taken_literally(quoted: str) -> str:
    return re.sub("(.)", r"\\\1", quoted, flags=re.DOTALL)


def _cut(value: str, sign: str, pattern: re.Pattern[str]) -> str:
    """Return `value` without a part that matches: at its beginning for `#` and `##`, at its end for `%` and `%%`.

    One sign cuts the shortest part off, two signs the longest.
    """
    lengths = range(len(value) + 1) if len(sign) == 1 else range(len(value), -1, -1)
    for length in lengths:
        cut = length if sign[0] == "#" else len(value) - length
        if pattern.fullmatch(value[:cut] if sign[0] == "#" else value[cut:]):
            return value[cut:] if sign[0] == "#" else value[:cut]
    return value


def _regex(pattern: str) -> str:
    """Return a shell pattern with `*` and `?` as a regular expression; `\\` quotes a character."""
    wild = {"*": ".*", "?": "."}
    tokens = re.findall(r"\\?.", pattern, flags=re.DOTALL)
    return "".join(wild.get(token, re.escape(token[-1])) for token in tokens)
