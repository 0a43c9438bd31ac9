"""An output layer whose rows, the vocabulary, are sharded over tensor-parallel ranks: what each rank has, and all have.

The last rows may be filler, with which the vocabulary is padded to a multiple of the ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def own_rows(weight: torch.Tensor, vocab: int, group: dist.ProcessGroup) -> tuple[int, int]:
    """Return the first token of this rank's rows, and the number of rows that are no filler."""
    first = group.rank() * weight.shape[0]
    return first, min(max(vocab - first, 0), weight.shape[0])


def rows_of(tokens: torch.Tensor, first: int, real_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each token, any row for those of other ranks, and which tokens are this rank's."""
    rows = tokens - first
    return rows.clamp(0, real_rows - 1), (rows >= 0) & (rows < real_rows)


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensors of all ranks, stacked in their order."""
    if group.size() == 1 or tensor.numel() == 0:
        return tensor.unsqueeze(0).expand(group.size(), *tensor.shape)
    stacked = tensor.new_empty(group.size() * tensor.shape[0], *tensor.shape[1:])
    dist.all_gather_into_tensor(stacked, tensor.contiguous(), group=group)
    return stacked.view(group.size(), *tensor.shape)
