"""What other frameworks call our keys: the names that people type, and the key that each means.

Only a message reads them; `fivefold import` converts whole files.
"""

from __future__ import annotations

from collections.abc import Mapping

MEANINGS: Mapping[str, str] = {
    # verl, siiRL
    "rollout.n": "gconfig.n_samples",
    "adv_estimator": "algorithm",
    "clip_ratio": "actor.eps_clip",
    "clip_ratio_low": "actor.eps_clip",
    "clip_ratio_high": "actor.eps_clip_higher",
    "clip_ratio_c": "actor.c_clip",
    "gpu_memory_utilization": "rollout.memory_fraction",
    "kl_coef": "actor.kl_ctl",
    "kl_loss_coef": "actor.kl_ctl",
    "kl_loss_type": "actor.kl_estimator",
    "loss_agg_mode": "actor.loss_aggregation",
    "lr_warmup_steps": "actor.optimizer.warmup_steps",
    "max_prompt_length": "train_dataset.max_length",
    "max_response_length": "gconfig.max_new_tokens",
    "nnodes": "cluster.n_nodes",
    "ppo_max_token_len_per_gpu": "actor.mb_spec.max_tokens_per_mb",
    "ppo_mini_batch_size": "actor.ppo_n_minibatches",
    "project_name": "experiment_name",
    "save_freq": "saver.freq_steps",
    "test_freq": "evaluator.freq_steps",
    "total_epochs": "total_train_epochs",
    "total_training_steps": "total_train_steps",
    "train_batch_size": "train_dataset.batch_size",
    "train_files": "train_dataset.path",
    "use_kl_loss": "actor.kl_ctl",
    "val_files": "valid_dataset.path",
    # TRL
    "beta": "actor.kl_ctl",
    "epsilon": "actor.eps_clip",
    "epsilon_high": "actor.eps_clip_higher",
    "learning_rate": "actor.optimizer.lr",
    "max_completion_length": "gconfig.max_new_tokens",
    "max_steps": "total_train_steps",
    "model_name_or_path": "actor.path",
    "num_generations": "gconfig.n_samples",
    "num_iterations": "actor.ppo_epochs",
    "num_train_epochs": "total_train_epochs",
    "output_dir": "cluster.fileroot",
    "report_to": "stats.trackers",
    "reward_funcs": "reward.fn",
    "scale_rewards": "actor.reward_norm.std_level",
    "vllm_gpu_memory_utilization": "rollout.memory_fraction",
    # OpenRLHF
    "actor_learning_rate": "actor.optimizer.lr",
    "advantage_estimator": "actor.advantage",
    "critic_learning_rate": "critic.optimizer.lr",
    "generate_max_len": "gconfig.max_new_tokens",
    "init_kl_coef": "actor.kl_ctl",
    "n_samples_per_prompt": "gconfig.n_samples",
    "pretrain": "actor.path",
    "prompt_data": "train_dataset.path",
    "prompt_max_len": "train_dataset.max_length",
    "rollout_batch_size": "train_dataset.batch_size",
    # AReaL, ROLL, Trinity-RFT
    "group_size": "gconfig.n_samples",
    "mask_no_eos_with_zero": "actor.mask_truncated",
    "mem_fraction_static": "rollout.memory_fraction",
    "num_return_sequences_in_group": "gconfig.n_samples",
    "response_length": "gconfig.max_new_tokens",
    "prompt_length": "train_dataset.max_length",
}
"""Our key for each name, which is the last words of a key."""

_ADAPTERS = "adapters (LoRA) are not supported: all weights are trained"
WITHOUT: Mapping[str, str] = {
    "lora_rank": _ADAPTERS,
    "lora_alpha": _ADAPTERS,
    "target_modules": _ADAPTERS,
    "peft_config": _ADAPTERS,
    "optimizer.type": "the optimizer is AdamW: drop it",
    "optimizer.name": "the optimizer is AdamW: drop it",
}
"""What to know of a name for which there is no key."""

SECTIONS: Mapping[str, str] = {
    "actor_rollout_ref": "verl",
    "data": "verl",
    "trainer": "verl or Trinity-RFT",
    "reward_model": "verl",
    "actor_train": "ROLL",
    "actor_infer": "ROLL",
    "explorer": "Trinity-RFT",
    "buffer": "Trinity-RFT",
    "synchronizer": "Trinity-RFT",
}
"""The framework whose files have a section of this name at the top."""


def meaning_of(key: str) -> str | None:
    """Return what an unknown key of another framework means here; None: it is no framework's."""
    parts = key.split(".")
    for name in (".".join(parts[-2:]), parts[-1]):
        if name in MEANINGS:
            return f"did you mean {MEANINGS[name]}?"
        if name in WITHOUT:
            return WITHOUT[name]
    if parts[0] in SECTIONS:
        return f"files of {SECTIONS[parts[0]]} have it: `fivefold import FILE` converts them"
    return None
