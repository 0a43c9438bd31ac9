"""What the words of a command mean: which set variables, which start a program, and which are its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

from fivefold_import.shell.expand import Text
from fivefold_import.shell.words import OPENERS, Piece, Token, Word

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
LAUNCHER = re.compile(r"([^=]*/)?(python[\d.]*|torchrun|accelerate)|[^=]*\.py")
"""A program that may be a training command."""
OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@-]*=")
"""How an argument begins that sets a key: `a.b=`, `+a.b=`, `++a.b=` or `~a.b=`."""
DOTTED = re.compile(r"[+~]{1,2}[A-Za-z_][\w./@-]*=|[A-Za-z_][\w/@-]*\.[\w./@-]*=|--[A-Za-z][\w.-]*(=|\Z)")
"""An argument that cannot be an assignment, and is no name of a program either."""
DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset"})


def arguments(words: Sequence[Text]) -> list[Text]:
    """Return the arguments of the program that `words` start; nothing if there is none with `key=value` arguments."""
    programs = [place for place, word in enumerate(words) if LAUNCHER.fullmatch(word.text)]
    overrides = [place for place, word in enumerate(words) if programs and OVERRIDE.match(word.text)]
    first = next((place for place in overrides if place > programs[0]), None)
    if first is None:
        return []
    return list(words[max(place for place in programs if place < first) + 1 :])


def program(words: Sequence[Text]) -> str:
    """Return the program that `words` start: the module after `-m`, or the last file before the first `key=value`."""
    texts = list(takewhile(lambda text: not OVERRIDE.match(text), (word.text for word in words)))
    if "-m" in texts[:-1]:
        return texts[texts.index("-m") + 1]
    return [text for text in texts if LAUNCHER.fullmatch(text)][-1]


def assignment(word: Word) -> tuple[str, bool, Word] | None:
    """Return (name, whether it is `+=`, the value's word) if `word` is an assignment; else None."""
    match = ASSIGNMENT.match(word[0].text) if word and not word[0].quoted else None
    if match is None:
        return None
    rest = Piece(word[0].text[match.end() :], quoted=False, expands=True)
    return match[1], bool(match[2]), (rest, *word[1:])


def plain(word: Word) -> str | None:
    """Return the text of a word that consists of one piece; None for other words."""
    return word[0].text if len(word) == 1 else None


def effects(tokens: Sequence[Token], functions: frozenset[str]) -> list[str]:
    """Return what `tokens` would set or start, in words; nothing if they neither set variables nor start a program."""
    names: list[str] = []
    starts: list[str] = []
    begins, declares, started = True, False, ""
    for token in tokens:
        if token.kind == "array":
            names.append(token.text)
        if token.kind != "word":
            begins, declares, started = token.kind in ("operator", "newline", "array"), False, ""
            continue
        text = token.word[0].text if token.word else ""
        written = assignment(token.word)
        if written is not None and (begins or declares):
            names.append(written[0])
        elif started and OVERRIDE.match(text):
            starts.append(started)
            started = ""
        elif begins and text in functions:
            starts.append(text)
        elif LAUNCHER.fullmatch(text):
            started = text
        declares = declares or (begins and text in DECLARATIONS)
        begins = begins and (written is not None or text in OPENERS or text == "{")
    values = [f"the values of {', '.join(dict.fromkeys(names))}"] if names else []
    return values + [f"the arguments of {name}" for name in dict.fromkeys(starts)]
