"""Reads Hugging Face weight files lazily: a rank reads the slices that it needs and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from fivefold.bridge.weight_files import survey
from fivefold.config.paths import resolve_model_path

_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
_OTHER_FORMATS = ["consolidated*", "original/*"]
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating-point formats by safetensors' names."""


def resolve_model_folder(path: str | Path) -> Path:
    """Return the local folder of a model: `path` itself, the folder of `package:<name>`, or a snapshot from the hub.

    Raises:
        ValueError: `path` is neither a folder nor a name that the package or the hub can serve.
    """
    folder = Path(resolve_model_path(str(path)))
    if folder.is_dir():
        return folder
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), allow_patterns=_HUB_FILES, ignore_patterns=_OTHER_FORMATS))
    except LocalEntryNotFoundError as error:  # a kind of HfHubHTTPError in some versions
        raise ValueError(
            f"{str(path)!r} is neither a local folder nor in the cache, and {constants.ENDPOINT} could not be reached "
            f"({error.__cause__}): download it, and give the folder in the place of the name"
        ) from error
    except HfHubHTTPError as error:
        raise ValueError(f"{str(path)!r} is not a local folder, and the hub did not serve it: {error}") from error


class HFWeights:
    """The tensors of a Hugging Face model folder (or hub name): one `model.safetensors`, or shards with an index.

    The headers are read at once. Data is read from files that are opened at their first use; as a context manager it
    closes them on exit.

    Raises:
        ValueError: no such folder, or one without a complete set of whole safetensors files.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = resolve_model_folder(path)
        self._stored = survey(self.folder)
        self._opened: dict[str, Any] = {}
        if problems := self._stored.problems:
            raise ValueError(
                "\n".join([f"the weights in {self.folder} cannot be read:", *map("  {}".format, problems)])
            )

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return self._stored.names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the file's header."""
        return self._stored.shape(name)

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype in which a tensor is stored; None for one that is no usual floating-point format."""
        return DTYPES.get(self._stored.tensors[name].dtype)

    def file(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return self._stored.file(name)

    def read(self, name: str, *index: slice) -> Tensor:
        """Return the tensor `name` on the CPU, or the part of it that `index` selects along its first dimensions."""
        tensor: Tensor
        stored = self._stored.tensors[name]
        if stored.within is None:
            tensor = self._open(self.file(name)).get_slice(name)[index or slice(None)]
            return tensor
        of_all, expert, first = stored.within
        rows, *columns = index or (slice(None),)
        begin, end, _ = rows.indices(stored.shape[0])
        parts = [slice(first + begin, first + end), *columns]
        if stored.is_turned:
            parts = [*(columns or [slice(None)]), parts[0]]
        tensor = self._open(self.file(name)).get_slice(of_all)[(slice(expert, expert + 1), *parts)][0]
        return tensor.t().contiguous() if stored.is_turned else tensor

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        self._opened.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            self._opened[file] = safe_open(self.folder / file, framework="pt", device="cpu")
        return self._opened[file]
