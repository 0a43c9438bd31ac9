"""ROLL's defaults, from its dataclasses of configurations (`roll/configs`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold_import.defaults import none
from fivefold_import.roll.rules import CONFIG, CRITIC, INFER, TRAIN
from fivefold_import.rules import under

OPTIMIZER: Mapping[str, Any] = {
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
}

RUN: Mapping[str, Any] = {
    "adv_estimator": "gae",
    "rollout_batch_size": 128,
    "num_return_sequences_in_group": 1,
    "prompt_length": 1024,
    "ppo_epochs": 1,
    "loss_agg_mode": "seq-mean-token-mean",
    "pg_clip": 0.2,
    "max_len_mask": False,
    "difficulty_loss_weight": False,
    "length_loss_weight": False,
    "max_grad_norm": 1.0,
    "entropy_loss_coef": 0.0,
    "kl_loss_coef": 0.0,
    "init_kl_coef": 0.2,
    "kl_penalty": "kl",
    "max_steps": 500,
    "save_steps": 50,
    "eval_steps": 10,
    "seed": 42,
    "num_gpus_per_node": 8,
    "rpc_timeout": 3600,
    **none("reward_pretrain"),
    **none("async_generation_ratio"),  # 0
    "max_running_requests": 128,
    TRAIN + "model_args.disable_gradient_checkpointing": False,
    TRAIN + "model_args.dtype": "bf16",
    **under(TRAIN + "training_args.", OPTIMIZER),
    # What follows from the lists of devices, from other keys, or from the data.
    **none(
        "exp_name",
        "pretrain",
        "num_nodes",
        "output_dir",
        "reward_clip",
        "val_n_sample",
        "val_greedy",
        "val_prompt_length",
        "validation.eval_steps",
        TRAIN + "model_args.model_name_or_path",
    ),
    **none(*(f"{TRAIN}data_args.{name}" for name in ("messages", "prompt", "response"))),
    **none(*(f"validation.data_args.{name}" for name in ("messages", "prompt", "response"))),
    # The engine's own defaults hold in ROLL and in Fivefold.
    **none(*(INFER + CONFIG + name for name in ("max_num_seqs", "gpu_memory_utilization", "mem_fraction_static"))),
    # Only a mixture of experts has these: `megatron.router_defaults`.
    **none(
        TRAIN + "model_args.moe_aux_loss_coef",
        *(f"{TRAIN}{CONFIG}moe_{name}" for name in ("router_dtype", "token_dispatcher_type", "aux_loss_coeff")),
        TRAIN + CONFIG + "moe_z_loss_coeff",
        TRAIN + CONFIG + "overlap_grad_reduce",
    ),
    **none(
        TRAIN + CONFIG + "reshard_after_forward",  # true, as in Fivefold
        TRAIN + CONFIG + "reduce_dtype",  # float32, as in Fivefold
    ),
}

CRITICS: Mapping[str, Any] = {"critic_warmup": 0, **under(CRITIC + "training_args.", OPTIMIZER)}
"""Defaults of a critic; its number format and its recomputation are the actor's unless they are written."""

BATCH: Mapping[str, Any] = {
    TRAIN + "training_args.per_device_train_batch_size": 8,
    TRAIN + "training_args.gradient_accumulation_steps": 1,
}
"""Defaults of a source that has a section for training."""

SAMPLING: Mapping[str, Any] = {
    "temperature": 0.95,
    "top_p": 0.7,
    "top_k": 50,
    "do_sample": True,
    "num_return_sequences": 1,
    "max_new_tokens": None,  # It follows from response_length.
}
"""Defaults of a section `generating_args` that the source has."""

TRAINING_SAMPLES = under(INFER + "generating_args.", SAMPLING)
HELD_OUT_SAMPLES = under("validation.generating_args.", SAMPLING)
