"""Keys of precision that would have no effect are refused."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.config.schema.engine import EngineConfig

REMAINDERS = {"optimizer": {"store_param_remainders": True}}
BF16_GRADIENTS = {"ddp": {"grad_reduce_in_fp32": False}}


@pytest.mark.parametrize(
    ("megatron", "key"), [(REMAINDERS, "store_param_remainders=true"), (BF16_GRADIENTS, "grad_reduce_in_fp32=false")]
)
def test_float32_weights_have_neither_remainders_nor_smaller_gradients(megatron: dict[str, Any], key: str) -> None:
    values = {"path": "m", "megatron": megatron}
    EngineConfig.model_validate(values)
    with pytest.raises(ValueError, match=f"{key}.*dtype=float32"):
        EngineConfig.model_validate({**values, "dtype": "float32"})
