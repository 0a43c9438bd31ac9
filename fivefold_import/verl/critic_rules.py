"""verl's keys of the critic, which Trinity-RFT's trainer takes over; most are those of the actor.

The keys below the section `critic.` stand here; those that need other keys are in `tree`.
"""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import import megatron, reasons
from fivefold_import.critic import of_critic
from fivefold_import.draft import Rule
from fivefold_import.rules import implied, to, under, unknown
from fivefold_import.values import DTYPE, LOSS_AGGREGATION, number, text, whole
from fivefold_import.verl import initial_weights
from fivefold_import.verl.actor_rules import ACTOR_OFFLOADING, ENGINE, MODEL_RULES, OPTIMIZER, OVERRIDE

CRITIC = "critic."

CRITIC_RULES: Mapping[str, Rule] = of_critic(
    {
        **ENGINE,
        **under("megatron.", ACTOR_OFFLOADING),
        **under("fsdp_config.", ACTOR_OFFLOADING),
        **under("model.fsdp_config.", ACTOR_OFFLOADING),
        **ACTOR_OFFLOADING,
        **initial_weights.actor_rules(),
        **under(OVERRIDE, megatron.TRANSFORMER),
        **under("megatron.override_ddp_config.", megatron.DDP),
        **dict.fromkeys(
            ("megatron.param_dtype", "megatron.dtype", "fsdp_config.dtype"),
            to("actor.dtype", DTYPE),
        ),
        **under("optim.", OPTIMIZER),
        **under("model.", MODEL_RULES),
        **under("model.fsdp_config.", {"*": ENGINE["fsdp_config.*"]}),
        "model.path": to("critic.path", text),
        "model.tokenizer_path": implied("all models have the actor's tokenizer"),
        "grad_clip": to("actor.optimizer.gradient_clipping", number),
        "ppo_epochs": to("actor.ppo_epochs", whole),
        "loss_agg_mode": to("actor.loss_aggregation", LOSS_AGGREGATION),
        "cliprange_value": to("critic.eps_clip", number),
        "shuffle": implied("mini-batches are always drawn at random, by the seed"),
        "data_loader_seed": implied(reasons.ONE_SEED),
        "rollout_n": implied("it follows from rollout.n"),
        "enable": implied("algorithm.adv_estimator says whether there is a critic"),
        "forward_*": implied(reasons.ONE_BUDGET),
        "checkpoint.*": implied("checkpoints hold the whole run, and the critic is saved with the actor"),
        "*": unknown("the critic"),
    }
)
