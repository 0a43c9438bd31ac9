"""The folder that a conversion writes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from fivefold.bridge import folder_swap
from fivefold.bridge.reading import TensorReader
from fivefold.bridge.shard_plan import TensorSpec
from fivefold.bridge.weight_files import part_of_joint
from fivefold.config.paths import user_path

Progress = Callable[[str, int, int], None]
"""Receives a conversion's progress: the current task, elements done, elements in total."""


def free_target(out: str | Path, *, overwrite: bool, mark: str = "config.json") -> Path:
    """Return the path of the folder to write.

    Args:
        out: where the folder is to be; if that is a symbolic link, what it points to.
        overwrite: whether an earlier folder there may be replaced.
        mark: the file by which an earlier folder of its kind is known: a model's, or of adapters.

    Raises:
        ValueError: there is something that may not be replaced.
    """
    target = Path(os.path.realpath(user_path(out)))
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return target
    if not (target / mark).is_file():
        kind = "is not a model folder" if mark == "config.json" else f"has no {mark}"
        raise ValueError(f"{target} exists and {kind}, so it is not replaced: give another place")
    if not overwrite:
        raise ValueError(f"{target} exists: pass --overwrite to replace it, or give another place")
    return target


@contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """Give an empty folder, which takes the place of `target` when the block ends, and is removed if the block fails.

    The block must make sure that its files are on disk.
    """
    partial = folder_swap.begin(target)
    try:
        yield partial
        folder_swap.commit(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def streamed(
    weights: TensorReader, tensors: Mapping[str, TensorSpec], progress: Progress | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield each of `tensors` as `weights` has it, in its dtype, and report how many elements are written."""
    done, total = 0, sum(spec.n_elements for spec in tensors.values())
    for name, spec in tensors.items():
        if name in weights.names:
            yield name, weights.read(name).to(spec.dtype)
        else:
            parts = (weights.read(part_of_joint(name, expert)) for expert in range(spec.shape[0]))
            yield name, torch.stack([part.to(spec.dtype) for part in parts])
        done += spec.n_elements
        if progress is not None:
            progress("writing", done, total)
