"""Finds a model: in a folder, by a hub name, or among the models that ship with the package."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE_PREFIX = "package:"
_MODELS = Path(__file__).parent.parent / "models"
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_LOCAL_PREFIXES = ("/", "./", "../", "~")


def shipped_models() -> list[str]:
    """Return the names that `package:<name>` accepts, sorted: the folders of `fivefold/models` with a `config.json`."""
    return sorted(file.parent.name for file in _MODELS.glob("*/config.json"))


def resolve_model_path(path: str) -> str:
    """Return what `from_pretrained` takes: the folder of `package:<name>` or of a local path, or the hub name as it is.

    Raises:
        ValueError: no model of that name ships, or `path` is neither a folder of a model nor the form of a hub name.
    """
    if path.startswith(PACKAGE_PREFIX):
        return str(_shipped_folder(path))
    folder = user_path(path)
    # The path of an empty text is the working folder.
    if not path.strip() or not folder.is_dir():
        if not path.startswith(_LOCAL_PREFIXES) and _HUB_NAME.fullmatch(path):
            return path
        raise ValueError(
            f"model path {path!r}: there is no such folder. Give a Hugging Face model folder, a hub name such as "
            f"'Qwen/Qwen3-0.6B', or {PACKAGE_PREFIX}<name> (ships: {', '.join(shipped_models()) or 'none'})"
        )
    if not (folder / "config.json").exists():
        _refuse_folders_of_runs(path, folder)
    for file in folder.iterdir():
        # Whoever opens a pipe waits until somebody writes to it.
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise ValueError(f"model path {path!r}: {file.name} is a pipe or a device: put the file itself there")
    return str(folder.resolve())


def _refuse_folders_of_runs(path: str, folder: Path) -> None:
    """Say where the model is, for a folder without one that is a run's or a checkpoint's."""
    if (folder / "weights" / "config.json").is_file():
        raise ValueError(f"model path {path!r} is the folder of a run: its model is in {folder / 'weights'}")
    if (folder / "manifest.json").is_file():
        raise ValueError(
            f"model path {path!r} is a checkpoint: write its model to a folder by "
            f"`fivefold checkpoints {path} --export latest -o FOLDER`"
        )


def user_path(path: str | Path) -> Path:
    """Return the path that a user gave, with the home folder in place of a `~` at its beginning.

    Raises:
        ValueError: a `~name` of a user who does not exist, or a path that the system does not take, whether there is
            anything or not: a name that is too long, or a folder that may not be entered.
    """
    try:
        expanded = Path(path).expanduser()
        expanded.exists()
    except RuntimeError as error:
        raise ValueError(f"{path}: there is no home folder for this `~`; write the path in full") from error
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; name a path that you may use") from error
    return expanded


def _shipped_folder(path: str) -> Path:
    name = path.removeprefix(PACKAGE_PREFIX)
    if name not in shipped_models():
        raise ValueError(
            f"model path {path!r}: no model of that name ships with Fivefold. "
            f"Ships: {', '.join(shipped_models()) or 'none'}"
        )
    return _MODELS / name
