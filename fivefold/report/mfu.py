"""Model FLOPs utilization: what the update computes of what its GPUs could."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fivefold.planning.gpus import GPUS
from fivefold.report.series import Series

TFLOPS = "train/tflops_per_device"
MFU = "mfu"
_KIND = re.compile(r"([a-z]+)(\d+s?)")


def with_mfu(series: Series, about: Mapping[str, Any]) -> Series:
    """Return the series with the MFU of every step, if the run's machine has GPUs whose speed is known."""
    peak = peak_flops(str(about.get("machine", {}).get("GPUs", "")))
    if peak is None or TFLOPS not in series.columns:
        return series
    return Series({**series.columns, MFU: series.columns[TFLOPS] * 1e12 / peak})


def peak_flops(gpus: str) -> float | None:
    """Return the FLOP/s of dense bfloat16 matmuls of a GPU whose kind is in a text such as `8 x NVIDIA H200`."""
    for gpu in GPUS.values():
        letters, number = _KIND.fullmatch(gpu.name.partition("-")[0]).groups()  # type: ignore[union-attr]
        if re.search(rf"{letters} ?{number}(?!\d)", gpus, re.IGNORECASE):
            return gpu.peak
    return None
