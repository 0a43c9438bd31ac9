"""siiRL's defaults, from its dataclasses of parameters; where it says nothing else, they are verl's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold_import.verl import defaults as verl
from fivefold_import.verl.actor_rules import ACTOR
from fivefold_import.verl.rules import ROLLOUT

DECAY, WARMUP_STYLE = ACTOR + "optim.lr_decay_style", ACTOR + "optim.warmup_style"
"""The keys of the schedule of rates: with Megatron and with FSDP."""

TREE: Mapping[str, Any] = {
    **verl.TREE,
    DECAY: "linear",
    WARMUP_STYLE: "constant",
    ACTOR + "ppo_micro_batch_size_per_gpu": 1,
    ACTOR + "recompute_old_log_prob": True,
    ROLLOUT + "tensor_model_parallel_size": 1,
    "trainer.seed": 1,
    "trainer.project_name": "siirl_examples",
}
