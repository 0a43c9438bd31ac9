"""slime's launch scripts: `python3 train.py` with flags from arrays; `source` reads the array of the model.

--lr 1e-6 --eval-prompt-data aime a.jsonl --colocate   ──>   lr: 1e-6, eval_prompt_data: [aime, a.jsonl], colocate: true
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fivefold.config.text_files import read_text
from fivefold_import.dialect import merged
from fivefold_import.shell.expand import Text
from fivefold_import.shell.script import read_script
from fivefold_import.source import YAMLS, Document, document_of_words, named_errors, read_document

PROGRAMS = ("train.py", "train_async.py")
"""The programs that train."""


def read(path: Path, environment: Mapping[str, str]) -> Document:
    """Return the flags of the command that a script launches, by their names in Python.

    Raises:
        ValueError: the script cannot be read, or launches no training.
    """
    if path.suffix in YAMLS or not path.is_file():
        return read_document(path, environment)
    with named_errors(path):
        script = read_script(read_text(path, str(path)), environment, starts, path.parent)
        if len(script.launches) != 1:
            found = len(script.launches) or "no"
            raise ValueError(f"{found} commands start {' or '.join(PROGRAMS)}; give a script with one of them")
        document = document_of_words(path.name, _joined(script.launches[0]))
    document.notes += [f"{path.name}, {note}" for note in script.notes]
    document.problems += [f"{path.name}, {problem}" for problem in script.problems]
    document.values["program"] = script.programs[0]
    return document


def merge(documents: Sequence[Document]) -> Document:
    """Merge the files and the overrides, in which a flag may have dashes."""
    return merged([document.renamed(_name) for document in documents])


def starts(texts: Sequence[Text]) -> tuple[str, list[Text]] | None:
    """Return the training program that a command starts, and its arguments."""
    names = [text.text.rpartition("/")[2] for text in texts]
    place = next((place for place, name in enumerate(names) if name in PROGRAMS), None)
    flags = place is not None and any(text.text.startswith("--") for text in texts[place:])
    return (names[place], list(texts[place + 1 :])) if place is not None and flags else None


def _name(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def _joined(words: Sequence[Text]) -> list[Text]:
    """Return one word for each flag: `a_b=1`, `a_b=[1, 2]` for several values, and `a_b=true` for none."""
    flags: list[tuple[str, list[Text]]] = []
    for word in words:
        if word.text.startswith("--"):
            name, equals, value = word.text.partition("=")
            flags.append((_name(name), [Text(value, word.notes)] if equals else []))
        elif flags:
            flags[-1][1].append(word)
    return [_flag(name, values) for name, values in flags]


def _flag(name: str, values: Sequence[Text]) -> Text:
    notes = tuple(note for value in values for note in value.notes)
    texts = [value.text for value in values]
    if len(texts) > 1:
        kept = [text for text in texts if text]
        return Text(f"{name}=[{', '.join(map(_quoted, kept))}]", notes)
    return Text(f"{name}={texts[0] if texts else 'true'}", notes)


def _quoted(text: str) -> str:
    """Return an item of a list as YAML has it."""
    return text if text.replace(".", "", 1).replace("-", "", 1).isdigit() else "'" + text.replace("'", "''") + "'"
