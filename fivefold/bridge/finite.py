"""NaN and infinite values: how they are found, and the error about weights that hold some."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_LISTED = 8
"""Most tensors that an error names; the others are counted."""


def is_finite(tensor: Tensor) -> bool:
    """Return whether every element of `tensor` (floating point, not empty) is finite.

    The extremes of a tensor are NaN if any element is, so one pass that reads the tensor and allocates nothing
    answers. `tensor.isfinite().all()` answers the same, but it allocates copies of the tensor's size.
    """
    return bool(torch.stack(tensor.detach().aminmax()).isfinite().all())


def not_finite_error(folder: str | Path, tensors: Sequence[str]) -> ValueError:
    """Return the error about the weights in `folder`.

    Args:
        folder: the model's folder or hub name.
        tensors: a description of each tensor that holds NaN or infinite values: its name, file and dtype.
    """
    more = [f"  ... and {len(tensors) - _LISTED} more"] if len(tensors) > _LISTED else []
    return ValueError(
        "\n".join(
            [
                f"the weights in {folder} hold NaN or infinite values, in these tensors ({len(tensors)}):",
                *(f"  {tensor}" for tensor in tensors[:_LISTED]),
                *more,
                "fetch these files again, or take weights that were saved before their training diverged",
            ]
        )
    )
