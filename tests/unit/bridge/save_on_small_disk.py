"""Saves models to the small file system at argv[1], and prints what came of each save.

`test_disk_faults.py` runs this in a mount namespace of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fivefold.bridge.hf_writer import save_hf
from fivefold.bridge.shard_plan import TensorSpec


def main(disk: Path) -> None:
    (disk / "source").mkdir()
    (disk / "source/config.json").write_text("{}")
    save(disk, 100_000)
    report(disk, "too small", 2_500_000)
    report(disk, "filled meanwhile", 1_000_000)
    (disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    report(disk, "read-only", 100_000)


def save(disk: Path, n_bytes: int, *, is_filled: bool = False) -> None:
    """Save a model of two tensors of `n_bytes` each; between them, another writer may take the rest of the disk."""
    tensors = {f"layer.{i}": TensorSpec(torch.uint8, (n_bytes,)) for i in range(2)}

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, spec in tensors.items():
            yield name, torch.zeros(spec.shape, dtype=spec.dtype)
            if is_filled:
                fill(disk / "filler")

    save_hf(disk / "model", weights(), disk / "source", tensors=tensors)


def fill(filler: Path) -> None:
    """Write a file that takes the rest of the disk."""
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def report(disk: Path, case: str, n_bytes: int) -> None:
    """Print the error of a save that must fail, and what is on the disk then."""
    try:
        save(disk, n_bytes, is_filled=case == "filled meanwhile")
    except OSError as error:
        print(f"{case}: {error}")
    names = sorted(path.name for path in disk.iterdir() if path.name != "filler")
    is_first = load_file(disk / "model/model.safetensors")["layer.1"].numel() == 100_000
    print(f"after {case}: {names}, weights of {'the first save' if is_first else 'another save'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
