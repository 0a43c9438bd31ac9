"""Grouped matmuls of the experts, for any numbers of rows and any widths."""

from __future__ import annotations

import pytest
import torch

from tests.unit.mcore.grouped import check_grouped_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(4, 4, 8), (5, 0, 8), (1, 0, 0), (0, 0, 0)], ids=str)
# PyTorch's own kernel refuses widths of 5 and 6.
@pytest.mark.parametrize(("n_in", "n_out"), [(16, 24), (5, 24), (16, 6), (5, 6)])
def test_every_group_is_multiplied_by_its_own_weight(
    sizes: tuple[int, ...], n_in: int, n_out: int, dtype: torch.dtype
) -> None:
    check_grouped_linear(sizes, n_in, n_out, dtype)
