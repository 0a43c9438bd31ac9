"""What other frameworks call our keys: the names that people type, and the key that each means.

Only a message reads them; `fivefold import` converts whole files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

_VERL: Mapping[str, str] = {
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
    "project_name": "experiment_name",
    "save_freq": "saver.freq_steps",
    "test_freq": "evaluator.freq_steps",
    "total_epochs": "total_train_epochs",
    "total_training_steps": "total_train_steps",
    "train_batch_size": "train_dataset.batch_size",
    "train_files": "train_dataset.path",
    "val_files": "valid_dataset.path",
}
"""Our key for each name that verl's files have, and siiRL's."""

MEANINGS: Mapping[str, str] = {
    **_VERL,
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
"""Our key for each name, which is the last words of a key. Both keys take the same kind of value."""

_ADAPTERS = "adapters (LoRA) have the section lora: set actor.lora.rank, alpha and targets"
WITHOUT: Mapping[str, str] = {
    "lora_rank": _ADAPTERS,
    "lora_alpha": _ADAPTERS,
    "target_modules": _ADAPTERS,
    "peft_config": _ADAPTERS,
    "optimizer.type": "the optimizer is AdamW: drop it",
    "optimizer.name": "the optimizer is AdamW: drop it",
    "ppo_mini_batch_size": "set actor.ppo_n_minibatches, the number of mini-batches of a step",
    "use_kl_loss": "set actor.kl_ctl, the weight of the KL term, which is 0 without one",
    "scale_rewards": "set actor.reward_norm.std_level: group, batch or none",
}
"""What to know of a name for which no key takes the same kind of value."""

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "actor_rollout_ref": ("verl",),
    "data": ("verl",),
    "trainer": ("verl", "trinity", "skyrl"),
    "generator": ("skyrl",),
    "grpo": ("nemo_rl",),
    "loss_fn": ("nemo_rl",),
    "policy": ("nemo_rl",),
    "reward_model": ("verl",),
    "actor_train": ("roll",),
    "actor_infer": ("roll",),
    "explorer": ("trinity",),
    "buffer": ("trinity",),
    "synchronizer": ("trinity",),
}
"""The frameworks whose files have a section of this name at the top, as `fivefold import --from` names them."""

_IMPORT = "`fivefold import FILE --from {} -o RECIPE`"

_FEWEST_SIGNS = 2
"""Unknown keys of one framework by which a whole recipe looks like one of its files."""


def meaning_of(key: str, known: Collection[str]) -> str | None:
    """Return what an unknown key of another framework means here; None: it is no framework's.

    Args:
        key: the key.
        known: the keys that the recipe may have.
    """
    for name in _names(key):
        if MEANINGS.get(name) in known:
            return f"did you mean {MEANINGS[name]}?"
        if name in WITHOUT:
            return WITHOUT[name]
    if owners := SECTIONS.get(key.partition(".")[0]):
        return f"files of {' or '.join(owners)} have it: {_IMPORT.format('|'.join(owners))} converts them"
    return None


def looks_like(keys: Iterable[str]) -> str | None:
    """Return which framework's file a recipe with these unknown keys looks like, as a line; None: like no one's."""
    signs: Counter[str] = Counter()
    for key in keys:
        signs.update(SECTIONS.get(key.partition(".")[0]) or ("verl",) * any(name in _VERL for name in _names(key)))
    [(framework, n)] = signs.most_common(1) or [("", 0)]
    if n < _FEWEST_SIGNS:
        return None
    return f"this looks like {framework}: {_IMPORT.format(framework)} converts its files and launch scripts"


def _names(key: str) -> tuple[str, str]:
    """Return the last two words of a key, and the last one."""
    parts = key.split(".")
    return ".".join(parts[-2:]), parts[-1]
