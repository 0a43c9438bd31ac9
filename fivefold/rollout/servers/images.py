"""Patches of images where a server reads them: in memory without a name, as long as a request has them.

The patches of an image are larger than its prompt by far, and all completions of a group have the same.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch

from fivefold.types import PlacedImage


@dataclass
class _Memory:
    """A file without a name, which is gone when all have closed it."""

    descriptor: int
    users: int = 0

    @property
    def path(self) -> str:
        """Where this user's processes on this machine find it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"


class SharedImages:
    """The images of the requests that a server is about to answer."""

    def __init__(self, dtype: torch.dtype, key: str) -> None:
        """Have none; their patches are cast to the model's dtype, and requests have them under `key`."""
        self._dtype = dtype
        self._key = key
        self._lock = threading.Lock()
        self._memory: dict[str, _Memory] = {}
        """By `_name`."""

    @contextmanager
    def held(self, images: Sequence[PlacedImage]) -> Iterator[dict[str, Any]]:
        """Yield what a request says of its images, which a server can read in the block; any thread may.

        `inside_vllm/fivefold_images.py` describes the form. A request without images says nothing.
        """
        if not images:
            yield {}
            return
        with self._lock:
            memories = [self._take(image) for image in images]
        try:
            yield {self._key: [self._form(image, memory) for image, memory in zip(images, memories, strict=True)]}
        finally:
            with self._lock:
                for image in images:
                    self._release(_name(image))

    def _take(self, image: PlacedImage) -> _Memory:
        memory = self._memory.get(_name(image))
        if memory is None:
            self._memory[_name(image)] = memory = _Memory(os.memfd_create("fivefold-image"))
            patches_PC = torch.from_numpy(image.patches_PC).to(self._dtype).contiguous()
            with open(memory.descriptor, "wb", closefd=False) as file:
                file.write(patches_PC.view(torch.uint8).numpy().data)
        memory.users += 1
        return memory

    def _release(self, name: str) -> None:
        memory = self._memory[name]
        memory.users -= 1
        if not memory.users:
            os.close(memory.descriptor)
            del self._memory[name]

    def _form(self, image: PlacedImage, memory: _Memory) -> dict[str, Any]:
        n_patches, n_values = image.patches_PC.shape
        merge = isqrt(n_patches // image.n_tokens)
        return {
            "path": memory.path,
            "dtype": str(self._dtype).removeprefix("torch."),
            "shape": [n_patches, n_values],
            "grid": [image.rows * merge, image.columns * merge],
            "name": _name(image),
            "start": image.start,
            "n_tokens": image.n_tokens,
        }


def _name(image: PlacedImage) -> str:
    """Return what tells the patches of an image from others'. One image may be resized to several sizes."""
    return f"{image.digest}-{image.rows}x{image.columns}"
