"""AReaL's defaults, from its dataclasses of command-line arguments (`areal/api/cli_args.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold_import.areal.native import FREQUENCIES
from fivefold_import.defaults import none
from fivefold_import.rules import under

OPTIMIZER: Mapping[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.01,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "lr_scheduler_type": "constant",
    "warmup_steps_proportion": 0.001,
    "min_lr_ratio": 0.0,
    "gradient_clipping": 1.0,
}

RUN: Mapping[str, Any] = {
    **under("actor.optimizer.", OPTIMIZER),
    "actor.dtype": "bfloat16",
    "actor.init_from_scratch": False,
    "actor.mb_spec.n_mbs": 1,
    "ref.mb_spec.n_mbs": 1,
    "actor.ppo_n_minibatches": 4,
    "actor.eps_clip": 0.2,
    "actor.recompute_logprob": False,
    "actor.reward_scaling": 1.0,
    "actor.reward_bias": 0.0,
    "actor.reward_clip": 20.0,
    "actor.kl_ctl": 0.1,
    "actor.kl_estimator": "k1",
    "actor.overlong_reward_penalty": False,
    "actor.entropy_coeff": None,  # There is no entropy bonus.
    "actor.megatron.use_deterministic_algorithms": False,
    "actor.megatron.virtual_pipeline_parallel_size": 1,
    "gconfig.n_samples": 1,
    "gconfig.max_new_tokens": 16384,
    "gconfig.min_new_tokens": 0,
    "gconfig.greedy": False,
    "gconfig.temperature": 1.0,
    "gconfig.top_p": 1.0,
    "gconfig.top_k": 100_000_000,
    "train_dataset.batch_size": 1,
    "train_dataset.shuffle": True,
    "cluster.n_nodes": 32,
    "cluster.n_gpus_per_node": 8,
    "total_train_epochs": 1,
    "seed": 1,
    # None of these is switched on, or has a value, unless it is written.
    **none("actor.eps_clip_higher", "actor.c_clip", "gconfig.stop_token_ids", "gconfig.stop", "total_train_steps"),
    **none("tokenizer_path", "ref.path"),
    **none("rollout.max_head_offpolicyness"),  # 0
    # Checkpoints change nothing about the training, so Fivefold's own hold unless the source has some.
    **none(*(f"{part}.{name}" for part in ("saver", "evaluator", "recover", "checkpointer") for name in FREQUENCIES)),
    # The plan decides, unless it is switched on.
    **none("actor.optimizer.offload"),
    # A mini-batch in one pass, however large, and prompts of any length.
    **none("actor.mb_spec.max_tokens_per_mb", "train_dataset.max_length", "valid_dataset.max_length"),
    # Names, folders and data.
    **none("experiment_name", "trial_name", "cluster.fileroot", "actor.path"),
    **none("train_dataset.path", "train_dataset.split", "valid_dataset.path", "valid_dataset.split"),
    # Performance only, and left to Megatron-Core.
    **none("actor.megatron.ddp.overlap_grad_reduce", "actor.megatron.ddp.bucket_size"),
    **none("actor.megatron.ddp.grad_reduce_in_fp32", "actor.megatron.store_param_remainders"),
    **none("actor.megatron.exp_avg_dtype", "actor.megatron.exp_avg_sq_dtype"),
    # Only a mixture of experts has these: `megatron.router_defaults`.
    **none(
        *(f"actor.megatron.moe_{name}" for name in ("router_dtype", "token_dispatcher_type", "aux_loss_coeff")),
        "actor.megatron.moe_z_loss_coeff",
    ),
}

OF_DPO: Mapping[str, Any] = {
    "beta": 0.1,
    "loss_type": "sigmoid",
    **none("ref.dtype", "ref.mb_spec.max_tokens_per_mb"),
}
"""Defaults of sources of DPO, besides those of the keys above."""

NORMALISATION: Mapping[str, Any] = {"mean_level": "batch", "std_level": "batch", "eps": 1e-5}
"""Defaults of a section `reward_norm` or `adv_norm` that the source has."""

CRITICS: Mapping[str, Any] = {
    **under("critic.optimizer.", OPTIMIZER),
    "critic.ppo_n_minibatches": 4,
    "critic.eps_clip": 0.5,
}
"""Defaults of a section `critic` that the source has."""

ENGINES: Mapping[str, Mapping[str, Any]] = {
    "sglang": {
        "sglang.mem_fraction_static": 0.9,
        **none("sglang.max_running_requests", "sglang.max_num_seqs", "sglang.gpu_memory_utilization", "sglang.dtype"),
    },
    "vllm": {
        "vllm.gpu_memory_utilization": 0.9,
        "vllm.max_num_seqs": 256,
        **none("vllm.max_running_requests", "vllm.mem_fraction_static", "vllm.dtype"),
    },
}
"""Defaults of the engine that generates."""
