"""What a run's processes import: each package that it does not need costs every process a second or more."""

from __future__ import annotations

import subprocess
import sys

UNNEEDED = ("torch._dynamo", "torch._inductor", "transformers.modeling_utils", "datasets", "pandas", "pyarrow")


def test_driver_and_trainer_import_neither_compilers_nor_models_of_transformers() -> None:
    code = "import fivefold.train, fivefold.mcore.engine, sys; print(*sys.modules)"
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", code]
    imported = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()
    assert "megatron.core" in imported
    assert set(UNNEEDED).isdisjoint(imported)
