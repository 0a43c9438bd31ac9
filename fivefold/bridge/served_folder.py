"""The adapters of a model as a folder for an inference server: PEFT's, with one scale, which B has in it.

Servers read one rank and one scale for all layers, so the scale of each is a factor of its B and the config's is 1.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from fivefold.bridge import folder_swap
from fivefold.bridge.hf_writer import begin_folder
from fivefold.bridge.peft_folder import lora_config, usual_rank
from fivefold.bridge.shard_files import ShardFiles
from fivefold.bridge.shard_plan import TensorSpec, plan_shards
from fivefold.families.adapters import CONFIG, PREFIX, WEIGHTS
from fivefold.families.served import adapters_of, sent_matrices, served_matrices
from fivefold.families.shape import ModelShape


class ServedFolder:
    """Writes the adapters that a trainer sends for one server."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, *, one_rank: bool) -> None:
        """Describe the folder.

        Args:
            shape: the model with its adapters.
            dtype: dtype of the matrices in files.
            one_rank: whether the server wants matrices of the same rank in all layers. Smaller ones then get zeros.
        """
        self.sent: Mapping[str, tuple[int, ...]] = sent_matrices(shape)
        """Name and shape of each matrix that is to come."""
        self._adapters, self._dtype, self._one_rank = adapters_of(shape), dtype, one_rank
        matrices = served_matrices(shape)
        ranks = {tensor.name: _rank(tensor.name, tensor.shape) for tensor in matrices}
        self._most = max(ranks.values())
        of_weights = {str(t.adapts): self._most if one_rank else ranks[t.name] for t in matrices}
        usual = self._most if one_rank else usual_rank(shape)
        scales_of_1 = {rank: rank for rank in (*of_weights.values(), usual)}
        self._config = lora_config(of_weights, usual, scales_of_1, use_rslora=False)
        self._files = {
            name: tensor.names_in_peft if tensor.shared_by else (name,) for tensor in matrices for name in tensor.names
        }
        specs = {
            PREFIX + name: TensorSpec(
                dtype, _of_rank(tensor.name, tensor.shape, self._most) if one_rank else tensor.shape
            )
            for tensor in matrices
            for name in tensor.names_in_peft
        }
        self._plan = plan_shards(specs, sum(spec.n_bytes for spec in specs.values()))

    @property
    def n_bytes(self) -> int:
        """Bytes of the files."""
        return self._plan.file_bytes

    def save(self, folder: Path, matrices: Iterable[tuple[str, Tensor]]) -> None:
        """Write the matrices of `sent`, which come once each, and zeros for the others; an earlier `folder` goes.

        Raises:
            OSError: there is too little room, or the folder cannot be written.
        """
        partial = begin_folder(folder, self._plan)
        try:
            with ShardFiles(partial, self._plan) as files:  # they are zeros at first
                for name, matrix in matrices:
                    content = self._served(name, matrix)
                    for file_name in self._files[name]:
                        files.write(PREFIX + file_name, content)
                files.sync()
            [file] = self._plan.files
            (partial / file.name).rename(partial / WEIGHTS)
            (partial / CONFIG).write_text(json.dumps(self._config, indent=2) + "\n")
            folder_swap.commit(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _served(self, name: str, matrix: Tensor) -> Tensor:
        """Return a matrix as it is in the file."""
        rank = _rank(name, tuple(matrix.shape))
        missing = self._most - rank if self._one_rank else 0
        if name.endswith("lora_A.weight"):
            return pad(matrix, (0, 0, 0, missing)).to(self._dtype)
        return pad(matrix.float() * self._adapters.scale(rank), (0, missing)).to(self._dtype)


def _rank(name: str, shape: tuple[int, ...]) -> int:
    return shape[0] if name.endswith("lora_A.weight") else shape[1]


def _of_rank(name: str, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (rank, shape[1]) if name.endswith("lora_A.weight") else (shape[0], rank)
