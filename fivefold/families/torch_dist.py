"""Where a Megatron-Core checkpoint in the format `torch_dist` lies, as far as its small files tell.

    checkpoints/latest_checkpointed_iteration.txt     as Megatron-LM writes them; the number leads to the newest one
    checkpoints/iter_0000100/metadata.json            which format
    checkpoints/iter_0000100/.metadata                which tensor lies where
    checkpoints/iter_0000100/*.distcp                 the tensors
    checkpoints/iter_0000100/common.pt                what is not a tensor; it is not read

Their tensors are read in `fivefold.bridge.megatron_reader`.
"""

from __future__ import annotations

from pathlib import Path

from fivefold.config.paths import user_path
from fivefold.json_text import parsed

FORMAT_FILE = "metadata.json"
COMMON_FILE = "common.pt"
FORMAT = "torch_dist"
_TRACKER = "latest_checkpointed_iteration.txt"
_LEGACY = ("mp_rank_*", "*/mp_rank_*")


def is_torch_dist(path: str | Path) -> bool:
    """Return whether a folder looks like a Megatron-Core checkpoint, or like Megatron-LM's folder of several."""
    folder = user_path(path)
    return any((folder / name).is_file() for name in (FORMAT_FILE, _TRACKER))


def find_torch_dist(path: str | Path) -> Path:
    """Return the folder of the checkpoint at `path`: the folder itself, or the newest one of Megatron-LM's folder.

    Raises:
        ValueError: there is no such folder, or it holds no checkpoint in the format `torch_dist`.
    """
    folder = user_path(path)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(path)!r}: give the folder of a torch_dist checkpoint")
    if not (folder / FORMAT_FILE).is_file() and (folder / _TRACKER).is_file():
        folder = _newest(folder)
    if not (folder / FORMAT_FILE).is_file():
        raise ValueError(f"{folder} holds no Megatron-Core checkpoint: {_why_none(folder)}")
    try:
        backend = parsed((folder / FORMAT_FILE).read_text(encoding="utf-8"))["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / FORMAT_FILE} does not name the checkpoint's format ({error!r}): fetch it again"
        ) from error
    if backend != FORMAT:
        raise ValueError(
            f"{folder} is a Megatron-Core checkpoint in the format {backend!r}, and only {FORMAT!r} is read: write it "
            f"again with Megatron-LM's --ckpt-convert-format {FORMAT}"
        )
    return folder


def _newest(folder: Path) -> Path:
    written = (folder / _TRACKER).read_text(encoding="utf-8").strip()
    name = f"iter_{int(written):07d}" if written.isdecimal() else written
    if not name or not (folder / name).is_dir():
        raise ValueError(
            f"{folder / _TRACKER} leads to {name!r}, and there is no such folder: copy it, or give the folder of "
            "another iteration"
        )
    return folder / name


def _why_none(folder: Path) -> str:
    if any(any(folder.glob(pattern)) for pattern in _LEGACY):
        return (
            "its mp_rank folders are Megatron-LM's older format: write it again with Megatron-LM's "
            f"--ckpt-convert-format {FORMAT}"
        )
    inside = sorted(file.parent.name for file in folder.glob(f"*/{FORMAT_FILE}"))
    if inside:
        return f"it has checkpoints in {', '.join(inside[:3])}: give one of these folders"
    if (folder / "config.json").is_file():
        return "it is a Hugging Face folder: `fivefold convert FOLDER --to torch_dist -o OUT` makes a checkpoint of it"
    return f"{FORMAT_FILE} is missing"
