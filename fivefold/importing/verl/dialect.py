"""verl: launch scripts with `python3 -m verl.trainer.main_ppo a.b=c ...`, or the trainer's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.importing.dialect import Dialect
from fivefold.importing.draft import Draft
from fivefold.importing.verl.actor_rules import ACTOR, MODEL
from fivefold.importing.verl.rules import ROLLOUT, RULES
from fivefold.importing.verl.tree import Tree, convert_tree, training_steps, warmup_and_rates

DEFAULTS: Mapping[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    ACTOR + "ppo_mini_batch_size": 256,
    ACTOR + "clip_ratio_c": 3.0,
    MODEL + "enable_gradient_checkpointing": True,
    ROLLOUT + "n": 1,
    ROLLOUT + "tensor_model_parallel_size": 2,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
}


def convert(draft: Draft) -> None:
    """Convert verl's keys; Megatron-Core takes the tensor degree for an expert tensor degree that is not written."""
    convert_tree(draft, Tree(etp_follows_tp=True))
    warmup_and_rates(draft, ACTOR + "optim.", training_steps(draft, ""))
    draft.apply(RULES)


DIALECT = Dialect("verl", convert, DEFAULTS)
