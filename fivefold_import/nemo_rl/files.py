"""NeMo-RL's files: YAML that names other YAML files in `defaults`, and scripts that name one in `--config`.

defaults: [base.yaml, ../moe.yaml]     base.yaml, then moe.yaml, then the file itself: later values override earlier
policy: {optimizer: null}              ones, a value replaces a section, and a section with `_override_: true` all of it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.config.paths import user_path
from fivefold_import.dialect import merged
from fivefold_import.files import DEEPEST, DEFAULTS, FileText, find, tree_and_defaults
from fivefold_import.source import YAMLS, Document, flatten, read_document

PROMPTS = ("prompt_file", "system_prompt_file")
"""Keys that name files with texts."""
CONFIG, OVERRIDES = "--config", "_override_"
PROGRAMS = (
    *("run_grpo", "run_grpo_single_controller", "run_grpo_sliding_puzzle", "run_grpo_nemo_gym", "run_ppo"),
    *("run_distillation", "run_distillation_nemo_gym", "run_dpo", "run_rm", "run_sft"),
)
"""Programs that train what their configuration says, which shows the task."""


def read(path: Path, environment: Mapping[str, str]) -> Document:
    """Return the keys of a YAML file with the files in its `defaults`, or of a script with the file in its `--config`.

    Raises:
        ValueError: a file cannot be read, or its `defaults` lead back to it.
    """
    if path.suffix in YAMLS and path.is_file():
        problems: list[str] = []
        tree = _with_parents(path, problems, DEEPEST)
        return Document(path.name, _with_texts(path, dict(flatten(tree))), problems=problems)
    script = read_document(path, environment)
    named = script.values.get(CONFIG)
    if not named:
        return script
    parent = find(path, str(named))
    if parent is None:
        script.problems.append(f"{_unread(named)}: give the file before the script")
        return script
    return replace(merged([read(parent, environment), script]), name=script.name)


def _with_texts(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with the texts of the files that some of them name."""
    for key, value in values.items():
        if key.rpartition(".")[2] in PROMPTS and isinstance(value, str) and (file := find(path, value)) is not None:
            values[key] = FileText.of(value, file.read_text(encoding="utf-8"))
    return values


def merge(documents: Sequence[Document]) -> Document:
    """Merge the files; one of them may be the configuration that a script names."""
    whole = merged(documents)
    program = whole.program.rpartition("/")[2].removesuffix(".py")
    if program in PROGRAMS:
        whole.program = ""  # The sections say what it trains; the name of a program would not.
    elif program:
        whole.problems.append(f"{whole.program} is no program of NeMo-RL's that is known here")
    if any(Path(document.name).suffix in YAMLS for document in documents):
        unread = _unread(whole.values.get(CONFIG))
        whole.problems = [problem for problem in whole.problems if not problem.startswith(unread)]
    return whole


def _unread(name: object) -> str:
    return f"{CONFIG}={name} was not read, and there is no such file near the script"


def _with_parents(path: Path, problems: list[str], deepest: int) -> dict[str, Any]:
    """Return the tree of a file merged over the trees of the files that its `defaults` name."""
    tree, named = tree_and_defaults(path, deepest)
    whole: dict[str, Any] = {}
    for name in named:
        parent = path.parent / user_path(str(name))
        if parent.is_file():
            whole = _merged(whole, _with_parents(parent, problems, deepest - 1))
        else:
            problems.append(f"{path.name}: its {DEFAULTS} name {name}, and {parent} is not there: its keys are missing")
    return _merged(whole, tree)


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return two trees as one, in which values of `over` count."""
    whole = dict(under)
    for key, value in over.items():
        old = whole.get(key) or {}
        if not isinstance(value, Mapping):
            whole[key] = value
            continue
        replaces = value.get(OVERRIDES) is True or not isinstance(old, Mapping)
        kept = {name: child for name, child in value.items() if name != OVERRIDES}
        whole[key] = _merged({} if replaces else old, kept)
    return whole
