"""What the server of `tests.forks` imports before it forks: all that commands and trainers import at some time."""

from __future__ import annotations

import importlib

from fivefold.imports import large_imports
from tests.forked_workers import fork_host

OF_WORKERS = (
    "fivefold.mcore.engine",
    "fivefold.fsdp.engine",
    "fivefold.rollout.transformers_engine",
    "google.protobuf.json_format",
    "jsonschema",
    "pyarrow.json",
    "pydantic.v1",
    "pytest",
    "requests",
    "starlette.datastructures",
    "safetensors.torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2_moe.modeling_qwen2_moe",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
"""Modules that import no Ray, and some that it imports."""
OF_DRIVERS = (
    "fivefold.cli.main",
    "fivefold.train",
    "fivefold.sft",
    "fivefold.dpo",
    "fivefold.rm",
    "fivefold.generate",
    "pandas",
    "pyarrow.parquet",
)
"""Modules that import Ray, and two with which samples are written."""

with large_imports():
    for module in OF_WORKERS:
        importlib.import_module(module)

HOST = fork_host()
"""The host of `tests.forked_workers`."""

with large_imports():
    for module in OF_DRIVERS:
        importlib.import_module(module)
