"""The published algorithms and the corrections: one row each, with the keys that `algorithm: gspo` sets.

    algorithm: gspo  ─>  actor.loss: gspo, actor.eps_clip: 3e-4, ...   for every key that the recipe does not write

These values replace the schema's defaults. What a recipe writes takes precedence, and the resolved recipe shows all of
them. `fivefold/config/methods.py` has the losses and the advantages that the rows name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fivefold.config.schema.train import TrainRecipe

Keys = Mapping[str, Any]
"""Values by the dotted key that they set."""


@dataclass(frozen=True)
class Algorithm:
    """A value of `algorithm`."""

    idea: str
    """What it is, in one sentence."""
    paper: str
    keys: Keys = field(default_factory=dict)
    """Values of the recipe's keys that the paper sets."""
    note: str = ""
    """What else docs/algorithms.md says about the keys."""
    needs: str | None = None
    """Section of the recipe without which the algorithm cannot run; None: there is none."""


@dataclass(frozen=True)
class Correction:
    """A value of `actor.rollout_correction.method`."""

    idea: str
    keys: Keys = field(default_factory=dict)
    """Values of the keys of `actor.rollout_correction`."""
    elsewhere: str = ""
    """What other frameworks call it, for docs/algorithms.md."""


_SEQUENCES: Keys = {"actor.loss_aggregation": "sequence_mean"}
_BANDIT: Keys = {"actor.loss": "reinforce", "actor.loss_aggregation": "sequence_sum"}
"""REINFORCE in which a whole response is one action."""
_KL_IN_REWARD: Keys = {"actor.kl_in": "reward", "actor.kl_estimator": "k1"}

ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm(
        "Normalise rewards over each prompt's group, and clip ratios as PPO does.",
        "Shao et al. 2024, arXiv 2402.03300",
        note="nothing: these are the schema's defaults, with a mean over tokens and no KL term; the paper has "
        "`loss_aggregation=sequence_mean`, `kl_ctl=0.04`",
    ),
    "ppo": Algorithm(
        "Estimate advantages with a critic, and clip ratios.",
        "Schulman et al. 2017, arXiv 1707.06347; GAE: Schulman et al. 2015, arXiv 1506.02438",
        {"actor.advantage": "gae"},
        needs="critic",
    ),
    "dr_grpo": Algorithm(
        "GRPO without its two biases: no division by the length, none by the standard deviation.",
        "Liu et al. 2025, arXiv 2503.20783, section 3.2",
        {"actor.loss_aggregation": "sequence_sum_fixed", "actor.reward_norm.std_level": "none"},
    ),
    "dapo": Algorithm(
        "GRPO with a higher upper clip, dynamic sampling and a penalty on over-long responses.",
        "Yu et al. 2025, arXiv 2503.14476, sections 3.1 to 3.4",
        {
            "actor.eps_clip": 0.2,
            "actor.eps_clip_higher": 0.28,
            "actor.loss_aggregation": "token_mean",
            "actor.dynamic_sampling": True,
            "actor.overlong_reward_penalty": True,
        },
    ),
    "gspo": Algorithm(
        "Clip the ratio of the whole sequence.",
        "Zheng et al. 2025, arXiv 2507.18071, section 5.1",
        {"actor.loss": "gspo", "actor.eps_clip": 3e-4, "actor.eps_clip_higher": 4e-4, **_SEQUENCES},
    ),
    "cispo": Algorithm(
        "Clip the importance weight, so that every token keeps its gradient.",
        "MiniMax 2025, arXiv 2506.13585, eq. 4 and 5; upper bound of 5: Khatri et al. 2025, arXiv 2510.13786",
        {
            "actor.loss": "cispo",
            "actor.eps_clip": 1.0,
            "actor.eps_clip_higher": 4.0,
            "actor.loss_aggregation": "token_mean",
        },
        note="an `eps_clip` of 1 is no lower bound",
    ),
    "sapo": Algorithm(
        "Replace the clip by a sigmoid.",
        "Gao et al. 2025, arXiv 2511.20347",
        {"actor.loss": "sapo", **_SEQUENCES},
    ),
    "gmpo": Algorithm(
        "Take the geometric mean of a sequence's clipped ratios.",
        "Zhao et al. 2025, arXiv 2507.20673",
        {"actor.loss": "gmpo", "actor.eps_clip": 0.4, "actor.eps_clip_higher": 0.4, **_SEQUENCES},
        note="the clip is of log-ratios",
    ),
    "gpg": Algorithm(
        "Plain policy gradient, scaled up by the share of groups that carry a signal.",
        "Chu et al. 2025, arXiv 2504.02546",
        {"actor.loss": "reinforce", "actor.advantage": "gpg", "actor.loss_aggregation": "token_mean"},
    ),
    "topr": Algorithm(
        "Weight bad responses by how likely the policy still is to give them.",
        "Le Roux et al. 2025, arXiv 2503.14286",
        {
            "actor.loss": "topr",
            "actor.loss_aggregation": "sequence_sum",
            "actor.reward_norm.std_level": "none",
        },
    ),
    "clip_cov": Algorithm(
        "Drop the gradient of a few tokens of high covariance to keep the entropy up.",
        "Cui et al. 2025, arXiv 2505.22617, section 4.2",
        {"actor.loss": "clip_cov"},
    ),
    "kl_cov": Algorithm(
        "Hold a few tokens of high covariance near the old policy to keep the entropy up.",
        "Cui et al. 2025, arXiv 2505.22617, section 4.2",
        {"actor.loss": "kl_cov"},
    ),
    "clip_b": Algorithm(
        "Leave out bad tokens that would lower the entropy most, compared with the others of the batch.",
        "arXiv 2602.03392",
        {"actor.loss": "clip_b"},
    ),
    "clip_v": Algorithm(
        "Leave out bad tokens that would lower the entropy most, compared with all that might have been sampled.",
        "arXiv 2602.03392",
        {"actor.loss": "clip_v"},
    ),
    "lite_ppo": Algorithm(
        "GRPO with the mean of the group and the standard deviation of the batch.",
        "Liu et al. 2025, arXiv 2508.08221",
        {"actor.reward_norm.std_level": "batch", "actor.loss_aggregation": "token_mean"},
    ),
    "reinforce": Algorithm(
        "Plain policy gradient with the mean reward of the batch as its baseline.",
        "Williams 1992",
        {**_BANDIT, "actor.reward_norm.mean_level": "batch", "actor.reward_norm.std_level": "none"},
    ),
    "reinforce_pp": Algorithm(
        "Whiten the rewards, less their KL penalty, over all tokens of the step; clip as PPO does.",
        "Hu 2025, arXiv 2501.03262",
        {"actor.advantage": "reinforce_pp", **_KL_IN_REWARD},
    ),
    "reinforce_pp_baseline": Algorithm(
        "REINFORCE++ with the mean of the group as its baseline.",
        "Hu 2025, arXiv 2501.03262",
        {"actor.advantage": "reinforce_pp_baseline", "actor.kl_estimator": "k2"},
    ),
    "rloo": Algorithm(
        "Compare each response with the mean of the others of its group.",
        "Ahmadian et al. 2024, arXiv 2402.14740",
        {"actor.advantage": "rloo", **_BANDIT, **_KL_IN_REWARD},
    ),
    "remax": Algorithm(
        "Compare each response with the greedy one.",
        "Li et al. 2023, arXiv 2310.10505, algorithm 1",
        {"actor.advantage": "remax", **_BANDIT, **_KL_IN_REWARD},
    ),
    "opo": Algorithm(
        "Exact on-policy gradient with the baseline of least variance.",
        "Hao et al. 2025, arXiv 2505.23585",
        {"actor.advantage": "opo", **_BANDIT},
    ),
    "pass_at_k": Algorithm(
        "Reward the best of k responses.",
        "Chen et al. 2025, arXiv 2508.10751, section 2.4",
        {"actor.advantage": "pass_at_k"},
    ),
    "kimi": Algorithm(
        "Replace the clip by a squared penalty on the log-ratio of the sequence.",
        "Kimi team 2025, arXiv 2501.12599, section 2.3.2",
        {"actor.loss": "kimi", "actor.loss_aggregation": "sequence_sum", "actor.reward_norm.std_level": "none"},
    ),
    "cpgd": Algorithm(
        "Clip the log-ratio, and penalise the drift from the old policy.",
        "Liu et al. 2025, arXiv 2505.12504",
        {"actor.loss": "cpgd", **_SEQUENCES},
    ),
    "online_dpo": Algorithm(
        "Train on the best and the worst response of each group by DPO's loss.",
        "Guo et al. 2024, arXiv 2402.04792",
        {
            "actor.advantage": "dpo",
            "actor.kl_ctl": 0.1,
            "actor.kl_in": "pairs",
            "actor.loss": "reinforce",
            "actor.loss_aggregation": "sequence_sum",
            "actor.rollout_correction.method": "none",
        },
        note="`kl_ctl` is DPO's beta; a [judge](rewards.md) may take the place of a reward",
    ),
    "gdpo": Algorithm(
        "Normalise each of several rewards on its own before adding them up.",
        "Liu et al. 2026, arXiv 2601.05242, section 3.1",
        {"actor.advantage": "gdpo"},
    ),
    "distill": Algorithm(
        "Learn from a teacher's log-probs of the policy's own samples in place of rewards.",
        "Lu et al. 2025, Thinking Machines Lab",
        {"actor.loss": "reinforce", "actor.advantage": "none", "actor.distill.coeff": 1.0},
        needs="teacher",
    ),
    "rec": Algorithm(
        "REINFORCE on the tokens inside a region of ratios; here one-sided, without importance weights.",
        "Yao et al. 2025, arXiv 2509.24203",
        {"actor.loss": "rec", "actor.reward_norm.std_level": "none"},
    ),
    "raft": Algorithm(
        "Maximise the likelihood of right responses alone.",
        "Dong et al. 2023, arXiv 2304.06767; Xiong et al. 2025, arXiv 2504.11343",
        {"actor.loss": "reinforce", "actor.advantage": "raft"},
        note="with `loss=ppo` it is RAFT++",
    ),
    "m2po": Algorithm(
        "Mask the tokens of the largest importance weights until their second moment is small; clip as PPO does.",
        "Zheng et al. 2025, arXiv 2510.01161, as in AReaL",
        {"actor.rollout_correction.method": "m2po"},
        note="it is for [asynchronous training](async.md)",
    ),
    "chord": Algorithm(
        "Add the weighted likelihood of an expert's responses to the loss.",
        "Zhang et al. 2025, arXiv 2508.11408",
        {"expert_dataset.weight": 0.1, "expert_dataset.token_weight": "phi"},
        needs="expert_dataset",
    ),
    "vapo": Algorithm(
        "PPO for long chains of thought: lambda follows the length, and right responses have a likelihood term.",
        "Yue et al. 2025, arXiv 2504.05118, section 4",
        {
            "actor.advantage": "gae",
            "actor.gae_length_alpha": 0.05,
            "critic.gae_lambda": 1.0,
            "actor.eps_clip": 0.2,
            "actor.eps_clip_higher": 0.28,
            "actor.loss_aggregation": "token_mean",
            "actor.positive_nll_coeff": 0.1,
        },
        needs="critic",
    ),
    "pf_ppo": Algorithm(
        "PPO that weights samples by how reliable their rewards are.",
        "Shen and Zhang 2024, arXiv 2409.06957, with verl's rule and exponent",
        {"actor.advantage": "gae", "actor.sample_weights.reward": "power"},
        needs="critic",
    ),
    "gigpo": Algorithm(
        "GRPO for episodes of several turns, which also compares turns of a group that began in the same state.",
        "Feng et al. 2025, arXiv 2505.10978",
        {"actor.credit": "state", "actor.turn_discount": 0.95},
        note="`state_weight=1` is the paper's omega; `reward_norm.std_level=none` is its variant without a deviation",
        needs="environment",
    ),
    "dppo": Algorithm(
        "Bound the change of the probability instead of the ratio.",
        "arXiv 2602.04879",
        {"actor.loss": "dppo_tv"},
        note="`eps_clip` and `eps_clip_higher` bound the probability",
    ),
}
"""Values of `algorithm`."""

CORRECTIONS: Mapping[str, Correction] = {
    "auto": Correction(
        "nothing at first; `tis` from the step on after one with a `rollout_mismatch_kl` above `auto_threshold`"
    ),
    "none": Correction("no correction"),
    "tis": Correction(
        "truncated importance sampling",
        {"weight": "token", "weight_cap": 2.0},
        "verl `rollout_is: token`, slime `--use-tis`",
    ),
    "seq_tis": Correction(
        "the same over sequences", {"weight": "sequence", "weight_cap": 2.0}, "verl `rollout_is: sequence`"
    ),
    "mis": Correction(
        "masked importance sampling",
        {"weight": "token", "mask": "token", "mask_above": 2.0, "mask_below": 0.0},
        "verl `rollout_rs: token`",
    ),
    "seq_mis": Correction(
        "the same over sequences",
        {"weight": "sequence", "mask": "sequence", "mask_above": 2.0, "mask_below": 0.0},
        "verl `rollout_rs: sequence`",
    ),
    "geo_mask": Correction(
        "masks whole sequences by the geometric mean of w",
        {"mask": "geometric", "mask_above": 1.001, "mask_below": 0.999},
        "verl `rollout_rs: geometric`",
    ),
    "icepop": Correction(
        "weights tokens inside a range, and masks the others",
        {"weight": "token", "mask": "token", "mask_above": 5.0, "mask_below": 0.5},
        "IcePop",
    ),
    "m2po": Correction(
        "masks the tokens of the largest (log w)^2, until its mean over the mini-batch is at most 0.04",
        {"weight": "token", "mask": "second_moment", "mask_above": 0.04},
        "AReaL `m2_threshold`",
    ),
    "decoupled": Correction(
        "sg(w) times the loss in r, the decoupled PPO objective",
        {"weight": "token"},
        "AReaL `use_decoupled_loss`",
    ),
    "custom": Correction("what the keys say"),
}
"""Values of `actor.rollout_correction.method`."""

if TYPE_CHECKING:
    AlgorithmName = str
    CorrectionName = str
else:
    # mypy takes no computed Literal; pydantic does, and lists the names in its errors.
    AlgorithmName = Literal[tuple(ALGORITHMS)]
    CorrectionName = Literal[tuple(CORRECTIONS)]


def of_algorithm(full: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, as nested sections, that the `algorithm` of a recipe sets.

    Args:
        full: all values of the recipe. An unknown name sets nothing here; the schema refuses it.
    """
    return _values(ALGORITHMS, full.get("algorithm"), "")


def of_correction(full: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the `actor.rollout_correction.method` of a recipe sets; see `of_algorithm`."""
    section: Any = full
    for part in ("actor", "rollout_correction"):
        section = section.get(part) if isinstance(section, Mapping) else None
    method = section.get("method") if isinstance(section, Mapping) else None
    return _values(CORRECTIONS, method, "actor.rollout_correction.")


def _values(rows: Mapping[str, Algorithm | Correction], name: Any, prefix: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if isinstance(name, str) and name in rows:
        for key, value in rows[name].keys.items():
            _set(values, prefix + key, value)
    return values


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[name] = value


def deviations(recipe: TrainRecipe) -> list[str]:
    """Return a text for each key that a recipe sets to another value than its algorithm's, and for a user's code."""
    values = recipe.model_dump()
    keys = ALGORITHMS[recipe.algorithm].keys
    own = {f"actor.{name}": getattr(recipe.actor, name) for name in ("loss", "advantage")}
    found = [f"{key}={value}" for key, value in own.items() if ":" in value and key not in keys]
    for key, wanted in keys.items():
        value: Any = values
        for part in key.split("."):
            value = value[part] if value is not None else None
        if value != wanted:
            found.append(f"{key}={value} ({recipe.algorithm}: {wanted})")
    return found
