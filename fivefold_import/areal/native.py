"""The keys that mean the same in AReaL and in Fivefold."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import.values import DTYPE, LR_SCHEDULE, Convert, flag, number, one_of, run_name, text, top_k, whole


def texts(value: object) -> list[str]:
    """Return a text, or a list of texts, as a list."""
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def whole_numbers(value: object) -> list[int]:
    """Return a whole number, or a list of whole numbers, as a list."""
    return [whole(item) for item in value] if isinstance(value, list) else [whole(value)]


FREQUENCIES: Mapping[str, Convert] = {"freq_epochs": whole, "freq_steps": whole, "freq_secs": number}
"""The keys that say how often something is done; each of them makes it due."""

NATIVE: Mapping[str, Convert] = {
    "experiment_name": run_name,
    "trial_name": run_name,
    "seed": whole,
    "tokenizer_path": text,
    "total_train_epochs": whole,
    "total_train_steps": whole,
    "cluster.n_nodes": whole,
    "cluster.n_gpus_per_node": whole,
    "cluster.fileroot": text,
    "actor.path": text,
    "actor.dtype": DTYPE,
    "actor.init_from_scratch": flag,
    "actor.mb_spec.max_tokens_per_mb": whole,
    "actor.mb_spec.n_mbs": whole,
    "actor.optimizer.lr": number,
    "actor.optimizer.weight_decay": number,
    "actor.optimizer.beta1": number,
    "actor.optimizer.beta2": number,
    "actor.optimizer.eps": number,
    "actor.optimizer.lr_scheduler_type": LR_SCHEDULE,
    "actor.optimizer.warmup_steps_proportion": number,
    "actor.optimizer.min_lr_ratio": number,
    "actor.optimizer.gradient_clipping": number,
    "actor.ppo_n_minibatches": whole,
    "actor.eps_clip": number,
    "actor.eps_clip_higher": number,
    "actor.c_clip": number,
    "actor.kl_ctl": number,
    "actor.kl_estimator": one_of(k1="k1", k2="k2", k3="k3"),
    "actor.recompute_logprob": flag,
    "actor.reward_scaling": number,
    "actor.reward_bias": number,
    "actor.reward_clip": number,
    "actor.megatron.use_deterministic_algorithms": flag,
    "actor.megatron.virtual_pipeline_parallel_size": whole,
    "ref.path": text,
    "gconfig.n_samples": whole,
    "gconfig.max_new_tokens": whole,
    "gconfig.min_new_tokens": whole,
    "gconfig.greedy": flag,
    "gconfig.temperature": number,
    "gconfig.top_p": number,
    "gconfig.top_k": top_k,
    "gconfig.stop_token_ids": whole_numbers,
    "gconfig.stop": texts,
    **{
        f"{section}.{name}": convert
        for section in ("train_dataset", "valid_dataset")
        for name, convert in (("path", text), ("split", text), ("max_length", whole))
    },
    "train_dataset.batch_size": whole,
    "train_dataset.shuffle": flag,
    **{
        f"{section}.{name}": convert
        for section in ("saver", "evaluator", "recover")
        for name, convert in FREQUENCIES.items()
    },
}
"""Keys that mean the same in AReaL and in Fivefold, each with the conversion that checks its value."""
