"""Merges adapters into the weights of a model's files, as the trainer merges them into its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fivefold.bridge.decoder import expected_tensors, float32_tensors
from fivefold.bridge.hf_reader import HFWeights
from fivefold.families.adapters import find_adapter
from fivefold.families.read import load_shape
from fivefold.weights.adapter import AdapterMemory
from fivefold.weights.transport import Transport


@torch.no_grad()
def merged(
    transport: Transport, path: str, adapters: Iterable[tuple[str, Tensor]], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a model with its adapters, in the dtype in which the trainer has it.

    Args:
        transport: how the adapters came.
        path: folder or hub name of the model.
        adapters: all matrices, by the names of their Hugging Face tensors.
        device: where they are, and where weights are merged.

    Raises:
        ValueError: a matrix for which the model has no layer of its size.
    """
    assert isinstance(transport, AdapterMemory), f"{transport.name} sends whole weights"
    # On the CPU they share the memory of a bucket, which is freed.
    matrices = {name: (name, matrix.clone()) for name, matrix in adapters}
    unused = set(matrices)
    dtype: torch.dtype = getattr(torch, transport.merged_dtype)
    with HFWeights(path) as files:
        shape = load_shape(files.folder)
        exact = float32_tensors(shape)
        for name in expected_tensors(shape):
            weight = files.read(name).to(device, torch.float32 if name in exact else dtype)
            up, down = (find_adapter(matrices, name, matrix) for matrix in ("A", "B"))
            if up is not None and down is not None:
                (name_a, a), (name_b, b) = up, down
                if (len(b), a.shape[1]) != weight.shape:
                    raise _of_another_model(path, name_a)
                unused -= {name_a, name_b}
                weight = (weight.float() + transport.scale(len(a)) * (b.float() @ a.float())).to(dtype)
            yield name, weight
    if unused:
        raise _of_another_model(path, min(unused))


def _of_another_model(path: str, matrix: str) -> ValueError:
    return ValueError(
        f"the actor sent {matrix}, an adapter for which {path} has no layer of its size: the actor and the rollout "
        "must have one model"
    )
