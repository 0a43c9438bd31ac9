"""Grouped matmuls of the experts, for any numbers of rows and any widths."""

from __future__ import annotations

import pytest
import torch

from fivefold.engine.kernels.matmul import add_grouped_product
from tests.unit.mcore.grouped import check_grouped_linear, check_main_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(4, 4, 8), (5, 0, 8), (1, 0, 0), (0, 0, 0)], ids=str)
# PyTorch's own kernel refuses widths of 5 and 6.
@pytest.mark.parametrize(("n_in", "n_out"), [(16, 24), (5, 24), (16, 6), (5, 6)])
def test_every_group_is_multiplied_by_its_own_weight(
    sizes: tuple[int, ...], n_in: int, n_out: int, dtype: torch.dtype
) -> None:
    check_grouped_linear(sizes, n_in, n_out, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n_in", "n_out"), [(16, 24), (5, 6)])
def test_gradients_of_many_micro_batches_are_summed_in_float32(n_in: int, n_out: int, dtype: torch.dtype) -> None:
    check_main_grad((5, 0, 40), n_in, n_out, dtype)


def test_gradients_that_are_kept_in_bfloat16_are_rounded_once_a_micro_batch() -> None:
    check_main_grad((5, 0, 40), 16, 24, torch.bfloat16, total_dtype=torch.bfloat16)


def test_a_sum_of_another_shape_is_refused() -> None:
    rows, ends = torch.zeros(3, 8), torch.tensor([1, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"shape \(2, 4, 8\)"):
        add_grouped_product(torch.zeros(2, 8, 4), torch.zeros(3, 4), rows, ends)
