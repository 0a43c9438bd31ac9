"""RMSNorms over all heads together. Each tensor-parallel rank has some of the heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fivefold.engine.context_parallel import SumOverGroup, copy_to_group


def norms_over_heads(
    parts: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], eps: float, group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Return x / rms(x) * weight for each x, in float32 and rounded before the product, as transformers does.

    Args:
        parts: this rank's channels [..., W / ranks] of each x; the mean square is over the W channels of all ranks.
        weights: this rank's part [W / ranks] of each weight.
        eps: what is added to the mean square.
        group: the tensor-parallel ranks.
    """
    floats = [part.float() for part in parts]
    squares = torch.cat([x.square().sum(-1, keepdim=True) for x in floats], dim=-1)
    if group.size() > 1:
        # Every rank scales its own channels by it, so that its gradient is a sum over the ranks too.
        squares = copy_to_group(SumOverGroup.apply(squares, group), group)
    normed = []
    for index, (x, weight, part) in enumerate(zip(floats, weights, parts, strict=True)):
        scale = torch.rsqrt(squares[..., index, None] / (x.shape[-1] * group.size()) + eps)
        normed.append(weight * (x * scale).to(part.dtype))
    return normed
