"""Runs inside vLLM's workers, and tells a checksum of the weights that arrive there.

It is on vLLM's path and its class is vLLM's `--worker-extension-cls`, so it imports nothing of Fivefold, which need not
be installed beside vLLM. The checksum is that of `fivefold.sync.device_buckets.checksum`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightCheck:
    """Methods that vLLM adds to its worker's own."""

    model_runner: Any

    def fivefold_watch_weights(self) -> None:
        """Begin to look at the weights that the model loads."""
        model, self.fivefold_checksum = self.model_runner.get_model(), 0
        if hasattr(model, "fivefold_load_weights"):
            return
        model.fivefold_load_weights = model.load_weights

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
            return model.fivefold_load_weights(self._fivefold_seen(weights), *args, **kwargs)

        model.load_weights = load_weights

    def _fivefold_seen(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            whole = tensor.reshape(-1).view(INTEGERS[tensor.dtype.itemsize]).sum(dtype=torch.int64)
            self.fivefold_checksum += (1 + zlib.crc32(name.encode())) * int(whole)
            yield name, tensor

    def fivefold_weight_checksum(self) -> str:
        """Return the checksum of what arrived since `fivefold_watch_weights`."""
        return str(self.fivefold_checksum % 2**61)
