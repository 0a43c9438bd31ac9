"""Trinity-RFT's defaults, from its dataclasses (`trinity/common/config.py`) and its functions' `default_args`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold_import.defaults import none
from fivefold_import.rules import under
from fivefold_import.trinity.rules import TREE
from fivefold_import.verl.actor_rules import ACTOR, MODEL
from fivefold_import.verl.defaults import MEGATRON, OFFLOADED, OPTIMIZER

ENGINE = "explorer.rollout_model."
TASKS = "buffer.explorer_input.taskset."
HELD_OUT = "buffer.explorer_input.eval_tasksets.0."

OWN_OPTIMIZER: Mapping[str, Any] = {
    "lr": 1e-6,
    "lr_warmup_steps_ratio": 0.0,
    "min_lr_ratio": 0.0,
    "lr_scheduler_type": "constant",
    "betas": [0.9, 0.999],
    "weight_decay": 0.01,
    "clip_grad": 1.0,
}
"""Defaults of `algorithm.optimizer`."""

RUN: Mapping[str, Any] = {
    "algorithm.algorithm_type": "ppo",
    **under("algorithm.optimizer.", OWN_OPTIMIZER),
    "algorithm.policy_loss_fn_args.clip_range": 0.2,
    "algorithm.policy_loss_fn_args.clip_ratio_c": 3.0,
    "algorithm.policy_loss_fn_args.loss_agg_mode": "token-mean",
    "algorithm.kl_loss_fn_args.kl_coef": 0.001,
    "algorithm.entropy_loss_fn_args.entropy_coef": 0.0,
    "model.min_response_tokens": 1,
    "model.temperature": 1.0,
    "model.top_p": 1.0,
    "model.top_k": -1,
    "buffer.batch_size": 1,
    "buffer.total_epochs": 1,
    "explorer.eval_interval": 100,
    "explorer.max_timeout": 1800,
    ENGINE + "engine_num": 1,
    ENGINE + "tensor_parallel_size": 1,
    ENGINE + "gpu_memory_utilization": 0.9,
    "trainer.save_interval": 0,
    "trainer.grad_clip": 1.0,
    TREE + MODEL + "enable_gradient_checkpointing": True,
    "project": "Trinity-RFT",
    "name": "rft",
    # Keys of other releases, and keys that the ones above overrule.
    **none("algorithm.loss_agg_mode", "algorithm.optimizer.warmup_style", "trainer.actor_grad_clip"),
    **none("buffer.explore_batch_size", "algorithm.advantage_fn_args.epsilon"),
    **none("algorithm.advantage_fn_args.baseline_shift"),
    # Names, folders, data, and what follows from them or from the cluster.
    **none("checkpoint_root_dir", "model.model_path", "buffer.tokenizer_path", "cluster.ray_address"),
    **none("cluster.node_num", "cluster.gpu_per_node", "model.max_prompt_tokens", "model.max_response_tokens"),
    **none("buffer.total_steps", "trainer.total_steps", "buffer.explorer_input.default_reward_fn_type"),
    **none(*(f"{TASKS}rollout_args.{name}" for name in ("temperature", "top_p", "top_k", "max_tokens"))),
    **none(*(f"{part}{name}" for part in (TASKS, HELD_OUT) for name in ("split", "format.prompt_key"))),
    **none(TASKS + "format.response_key", HELD_OUT + "format.response_key"),
    **none(HELD_OUT + "repeat_times", HELD_OUT + "rollout_args.max_tokens"),
    **none(ENGINE + "dtype"),  # bfloat16, as the actor's
    **none("synchronizer.sync_offset"),  # 0
    **none(*(f"trainer.{kind}_offload" for kind in OFFLOADED)),
    # The trainer's own tree repeats the keys above, with the same defaults.
    **none(TREE + MODEL + "tokenizer_path", *under(TREE + ACTOR + "optim.", OPTIMIZER), *under(TREE + ACTOR, MEGATRON)),
    **none(*(f"{TREE}{ACTOR}{name}" for name in ("megatron.param_dtype", "megatron.dtype", "fsdp_config.dtype"))),
    **none(TREE + ACTOR + "fsdp_config.reshard_after_forward"),
    **none(*(f"{TREE}{ACTOR}{name}" for name in ("grad_clip", "entropy_coeff", "clip_ratio_c", "ppo_epochs"))),
    **none(*(f"{TREE}{ACTOR}{name}" for name in ("loss_agg_mode", "loss_scale_factor", "recompute_old_log_prob"))),
}
