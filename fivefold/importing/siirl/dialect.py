"""siiRL: launch scripts whose array holds `python3 -m siirl... a.b=c`; verl's key tree with some keys of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.importing.dialect import Dialect
from fivefold.importing.draft import Draft
from fivefold.importing.siirl.rules import RULES
from fivefold.importing.verl import tree as verl_tree
from fivefold.importing.verl.actor_rules import ACTOR, MODEL
from fivefold.importing.verl.rules import ROLLOUT

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


def convert(draft: Draft) -> None:
    """Convert siiRL's keys; an expert tensor degree that is not written is 1 there."""
    verl_tree.convert_tree(draft, verl_tree.Tree(etp_follows_tp=False))
    verl_tree.warmup_and_rates(draft, ACTOR + "optim.", verl_tree.training_steps(draft, ""))
    if draft.plans["actor"].shards_weights:
        draft.implied(DECAY, f"with FSDP, siiRL reads {WARMUP_STYLE} in its place")
    else:
        draft.implied(WARMUP_STYLE, f"with Megatron, siiRL reads {DECAY} in its place")
    draft.apply(RULES)


DIALECT = Dialect("siiRL", convert, DEFAULTS)
