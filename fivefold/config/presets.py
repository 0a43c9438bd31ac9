"""Published algorithms by name, each with the keys that its paper sets: what `algorithm: gspo` means.

    algorithm: gspo  ─>  actor.loss: gspo, actor.eps_clip: 3e-4, ...   for every key that the recipe does not write

The values take the place of the schema's defaults. What a recipe writes comes first, and its resolved form shows them
all. The formulas are in `fivefold/algorithms/`, one file a method, and docs/algorithms.md compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fivefold.config.schema.train import TrainRecipe

Algorithm = Literal[
    "grpo", "ppo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "gmpo", "gpg", "topr", "clip_cov", "kl_cov", "lite_ppo",
    "reinforce", "reinforce_pp", "reinforce_pp_baseline", "rloo", "remax", "opo", "pass_at_k", "kimi", "cpgd",
    "gdpo", "distill", "rec", "raft", "m2po", "chord", "vapo", "pf_ppo", "dppo",
]  # fmt: skip

LOSSES = (
    "ppo", "reinforce", "gspo", "gmpo", "cispo", "sapo", "topr", "clip_cov", "kl_cov", "kimi", "cpgd",
    "dppo_tv", "dppo_kl", "rec",
)  # fmt: skip
"""Values of `actor.loss` that name a file in `fivefold/algorithms/losses/`."""

ADVANTAGES = (
    "grpo", "gdpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "gpg", "pass_at_k",
    "pass_at_k_best", "asymre", "opmd", "raft", "optimal_token_baseline",
    "gae", "none",
)  # fmt: skip
"""Values of `actor.advantage` that name a file in `fivefold/algorithms/advantages/`, and `gae`."""

SAMPLERS = ("epochs", "easy_to_hard", "replay")
"""Values of `train_dataset.sampler`."""

Keys = Mapping[str, Any]
"""Values by the dotted key that they set."""

_SEQUENCES: Keys = {"actor.loss_aggregation": "sequence_mean"}
_BANDIT: Keys = {"actor.loss": "reinforce", "actor.loss_aggregation": "sequence_sum"}
"""REINFORCE in which a whole response is one action."""
_KL_IN_REWARD: Keys = {"actor.kl_in": "reward", "actor.kl_estimator": "k1"}

PRESETS: Mapping[str, Keys] = {
    # Shao et al. 2024 (arXiv 2402.03300). The schema's defaults: its advantages and clip, averaged over tokens.
    "grpo": {},
    # Schulman et al. 2017 (arXiv 1707.06347), with GAE (Schulman et al. 2015, arXiv 1506.02438).
    "ppo": {"actor.advantage": "gae"},
    # Yue et al. 2025 (arXiv 2504.05118), section 4.
    "vapo": {
        "actor.advantage": "gae",
        "actor.gae_length_alpha": 0.05,
        "critic.gae_lambda": 1.0,
        "actor.eps_clip": 0.2,
        "actor.eps_clip_higher": 0.28,
        "actor.loss_aggregation": "token_mean",
        "actor.positive_nll_coeff": 0.1,
    },
    # Shen and Zhang 2024 (arXiv 2409.06957), with verl's rule and its exponent.
    "pf_ppo": {"actor.advantage": "gae", "actor.sample_weights.reward": "power"},
    # arXiv 2602.04879: total variation in the place of the ratio's clip.
    "dppo": {"actor.loss": "dppo_tv"},
    # Liu et al. 2025 (arXiv 2503.20783), section 3.2: no division by length, none by the standard deviation.
    "dr_grpo": {"actor.loss_aggregation": "sequence_sum_fixed", "actor.reward_norm.std_level": "none"},
    # Yu et al. 2025 (arXiv 2503.14476), sections 3.1 to 3.4.
    "dapo": {
        "actor.eps_clip": 0.2,
        "actor.eps_clip_higher": 0.28,
        "actor.loss_aggregation": "token_mean",
        "actor.dynamic_sampling": True,
        "actor.overlong_reward_penalty": True,
    },
    # Zheng et al. 2025 (arXiv 2507.18071), section 5.1.
    "gspo": {"actor.loss": "gspo", "actor.eps_clip": 3e-4, "actor.eps_clip_higher": 4e-4, **_SEQUENCES},
    # MiniMax 2025 (arXiv 2506.13585), eq. 4 and 5: no lower bound. The paper gives no upper one: 5 is that of
    # Khatri et al. 2025 (arXiv 2510.13786).
    "cispo": {
        "actor.loss": "cispo",
        "actor.eps_clip": 1.0,
        "actor.eps_clip_higher": 4.0,
        "actor.loss_aggregation": "token_mean",
    },
    # Gao et al. 2025 (arXiv 2511.20347).
    "sapo": {"actor.loss": "sapo", **_SEQUENCES},
    # Zhao et al. 2025 (arXiv 2507.20673): the clip is of log-ratios.
    "gmpo": {"actor.loss": "gmpo", "actor.eps_clip": 0.4, "actor.eps_clip_higher": 0.4, **_SEQUENCES},
    # Chu et al. 2025 (arXiv 2504.02546).
    "gpg": {"actor.loss": "reinforce", "actor.advantage": "gpg", "actor.loss_aggregation": "token_mean"},
    # Le Roux et al. 2025 (arXiv 2503.14286).
    "topr": {
        "actor.loss": "topr",
        "actor.loss_aggregation": "sequence_sum",
        "actor.reward_norm.std_level": "none",
    },
    # Cui et al. 2025 (arXiv 2505.22617), section 4.2.
    "clip_cov": {"actor.loss": "clip_cov"},
    "kl_cov": {"actor.loss": "kl_cov"},
    # Liu et al. 2025 (arXiv 2508.08221): mean of the group, standard deviation of the batch, mean over tokens.
    "lite_ppo": {"actor.reward_norm.std_level": "batch", "actor.loss_aggregation": "token_mean"},
    # Williams 1992, with the mean reward of the batch as its baseline.
    "reinforce": {**_BANDIT, "actor.reward_norm.mean_level": "batch", "actor.reward_norm.std_level": "none"},
    # Hu 2025 (arXiv 2501.03262).
    "reinforce_pp": {"actor.advantage": "reinforce_pp", **_KL_IN_REWARD},
    "reinforce_pp_baseline": {"actor.advantage": "reinforce_pp_baseline", "actor.kl_estimator": "k2"},
    # Ahmadian et al. 2024 (arXiv 2402.14740).
    "rloo": {"actor.advantage": "rloo", **_BANDIT, **_KL_IN_REWARD},
    # Li et al. 2023 (arXiv 2310.10505), algorithm 1.
    "remax": {"actor.advantage": "remax", **_BANDIT, **_KL_IN_REWARD},
    # Hao et al. 2025 (arXiv 2505.23585): exact on-policy training.
    "opo": {"actor.advantage": "opo", **_BANDIT},
    # Chen et al. 2025 (arXiv 2508.10751), section 2.4.
    "pass_at_k": {"actor.advantage": "pass_at_k"},
    # Liu et al. 2026 (arXiv 2601.05242), section 3.1.
    "gdpo": {"actor.advantage": "gdpo"},
    # Kimi team 2025 (arXiv 2501.12599), section 2.3.2.
    "kimi": {"actor.loss": "kimi", "actor.loss_aggregation": "sequence_sum", "actor.reward_norm.std_level": "none"},
    # Lu et al. 2025 (Thinking Machines Lab): the teacher's log-probs in place of rewards.
    "distill": {"actor.loss": "reinforce", "actor.advantage": "none", "actor.distill.coeff": 1.0},
    # Yao et al. 2025 (arXiv 2509.24203): REC-OneSide without importance weights.
    "rec": {"actor.loss": "rec", "actor.reward_norm.std_level": "none"},
    # Dong et al. 2023 (arXiv 2304.06767), as Xiong et al. 2025 (arXiv 2504.11343) write it for verifiable rewards.
    "raft": {"actor.loss": "reinforce", "actor.advantage": "raft"},
    # Zheng et al. 2025 (arXiv 2510.01161), with the clip of PPO, as in AReaL.
    "m2po": {"actor.rollout_correction.method": "m2po"},
    # Zhang et al. 2025 (arXiv 2508.11408): CHORD with token weights and a constant mu.
    "chord": {"expert_dataset.weight": 0.1, "expert_dataset.token_weight": "phi"},
    # Liu et al. 2025 (arXiv 2505.12504).
    "cpgd": {"actor.loss": "cpgd", **_SEQUENCES},
}
"""Keys that each algorithm sets, by its name."""

Correction = Literal[
    "auto", "none", "tis", "seq_tis", "mis", "seq_mis", "geo_mask", "icepop", "m2po", "decoupled", "custom"
]  # fmt: skip

CORRECTIONS: Mapping[str, Keys] = {
    "auto": {},
    "none": {},
    "custom": {},
    "tis": {"weight": "token", "weight_cap": 2.0},
    "seq_tis": {"weight": "sequence", "weight_cap": 2.0},
    "mis": {
        "weight": "token",
        "mask": "token",
        "mask_above": 2.0,
        "mask_below": 0.0,
    },
    "seq_mis": {
        "weight": "sequence",
        "mask": "sequence",
        "mask_above": 2.0,
        "mask_below": 0.0,
    },
    "geo_mask": {
        "mask": "geometric",
        "mask_above": 1.001,
        "mask_below": 0.999,
    },
    "icepop": {
        "weight": "token",
        "mask": "token",
        "mask_above": 5.0,
        "mask_below": 0.5,
    },
    "m2po": {
        "weight": "token",
        "mask": "second_moment",
        "mask_above": 0.04,
    },
    "decoupled": {"weight": "token"},
}
"""Keys of `actor.rollout_correction` that each of its methods sets."""


def of_algorithm(full: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, as nested sections, that the `algorithm` of a recipe sets.

    Args:
        full: all values of the recipe. An unknown name sets nothing here; the schema refuses it.
    """
    return _values(PRESETS, full.get("algorithm"), "")


def of_correction(full: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the `actor.rollout_correction.method` of a recipe sets; see `of_algorithm`."""
    section: Any = full
    for part in ("actor", "rollout_correction"):
        section = section.get(part) if isinstance(section, Mapping) else None
    method = section.get("method") if isinstance(section, Mapping) else None
    return _values(CORRECTIONS, method, "actor.rollout_correction.")


def _values(presets: Mapping[str, Keys], name: Any, prefix: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in presets.get(name, {}).items() if isinstance(name, str) else ():
        _set(values, prefix + key, value)
    return values


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[name] = value


def deviations(recipe: TrainRecipe) -> list[str]:
    """Return a text for each key that a recipe sets to another value than its algorithm's."""
    values = recipe.model_dump()
    found = []
    for key, wanted in PRESETS[recipe.algorithm].items():
        value: Any = values
        for part in key.split("."):
            value = value[part] if value is not None else None
        if value != wanted:
            found.append(f"{key}={value} ({recipe.algorithm}: {wanted})")
    return found
