"""What training has added to a model, as low-rank adapters: the best B A of a rank, layer by layer.

trained - base = U S V^T  (SVD)      B = U sqrt(S), A = sqrt(S) V^T of the largest singular values
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fivefold.bridge import folder_swap
from fivefold.bridge.bridge import checked_source
from fivefold.bridge.decoder import expected_tensors
from fivefold.bridge.hf_reader import HFWeights, resolve_model_folder
from fivefold.bridge.peft_folder import lora_config
from fivefold.bridge.weight_files import of_joint
from fivefold.convert.target import Progress, free_target, written_beside
from fivefold.families.adapters import CONFIG, MATRICES, PREFIX, WEIGHTS, adapter_name, layer_of
from fivefold.families.read import load_shape
from fivefold.families.shape import ModelShape


@dataclass(frozen=True)
class TakenApart:
    """What was written, and what adapters of the rank do not hold."""

    shape: ModelShape
    n_adapters: int
    residual: float
    """Frobenius norm of what the adapters lack / norm of all that was added to their layers."""
    worst: str
    """The weight whose own share of this is the largest."""
    worst_residual: float
    others: tuple[str, ...]
    """Tensors that differ and can have no adapter, such as norms and embeddings."""


def take_apart(
    trained: str | Path,
    base: str | Path,
    out: str | Path,
    rank: int,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> TakenApart:
    """Write the difference of two models as a folder of adapters, as PEFT writes it, in float32.

    All layers of a kind, such as `q_proj`, have adapters if one of them differs. Their scale is 1.

    Args:
        trained: folder of the trained model.
        base: folder of the model that it was trained from.
        out: the folder to write. It appears when it is complete.
        rank: rank of the adapters; a smaller matrix has its own rank.
        overwrite: whether an earlier folder of adapters at `out` may be replaced.
        progress: receives how far the work is.

    Raises:
        ValueError: no such models, models of different shapes, equal ones, or something at `out`.
        OSError: the disk is full, or the file system refuses to write.
    """
    target = free_target(out, overwrite=overwrite, mark=CONFIG)
    folders = [resolve_model_folder(path) for path in (trained, base)]
    shape, own = (load_shape(folder) for folder in folders)
    with HFWeights(folders[0]) as after, HFWeights(folders[1]) as before:
        for described, weights in ((shape, after), (own, before)):
            checked_source(described, weights)
        wanted = expected_tensors(shape)
        if wanted != expected_tensors(own):
            raise ValueError(
                f"{trained} and {base} have tensors of other shapes: give the model that it was trained from"
            )
        found = _Found()
        done, total = 0, sum(map(torch.Size.numel, map(torch.Size, wanted.values())))
        for name, difference in _differences(after, before, wanted):
            found.add(name, difference, rank)
            done += difference.numel()
            if progress is not None:
                progress("taking apart", done, total)
    kinds = found.kinds
    if not kinds:
        raise ValueError(f"no layer of {trained} that can have an adapter differs from {base}: give another --base")
    matrices = {name: pair for name, pair in found.matrices.items() if layer_of(name) in kinds}
    ranks = {name: len(a) for name, (a, _) in matrices.items()}
    alphas = {each: float(each) for each in {*ranks.values(), rank}}
    config = lora_config(ranks, rank, alphas, use_rslora=False)
    with written_beside(target) as partial:
        tensors = {
            PREFIX + adapter_name(name, matrix): content.contiguous()
            for name, pair in matrices.items()
            for matrix, content in zip(MATRICES, pair, strict=True)
        }
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps({**config, "base_model_name_or_path": str(base)}, indent=2) + "\n")
        for file in (WEIGHTS, CONFIG):
            folder_swap.sync(partial / file)
    worst = max(found.residuals, key=lambda name: found.residuals[name][0] / found.residuals[name][1])
    left, added = (sqrt(sum(each[index] ** 2 for each in found.residuals.values())) for index in (0, 1))
    left_of_worst, added_to_worst = found.residuals[worst]
    return TakenApart(shape, len(matrices), left / added, worst, left_of_worst / added_to_worst, tuple(found.others))


def _differences(
    after: HFWeights, before: HFWeights, names: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        difference = after.read(name).float() - before.read(name).float()
        yield name, difference if of_joint(name) is None or difference.ndim != 2 else difference.T


class _Found:
    """The adapters of the layers that were seen so far."""

    def __init__(self) -> None:
        self.matrices: dict[str, tuple[Tensor, Tensor]] = {}
        """A and B of each weight that can have them."""
        self.residuals: dict[str, tuple[float, float]] = {}
        """The norm of what an adapter lacks, and of the difference, by each weight that differs."""
        self.others: list[str] = []

    @property
    def kinds(self) -> set[str | None]:
        """Layers, such as `q_proj`, whose weights differ somewhere."""
        return {layer_of(name) for name in self.residuals}

    def add(self, name: str, difference: Tensor, rank: int) -> None:
        """Take the difference of a tensor."""
        differs = bool(difference.any())
        if layer_of(name) is None:
            self.others += [name] if differs else []
            return
        n_rows, n_columns = difference.shape
        own = min(rank, n_rows, n_columns)
        if not differs:
            self.matrices[name] = torch.zeros(own, n_columns), torch.zeros(n_rows, own)
            return
        u, s, v = torch.linalg.svd(difference, full_matrices=False)
        roots = s[:own].sqrt()
        self.matrices[name] = roots.unsqueeze(1) * v[:own], u[:, :own] * roots
        self.residuals[name] = float(s[own:].norm()), float(s.norm())
