"""The Hugging Face folders of a run's weights: one that is replaced, or one for each time, whose newest stay."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from fivefold.config.schema.run import SaverConfig

_NAME = re.compile(r"step-\d{6,}")
_DELETED = ".deleted-"
"""How the names of folders begin that are being deleted."""


class WeightSaver:
    """Saves the weights as the section `saver` of the recipe says.

    max_to_keep: 1       weights/config.json, weights/model.safetensors, ...
    max_to_keep: 3       weights/step-000010/..., weights/step-000020/..., weights/step-000030/...
    """

    def __init__(self, config: SaverConfig, folder: Path, save: Callable[[Path], None]) -> None:
        """Save nothing yet.

        Args:
            config: the section of the recipe.
            folder: the run's folder of weights.
            save: writes a whole Hugging Face folder, in place of an earlier one.
        """
        self._keep = config.max_to_keep
        self._folder = folder
        self._save = save

    def save(self, step: int) -> None:
        """Save the weights after `step`, then delete the oldest folders beyond `saver.max_to_keep`."""
        if self._keep == 1:
            self._save(self._folder)
            return
        self._save(self._folder / f"step-{step:06d}")
        if (self._folder / "config.json").exists():
            self._hide_earlier()
        if self._keep is not None:
            folders = sorted(
                (path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)),
                key=lambda path: int(path.name[5:]),
            )
            for old in folders[: -self._keep]:
                # Renamed first, so that no half of a model looks like a whole one.
                old.rename(self._hidden(old.name))
        for hidden in self._folder.glob(f"{_DELETED}*"):
            # What cannot be deleted yet, such as a file on NFS that a reader has open, is left to a later save.
            shutil.rmtree(hidden, ignore_errors=True)

    def _hide_earlier(self) -> None:
        """Delete the model that a start with max_to_keep: 1 has left, which would be taken for the newest one."""
        hidden = self._hidden("earlier")
        hidden.mkdir()
        files = [path for path in self._folder.iterdir() if not path.is_dir()]
        # The config first: without it, no half of a model looks like a whole one.
        for file in sorted(files, key=lambda path: path.name != "config.json"):
            file.rename(hidden / file.name)

    def _hidden(self, name: str) -> Path:
        return self._folder / f"{_DELETED}{name}-{secrets.token_hex(4)}"
