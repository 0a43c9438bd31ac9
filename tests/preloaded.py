"""What the server of `tests.forks` imports before it forks: what commands and workers import, but for Ray.

Ray reads variables of a worker when it is imported (`tests.forked_workers`).
"""

from __future__ import annotations

import importlib

from fivefold.imports import large_imports

MODULES = (
    "fivefold.algorithms.policy_loss",
    "fivefold.config.load",
    "fivefold.fsdp.engine",
    "fivefold.mcore.engine",
    "fivefold.rewards.resolve",
    "fivefold.rollout.transformers_engine",
    "jsonschema",
    "requests",
    "rich.console",
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
    "typer",
)

with large_imports():
    for module in MODULES:
        importlib.import_module(module)
