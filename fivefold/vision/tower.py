"""The vision tower of a model: transformers' module, whole on each process that uses it, with weights that stay.

PlacedImage ... ──each different one once──> tower ──> Features ──at the images' tokens──> embeddings, first layers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModel
from transformers.initialization import no_init_weights

from fivefold.bridge.hf_reader import HFWeights, resolve_model_folder
from fivefold.bridge.kept import check_tower, tower_prefix
from fivefold.types import PlacedImage

_AUTO_CONFIG: Any = AutoConfig
_AUTO_MODEL: Any = AutoModel
"""The types are Any because transformers declares that its factories return base classes."""


@dataclass(frozen=True)
class Features:
    """What a tower sees in F tokens of images, each [F, hidden] in the model's dtype."""

    embeddings: Tensor
    """In the place of the tokens' embeddings."""
    deepstack: tuple[Tensor, ...]
    """Added after the first layers, one for each."""

    def select(self, rows: Tensor) -> Features:
        """Return the features of the tokens at `rows`."""
        return Features(self.embeddings[rows], tuple(each[rows] for each in self.deepstack))


class VisionTower:
    """A vision tower with frozen weights. It is no module, so that no model that holds it counts its parameters."""

    def __init__(
        self, folder: str | Path, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        """Take the tower of the model in a folder; its weights are read when the first image comes.

        Args:
            folder: folder or hub name of the model.
            dtype: dtype of weights and features.
            device: where features are computed.
            group: ranks that ask for the features of the same images at the same time, and share the work; None: this
                process is alone.
        """
        self._folder = folder
        self._group = group if group is not None and group.size() > 1 else None
        self._dtype = dtype
        self._device = device
        self._module: Any = None

    @torch.no_grad()
    def features(self, images: Sequence[PlacedImage]) -> Features:
        """Return the features of images, in their order; several images with one digest share theirs.

        Raises:
            ValueError: a folder without the tower's weights.
        """
        if self._module is None:
            self._module = _load(resolve_model_folder(self._folder), self._dtype, self._device)
        different = list({image.digest: image for image in images}.values())
        return self._seen(different) if self._group is None else self._gathered(different, self._group)

    def _gathered(self, images: Sequence[PlacedImage], group: dist.ProcessGroup) -> Features:
        """Return the features of different images, each computed by one rank of the group."""
        owners, sizes, starts = divided(images, group.size()), [0] * group.size(), []
        for image, owner in zip(images, owners, strict=True):
            starts.append(sizes[owner])
            sizes[owner] += image.n_tokens
        own = [image for image, owner in zip(images, owners, strict=True) if owner == group.rank()]
        # A rank without an image computes one that nobody takes from it, by which it knows the width of the rows.
        seen = self._seen(own or images[:1])
        rows = torch.cat([seen.embeddings, *seen.deepstack], dim=1)
        n_own, most = sizes[group.rank()], max(sizes)
        padded = rows.new_zeros(most, rows.shape[1])
        padded[:n_own] = rows[:n_own]
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        places = torch.cat(
            [
                torch.arange(image.n_tokens) + owner * most + start
                for image, owner, start in zip(images, owners, starts, strict=True)
            ]
        )
        whole = torch.cat(parts)[places.to(self._device)]
        embeddings, *deepstack = whole.split(seen.embeddings.shape[1], dim=1)
        return Features(embeddings, tuple(deepstack))

    def _seen(self, images: Sequence[PlacedImage]) -> Features:
        """Return the features of different images, computed by this process."""
        merge = self._module.spatial_merge_size
        grids = torch.tensor([[1, image.rows * merge, image.columns * merge] for image in images])
        patches = torch.cat([torch.from_numpy(image.patches_PC) for image in images])
        output = self._module(patches.to(self._device, self._dtype), grid_thw=grids.to(self._device), return_dict=True)
        return Features(output.pooler_output, tuple(getattr(output, "deepstack_features", None) or ()))

    def sleep(self) -> None:
        """Give the device's memory back; the weights wait on the host."""
        if self._module is not None:
            self._module.cpu()

    def wake(self) -> None:
        """Bring the weights back to the device."""
        if self._module is not None:
            self._module.to(self._device)


def divided(images: Sequence[PlacedImage], size: int) -> list[int]:
    """Return which of `size` ranks computes each image: the largest first, each on the rank with the fewest patches."""
    owners, loads = [0] * len(images), [0] * size
    for index in sorted(range(len(images)), key=lambda index: -images[index].n_tokens):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += images[index].n_tokens
    return owners


def rows_of(images: Sequence[PlacedImage]) -> Tensor:
    """Return which row of the features each token of images has, int64 [tokens of all images]."""
    first: dict[int, int] = {}
    total = 0
    for image in images:
        if image.digest not in first:
            first[image.digest], total = total, total + image.n_tokens
    return torch.cat([torch.arange(image.n_tokens) + first[image.digest] for image in images])


# Weights that are made in inference mode could not be moved outside of it.
@torch.inference_mode(mode=False)
@torch.no_grad()
def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    check_tower(folder)
    prefix = tower_prefix(folder)
    config = _AUTO_CONFIG.from_pretrained(folder).vision_config
    with torch.device(device), no_init_weights():
        module = _AUTO_MODEL.from_config(config, dtype=dtype, attn_implementation="sdpa")
    with HFWeights(folder) as weights:
        for name, parameter in module.named_parameters():
            found = weights.shape(prefix + name) if prefix + name in weights.names else None
            if found != tuple(parameter.shape):
                raise ValueError(
                    f"config.json of {folder} describes {prefix}{name} of shape {tuple(parameter.shape)}, and the "
                    f"weight files have {found or 'no such tensor'}: fetch the folder again"
                )
            parameter.copy_(weights.read(prefix + name))
    return module.eval().requires_grad_(False)
