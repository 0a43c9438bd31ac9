"""What the words of a command mean: which set variables, which start a program, and which are its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fivefold_import.shell.expand import Text
from fivefold_import.shell.tokens import OPENERS, Token

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
LAUNCHER = re.compile(r"([^=]*/)?(python[\d.]*|torchrun|accelerate)|[^=]*\.py")
"""A program that may be a training command."""
OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@-]*=")
"""How an argument begins that sets a key: `a.b=`, `+a.b=`, `++a.b=` or `~a.b=`."""
DOTTED = re.compile(r"[+~]{1,2}[A-Za-z_][\w./@-]*=|[A-Za-z_][\w/@-]*\.[\w./@-]*=|--[A-Za-z][\w.-]*(=|\Z)")
"""An argument that cannot be an assignment, and is no name of a program either."""
DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset"})


def launched(texts: Sequence[Text]) -> tuple[str, list[Text]] | None:
    """Return the program that `texts` start and its arguments; None if no program has `key=value` arguments.

    The program is the module after `-m`, or else the last file before the first `key=value`.
    """
    programs = [place for place, word in enumerate(texts) if LAUNCHER.fullmatch(word.text) or _runs(texts[place:])]
    overrides = [
        place for place, word in enumerate(texts) if (key := OVERRIDE.match(word.text)) and not _pins(word, key)
    ]
    first = next((place for place in overrides if programs and place > programs[0]), None)
    if first is None:
        return None
    last = max(place for place in programs if place < first)
    before = [word.text for word in texts[programs[0] : first]]
    if "-m" not in before[:-1]:
        return texts[last].text, list(texts[last + 1 :])
    place = before.index("-m") + 1
    # The options of `uv run` itself come before the module.
    start = programs[0] + place if _runs(texts[last:]) else last
    return before[place], list(texts[start + 1 :])


def _pins(word: Text, key: re.Match[str]) -> bool:
    """Return whether a word names a package's version, `name==1.0`, as `uv run --with` has it."""
    return word.text[key.end() :].startswith("=")


def _runs(texts: Sequence[Text]) -> bool:
    """Return whether a command begins with `uv run`, after which a module may follow without Python's name."""
    return [text.text for text in texts[:2]] == ["uv", "run"]


def assignment(word: str) -> tuple[str, bool, str] | None:
    """Return (name, whether it is `+=`, the value as written) if `word` is an assignment; else None."""
    match = ASSIGNMENT.match(word)
    return None if match is None else (match[1], bool(match[2]), word[match.end() :])


def effects(tokens: Sequence[Token], functions: frozenset[str]) -> tuple[list[str], list[str]]:
    """Return the names of the variables that `tokens` would set, and of the programs that they would start."""
    names: list[str] = []
    starts: list[str] = []
    begins, declares, started = True, False, ""
    for token in tokens:
        if token.kind == "array":
            names.append(token.text)
        if token.kind != "word":
            begins, declares, started = True, False, ""
            continue
        text = token.text.strip("\"'")
        written = assignment(token.text)
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
    return list(dict.fromkeys(names)), list(dict.fromkeys(starts))
