"""verl's defaults, from the tree that its trainers generate (`_generated_ppo_megatron_trainer.yaml`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold_import.defaults import none
from fivefold_import.rules import under
from fivefold_import.verl.actor_rules import ACTOR, MODEL, OVERRIDE
from fivefold_import.verl.critic_rules import CRITIC
from fivefold_import.verl.rules import OVERLONG_SECTIONS, ROLLOUT

OPTIMIZER: Mapping[str, Any] = {
    "lr": 1e-6,
    "lr_warmup_steps_ratio": 0.0,
    "weight_decay": 0.01,
    "betas": [0.9, 0.999],
    "clip_grad": 1.0,
    "min_lr_ratio": 0.0,
    "lr_decay_style": "constant",
    # The same schedule, in other engines and releases.
    **none("lr_scheduler_type", "warmup_style"),
    # Taken from the optimizer's own defaults.
    **none(
        "eps",
        "override_optimizer_config.decoupled_weight_decay",
        "override_optimizer_config.apply_wd_to_qk_layernorm",
        "override_optimizer_config.optimizer_cpu_offload",
        *(f"override_optimizer_config.{name}" for name in ("exp_avg_dtype", "exp_avg_sq_dtype")),
        "override_optimizer_config.store_param_remainders",
    ),
}

OFFLOADED = ("param", "grad", "optimizer")
MEGATRON: Mapping[str, Any] = none(
    "megatron.override_ddp_config.overlap_grad_reduce",
    "megatron.override_ddp_config.grad_reduce_in_fp32",
    *(f"{section}{kind}_offload" for section in ("megatron.", "fsdp_config.", "") for kind in OFFLOADED),
    # Only a mixture of experts has these: `megatron.router_defaults`.
    *(OVERRIDE + name for name in ("moe_router_dtype", "moe_token_dispatcher_type", "moe_aux_loss_coeff")),
    OVERRIDE + "moe_z_loss_coeff",
)

CRITICS_OPTIMIZER: Mapping[str, Any] = {**OPTIMIZER, "lr": 1e-5}
CRITICS: Mapping[str, Any] = {
    **under(CRITIC + "optim.", CRITICS_OPTIMIZER),
    CRITIC + "grad_clip": 1.0,
    CRITIC + "cliprange_value": 0.5,
}
"""Defaults of a critic; the others are those of the actor's keys."""

TREE: Mapping[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.prompt_key": "prompt",
    "data.shuffle": True,
    # The defaults name an example, which is not what somebody who leaves them out means.
    **none("data.train_files", "data.val_files", MODEL + "path", "trainer.default_local_dir"),
    **none("data.seed", "data.tokenizer", MODEL + "tokenizer_path", "trainer.total_training_steps", "trainer.seed"),
    MODEL + "enable_gradient_checkpointing": True,
    **under(ACTOR + "optim.", OPTIMIZER),
    **under(ACTOR, MEGATRON),
    ACTOR + "megatron.dtype": "bfloat16",
    **none(ACTOR + "megatron.param_dtype", ACTOR + "fsdp_config.dtype"),
    ACTOR + "fsdp_config.reshard_after_forward": True,
    ACTOR + "grad_clip": 1.0,
    ACTOR + "ppo_mini_batch_size": 256,
    ACTOR + "ppo_max_token_len_per_gpu": 16384,
    ACTOR + "ppo_epochs": 1,
    ACTOR + "clip_ratio": 0.2,
    ACTOR + "clip_ratio_c": 3.0,
    ACTOR + "loss_agg_mode": "token-mean",
    ACTOR + "entropy_coeff": 0.0,
    ACTOR + "use_kl_loss": False,
    ACTOR + "kl_loss_coef": 0.001,
    ACTOR + "kl_loss_type": "low_var_kl",
    **none(ACTOR + "recompute_old_log_prob", ACTOR + "loss_scale_factor", "algorithm.filter_groups.enable"),
    # A reward manager's own options, which have no values unless written.
    **none(*(f"{section}{name}" for section in OVERLONG_SECTIONS for name in ("enable", "len", "penalty_factor"))),
    ROLLOUT + "n": 1,
    ROLLOUT + "temperature": 1.0,
    ROLLOUT + "top_p": 1.0,
    ROLLOUT + "top_k": -1,
    ROLLOUT + "tensor_model_parallel_size": 2,
    ROLLOUT + "max_num_seqs": 1024,
    ROLLOUT + "gpu_memory_utilization": 0.5,
    ROLLOUT + "val_kwargs.n": 1,
    **none(ROLLOUT + "dtype"),  # bfloat16, as the actor's
    # These sections exist only in recipes of trainers whose rollout has devices of its own.
    **none("async_training.staleness_threshold", "rollout.total_epochs", "rollout.test_freq"),
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "trainer.critic_warmup": 0,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
}
