"""Sizes and speeds of GPUs, from their makers' data sheets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.config.schema.machines import ClusterConfig

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, with its links, in the node that it is usually sold in. Bandwidths are in one direction."""

    name: str
    memory: int
    """Bytes that CUDA reports."""
    peak: float
    """FLOP/s of dense bfloat16 matmuls."""
    bandwidth: float
    """Bytes/s between the GPU and its own memory."""
    link: float
    """Bytes/s to the GPUs of its node."""
    network: float
    """Bytes/s to other nodes: one network card a GPU."""


_NVLINK3, _NVLINK4, _NVLINK5, _PCIE4 = 300e9, 450e9, 900e9, 25e9
_NETWORK_200G, _NETWORK_400G = 25e9, 50e9

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40g", int(39.4 * GIB), 312e12, 1.56e12, _NVLINK3, _NETWORK_200G),
        Gpu("a100-80g", int(79.2 * GIB), 312e12, 2.04e12, _NVLINK3, _NETWORK_200G),
        Gpu("h100-80g", int(79.1 * GIB), 989e12, 3.35e12, _NVLINK4, _NETWORK_400G),
        Gpu("h800-80g", int(79.1 * GIB), 989e12, 3.35e12, 200e9, _NETWORK_400G),
        Gpu("h20-96g", int(95.1 * GIB), 148e12, 4.0e12, _NVLINK4, _NETWORK_400G),
        Gpu("h200-141g", int(139.8 * GIB), 989e12, 4.8e12, _NVLINK4, _NETWORK_400G),
        Gpu("b200-180g", int(178.3 * GIB), 2250e12, 7.7e12, _NVLINK5, _NETWORK_400G),
        Gpu("l40s-48g", int(44.4 * GIB), 362e12, 0.86e12, _PCIE4, _NETWORK_200G),
        Gpu("rtx4090-24g", int(23.5 * GIB), 165e12, 1.01e12, _PCIE4, _NETWORK_200G),
    )
}


_KIND = re.compile(r"([a-z]+)(\d+s?)")
_SLOWER = re.compile(r"h[128]00.*(pcie|nvl)|4090 (d|laptop)\b|\bmig\b", re.IGNORECASE)
"""Cards that share a chip's name, and have fewer of its cores or less power than those above; and parts of cards."""


def peak_flops(device: str) -> float | None:
    """Return the FLOP/s of dense bfloat16 matmuls of a GPU, by the name that CUDA gives it, such as `NVIDIA H200`.

    Returns:
        None for a GPU whose speed is not known.
    """
    if _SLOWER.search(device):
        return None
    for gpu in GPUS.values():
        letters, number = _KIND.fullmatch(gpu.name.partition("-")[0]).groups()  # type: ignore[union-attr]
        if re.search(rf"(?<![a-z]){letters} ?{number}(?!\d)", device, re.IGNORECASE):
            return gpu.peak
    return None


def find_gpu(name: str) -> Gpu:
    """Return the GPU called `name`; a prefix that fits one name only, such as `h200`, is enough.

    Raises:
        ValueError: no GPU of that name, or several.
    """
    wanted = name.lower()
    fitting = [gpu for key, gpu in GPUS.items() if key == wanted or key.startswith(f"{wanted}-")]
    if len(fitting) == 1:
        return fitting[0]
    near = [gpu.name for gpu in fitting] or difflib.get_close_matches(wanted, GPUS, n=1, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"no GPU {name!r} is known: {hint}The GPUs are {', '.join(GPUS)}")


def device_peak(config: ClusterConfig, devices: Sequence[str | None]) -> float | None:
    """Return the FLOP/s that a device can compute, the mean of all devices; None if it is not known.

    Args:
        config: the recipe's section, which may say it.
        devices: names of the devices that the processes compute on; None for a CPU.
    """
    if config.device_peak_tflops is not None:
        return config.device_peak_tflops * 1e12
    peaks = [None if name is None else peak_flops(name) for name in devices]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) / len(known) if known and len(known) == len(peaks) else None
