"""siiRL: a launch script whose array holds `python3 -m siirl... a.b=c`; verl's key tree with some of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.importing.dialect import Dialect
from fivefold.importing.draft import Draft, Rule, off, unsupported
from fivefold.importing.verl import tree as verl_tree
from fivefold.importing.verl.rules import ACTOR, MODEL, ROLLOUT
from fivefold.importing.verl.rules import RULES as TREE_RULES
from fivefold.importing.verl.tree import Tree

DECAY, WARMUP_STYLE = ACTOR + "optim.lr_decay_style", ACTOR + "optim.warmup_style"

DEFAULTS: Mapping[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    ACTOR + "ppo_mini_batch_size": 256,
    ACTOR + "ppo_micro_batch_size_per_gpu": 1,
    ACTOR + "clip_ratio_c": 3.0,
    DECAY: "linear",
    MODEL + "enable_gradient_checkpointing": True,
    ROLLOUT + "n": 1,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    "trainer.project_name": "siirl_examples",
    "trainer.experiment_name": "gsm8k",
}

RULES: Mapping[str, Rule] = {
    **TREE_RULES,
    "dag.enable_perf": off("seconds of each phase are in every step's metrics"),
    "dag.*": unsupported("the dataflow is fixed: rollout, rewards, advantages, update"),
    "actor_rollout_ref.embodied.*": unsupported("models are language models"),
    "algorithm.embodied_sampling.*": unsupported("models are language models"),
}


def convert(draft: Draft) -> None:
    """siiRL's own default for an unset expert tensor degree is 1."""
    verl_tree.convert_tree(draft, Tree(etp_follows_tp=False))
    verl_tree.warmup_and_rates(draft, ACTOR + "optim.", verl_tree.training_steps(draft, ""))
    if draft.plans["actor"].shards_weights:
        draft.implied(DECAY, f"siiRL's FSDP reads {WARMUP_STYLE} in its place")
    else:
        draft.implied(WARMUP_STYLE, f"siiRL's Megatron reads {DECAY} in its place")
    draft.apply(RULES)


DIALECT = Dialect("siiRL", convert, DEFAULTS)
