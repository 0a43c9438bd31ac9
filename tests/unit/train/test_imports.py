"""What a run's processes import: each package that it does not need costs every process a second or more."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from packaging.version import Version

CODE = """
import sys, fivefold.train
print(*sys.modules)
import torch, fivefold.mcore.engine
torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]).zero_grad()
print(*sys.modules)
"""
BY_NONE = (
    "torch._dynamo", "torch._inductor", "transformers.modeling_utils", "datasets", "pandas", "pyarrow", "wandb",
    "tensorboard",
)  # fmt: skip
NOT_BY_DRIVERS = (*BY_NONE, "megatron", "sympy", "torch.distributed.checkpoint", "torch.distributed.tensor")


@pytest.mark.skipif(
    Version(version("transformers")) < Version("5.24"), reason="transformers imports a compiler with its classes"
)
def test_driver_and_trainer_import_neither_compilers_nor_models_of_transformers() -> None:
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    driver, both = (set(line.split()) for line in done.stdout.splitlines())
    assert driver.isdisjoint(NOT_BY_DRIVERS)
    assert "megatron.core" in both
    assert both.isdisjoint(BY_NONE)
