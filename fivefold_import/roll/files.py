"""ROLL's files: YAML that names other YAML files in `defaults`, as Hydra reads them, and texts that its code has.

Its scripts name a YAML file, by its folder and its name.

defaults: [../config/traj_envs@_here_]     the keys of ../config/traj_envs.yaml, which the file's own override
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.config.text_files import read_text
from fivefold_import.dialect import merged
from fivefold_import.files import DEEPEST, DEFAULTS, FileText, find, tree_and_defaults
from fivefold_import.shell.expand import Text
from fivefold_import.shell.script import read_script
from fivefold_import.source import YAMLS, Document, flatten, named_errors, read_document

SELF, HERE = "_self_", "@_here_"
PROMPTS, PROMPT_MAP = "roll/utils/prompt.py", "prompt_maps"
"""The file with the questions to judges, and the mapping there of their names to variables."""
NAME, FOLDER = "--config_name", "--config_path"
PROGRAMS = tuple(
    f"start_{name}_pipeline.py"
    for name in ("rlvr", "rlvr_vl", "agentic", "sft", "dpo", "onpolicy_distill", "distill", "distill_vl")
)
"""Programs that train what their YAML file says."""


def read(path: Path, environment: Mapping[str, str]) -> Document:
    """Return the keys of a YAML file and of the files in its `defaults`, or of the file that a script names.

    Raises:
        ValueError: a file cannot be read, or its `defaults` lead back to it.
    """
    if not path.is_file():
        return read_document(path, environment)
    if path.suffix not in YAMLS:
        return _named_by(path, environment) or read_document(path, environment)
    document = _with_parents(path, DEEPEST)
    for key, value in document.values.items():
        if key.endswith(".judge_prompt") and (text := _question(path, value)) is not None:
            document.values[key] = FileText.of(value, text)
    return document


def _named_by(path: Path, environment: Mapping[str, str]) -> Document | None:
    """Return the keys of the YAML file that a script's command names; None if none names one."""
    with named_errors(path):
        script = read_script(read_text(path, str(path)), environment, starts)
    if len(script.launches) != 1:
        return None
    options = _options(script.launches[0])
    name = f"{options[NAME].removesuffix('.yaml')}.yaml"
    # Hydra's folder is relative to the program's, which is above the script's, or the script's own.
    places = (f"{options.get(FOLDER, '')}/{name}", f"examples/{options.get(FOLDER, '')}/{name}")
    beside = path.parent / name
    file = beside if beside.is_file() else next(filter(None, (find(path, place) for place in places)), None)
    if file is None:
        raise ValueError(f"{path}: {NAME} {options[NAME]} is not there, neither in {path.parent}: give the file itself")
    document, program = read(file, environment), script.programs[0]
    problems = [f"{path.name}, {problem}" for problem in script.problems]
    if program not in PROGRAMS:
        problems.append(f"{path.name} starts {program}, which is no program of ROLL's that trains")
    return replace(document, name=path.name, problems=[*document.problems, *problems])


def starts(texts: Sequence[Text]) -> tuple[str, list[Text]] | None:
    """Return the program that a command starts with the name of a YAML file, and its arguments."""
    place = next((place for place, text in enumerate(texts) if text.text.endswith(".py")), None)
    if place is None or NAME not in _options(texts[place + 1 :]):
        return None
    return texts[place].text.rpartition("/")[2], list(texts[place + 1 :])


def _options(words: Sequence[Text]) -> dict[str, str]:
    """Return the options `--name value` and `--name=value` of a command."""
    options: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], Text("")], strict=True):
        name, equals, value = word.text.partition("=")
        if name.startswith("--"):
            options[name] = value if equals else following.text
    return options


def _with_parents(path: Path, deepest: int) -> Document:
    tree, named = tree_and_defaults(path, deepest)
    own, parts, problems = Document(path.name, dict(flatten(tree))), list[Document](), list[str]()
    for entry in named:
        if entry == SELF:
            parts.append(own)
        elif (parent := _parent(path, entry)) is not None:
            if parent.read_bytes().strip():
                parts.append(_with_parents(parent, deepest - 1))
        else:
            problems.append(
                f"{path.name}: its {DEFAULTS} have {entry}, and no such file is there: its keys are missing"
            )
    whole = merged(parts if own in parts else [*parts, own])
    return replace(whole, name=path.name, problems=[*whole.problems, *problems])


def _parent(path: Path, entry: Any) -> Path | None:
    """Return the file that an entry of `defaults` names; None if there is none, or if it goes to another place."""
    if not isinstance(entry, str) or "@" in entry.removesuffix(HERE):
        return None
    file = path.parent / f"{entry.removesuffix(HERE).removesuffix('.yaml')}.yaml"
    return file if file.is_file() else None


def _question(path: Path, name: Any) -> str | None:
    """Return the question to a judge that ROLL's code has under a name; None if its file is not near `path`."""
    file = find(path, PROMPTS) if isinstance(name, str) else None
    if file is None:
        return None
    try:
        tree = ast.parse(file.read_bytes(), file.name)
    except SyntaxError:
        return None
    assigned = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    names = assigned.get(PROMPT_MAP)
    if not isinstance(names, ast.Dict):
        return None
    for key, value in zip(names.keys, names.values, strict=True):
        text = assigned.get(value.id) if isinstance(value, ast.Name) else value
        if isinstance(key, ast.Constant) and key.value == name and isinstance(text, ast.Constant):
            return str(text.value)
    return None
