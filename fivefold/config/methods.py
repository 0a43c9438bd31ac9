"""The losses and the advantages: one row each, with everything that is known without torch.

A row names the file with the formula. The schema, the checks of unused keys, `fivefold import` and the tables of
docs/algorithms.md (`scripts/algorithm_tables.py`) read these rows, so a new method is its file and its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Word:
    """What it takes to turn another framework's method into the one of a row."""

    note: str = ""
    """How the row's method differs from the framework's."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of `actor.loss_kwargs` that make it the framework's."""


@dataclass(frozen=True)
class Method:
    """What losses and advantages have in common."""

    at: str
    """Module below `fivefold.algorithms` and name of the class or function: `losses.ppo:PPO`."""
    formula: str
    """The formula, for docs/algorithms.md."""
    elsewhere: str = ""
    """What other frameworks call it, for docs/algorithms.md."""
    reads: frozenset[str] = frozenset()
    """The keys of `actor` that it reads, of those that only some methods read."""
    words: Mapping[str, Word] = field(default_factory=dict)
    """The names that other frameworks' files give it, in small letters with `_` for `-`."""


@dataclass(frozen=True)
class Loss(Method):
    """A value of `actor.loss`."""

    options: str = ""
    """Names and defaults of the options in `actor.loss_kwargs`, for docs/algorithms.md."""
    chooses_by: Literal["covariance", "entropy", "expected_entropy"] | None = None
    """By what of the policy before the step some tokens are chosen: the covariance of log-probs and advantages, or the
    changes of the entropy, less their expectation over the vocabulary or not. None: none are chosen."""


@dataclass(frozen=True)
class Advantage(Method):
    """A value of `actor.advantage`."""

    compares: bool = False
    """Whether it needs several completions of a prompt, whatever the recipe's other keys say."""
    whitens: bool = False
    """Whether advantages are whitened over the step's tokens where `actor.whiten_advantages` is null."""
    by_token: bool = False
    """Whether rewards of single tokens count from each token on; others take their sum over the response."""
    scores: bool = False
    """Whether it takes the policy's own pass over the samples; others take rewards alone, one for each completion."""


def _words(*names: str, note: str = "") -> dict[str, Word]:
    return dict.fromkeys(names, Word(note))


_CLIP = frozenset({"eps_clip", "eps_clip_higher"})
_DUAL_CLIP = _CLIP | {"c_clip"}
_PER_MINI_BATCH = "tokens are chosen over the mini-batch, not over each micro-batch"

LOSSES: Mapping[str, Loss] = {
    "ppo": Loss(
        "losses.ppo:PPO",
        "max(-A r, -A clip(r, 1 - `eps_clip`, 1 + `eps_clip_higher`)); where A < 0 at most -A `c_clip`",
        "verl `vanilla`, ROLL and Trinity-RFT `ppo`",
        reads=_DUAL_CLIP,
    ),
    "reinforce": Loss(
        "losses.policy_gradient:Reinforce",
        "-A log p; exact with one update a step",
        "verl `gpg`, ROLL `vanilla`, Trinity-RFT `opmd`, `sft` on samples",
        # The loss of AsymRE, OPMD and RAFT is the policy gradient too; only their advantages differ.
        words=_words("reinforce", "gpg", "pg", "asymre", "opmd")
        | _words("raft", note="completions with a reward below 1 are not trained on"),
    ),
    "gspo": Loss(
        "losses.sequence_ratios:GSPO",
        "PPO's, with s = exp(mean of log r over the sequence) in place of r",
        "verl and ROLL `gspo`, AReaL `importance_sampling_level: sequence`",
        reads=_CLIP,
        words=_words("gspo", "sequence", "seq"),
    ),
    "gmpo": Loss(
        "losses.sequence_ratios:GMPO",
        "-A exp(mean over the sequence of d), d = min(log r, `eps_clip_higher`) where A > 0, else max(log r, "
        "-`eps_clip`)",
        "verl `geo_mean`",
        reads=_CLIP,
        words=_words("geo_mean"),
    ),
    "cispo": Loss(
        "losses.policy_gradient:CISPO",
        "-sg(clip(r, 1 - `eps_clip`, 1 + `eps_clip_higher`)) A log p",
        "verl, ROLL, Trinity-RFT `cispo`",
        reads=_CLIP,
        words=_words("cispo"),
    ),
    "sapo": Loss(
        "losses.soft_clips:SAPO",
        "-A 4/tau sigmoid(tau (r - 1)), tau = `tau_pos` where A > 0, else `tau_neg`",
        "verl and Trinity-RFT `sapo`, AReaL `use_sapo_loss`",
        words=_words("sapo"),
        options="`tau_pos` 1, `tau_neg` 1.05",
    ),
    "topr": Loss(
        "losses.policy_gradient:TOPR",
        "-w A log p; w = `positive_weight` where A > 0, else `negative_weight` sg(min(1, product of r over the "
        "sequence))",
        "ROLL and Trinity-RFT `topr`: by token",
        words=_words("topr", note="its weight is the ratio of the whole response, as in the paper, not of each token"),
        options="both 1",
    ),
    "clip_cov": Loss(
        "losses.covariance:ClipCov",
        "PPO's; 0 on `clip_cov_ratio` of the tokens, drawn from those with a covariance in [`clip_cov_lb`, "
        "`clip_cov_ub`]",
        "verl `clip_cov`",
        reads=_CLIP,
        words=_words("clip_cov", note=_PER_MINI_BATCH),
        options="2e-4, 1, 5",
        chooses_by="covariance",
    ),
    "kl_cov": Loss(
        "losses.covariance:KLCov",
        "-A r; `ppo_kl_coef` abs(log r) more on the `kl_cov_ratio` of the tokens with the largest covariance, if it "
        "is above 0",
        "verl `kl_cov`",
        words=_words("kl_cov", note=_PER_MINI_BATCH),
        options="2e-4, 1",
        chooses_by="covariance",
    ),
    "clip_b": Loss(
        "losses.entropy_clips:ClipB",
        "PPO's; 0 where A < 0 and S < mean of S - `mu` std of S over the mini-batch, S = p_old (entropy + log p_old)",
        "Trinity-RFT `clipb`",
        reads=_DUAL_CLIP,
        words=_words("clipb", note="tokens are chosen over the mini-batch, and count in the divisor of the loss"),
        options="`mu` 2.5",
        chooses_by="entropy",
    ),
    "clip_v": Loss(
        "losses.entropy_clips:ClipV",
        "PPO's; 0 where A < 0 and S - E < -`mu` std of S - E over the mini-batch, E = sum over the vocabulary of p S; "
        "at most for `max_share` of the tokens",
        "Trinity-RFT `clipv`",
        reads=_DUAL_CLIP,
        words=_words("clipv", note="tokens are chosen over the mini-batch, and count in the divisor of the loss"),
        options="`mu` 8.5, `max_share` 1e-4",
        chooses_by="expected_entropy",
    ),
    "kimi": Loss(
        "losses.soft_clips:Kimi",
        "-A log p + tau/2 D log r, D = sum of log r over the sequence",
        "ROLL `kimi15`",
        words=_words("kimi15"),
        options="`tau` 0.1",
    ),
    "cpgd": Loss(
        "losses.soft_clips:CPGD",
        "max(-A log r, -A clip(log r, log(1 - `eps_clip`), log(1 + `eps_clip_higher`))) + `drift` (r - 1 - log r)",
        "siiRL and verl `cpgd`",
        reads=_CLIP,
        words=_words("cpgd", note="its drift term is k3, without a cap"),
        options="`drift` 1e-4",
    ),
    "dppo_tv": Loss(
        "losses.policy_gradient:DPPOTV",
        "-sg(min(r, `c_clip`)) A log p, with 20 if `c_clip` is null; 0 where A > 0 and p - p_old > "
        "`eps_clip_higher`, or A < 0 and p_old - p > `eps_clip`",
        "verl `dppo_tv`",
        reads=_DUAL_CLIP,
        words=_words("dppo_tv"),
    ),
    "dppo_kl": Loss(
        "losses.policy_gradient:DPPOKL",
        "the same with the KL divergence of this token against any other",
        "verl `dppo_kl`",
        reads=_DUAL_CLIP,
        words=_words("dppo_kl"),
    ),
    "rec": Loss(
        "losses.policy_gradient:REC",
        "-I w A log p + `penalty_coeff` penalty; I is 1 in a `region` of ratios (`one_side`, `two_side`, `ring`, "
        "`none`), else 0; w, by `weight`, is 1 (`none`), r (`ratio`) or exp(A / `weight_temperature`) (`advantage`); "
        "the `penalty` is `none`, (log r)^2 (`k2`) or -log p (`forward_kl`)",
        "Trinity-RFT `rec`, `sppo`, `importance_sampling`",
        reads=_CLIP,
        words={
            "rec": Word(),
            "sppo": Word(options={"region": "two_side"}),
            "importance_sampling": Word(options={"region": "none", "weight": "ratio"}),
        },
        options="`region` one_side, `ring_low` 0.6, `ring_high` 2, `weight` none, `weight_temperature` 1, `penalty` "
        "none, `penalty_coeff` 0",
    ),
}
"""Values of `actor.loss`; any other is a user's class."""

_LEVELS = frozenset({"reward_norm.mean_level", "reward_norm.std_level"})

ADVANTAGES: Mapping[str, Advantage] = {
    "grpo": Advantage(
        "advantages.normalised:grpo",
        "(R - mean) / (std + eps), each over the group, the batch or not at all (`actor.reward_norm`)",
        "verl `grpo`; AReaL `reward_norm`",
        reads=_LEVELS | {"reward_norm.eps"},
    ),
    "grpo_leave_one_out": Advantage(
        "advantages.normalised:grpo_leave_one_out",
        "(R - mean) / (std + eps) over the others of the group; R - mean where their rewards are equal",
        "NeMo-RL `grpo` with `use_leave_one_out_baseline`",
        reads=frozenset({"reward_norm.eps"}),
        compares=True,
    ),
    "gdpo": Advantage(
        "advantages.normalised:gdpo",
        "S / (std + eps) over the batch; S = sum over `reward.rewards` of weight (R - mean) / (std + eps), each over "
        "the group, with penalties on length as one more reward",
        "verl, TRL `gdpo`",
        reads=frozenset({"reward_norm.eps"}),
        words=_words("gdpo"),
        compares=True,
    ),
    "rloo": Advantage(
        "advantages.baselines:rloo",
        "R - mean of the others of the group",
        "verl, Trinity-RFT `rloo`",
        words=_words("rloo", "rloo_vectorized"),
        compares=True,
    ),
    "reinforce_pp": Advantage(
        "advantages.plain:rewards",
        "R, whitened over all tokens of the step",
        "verl `reinforce_plus_plus`, ROLL `reinforce`",
        words=_words("reinforce_plus_plus", "reinforceplusplus"),
        whitens=True,
        by_token=True,
    ),
    "reinforce_pp_baseline": Advantage(
        "advantages.baselines:reinforce_pp_baseline",
        "R - mean over the group, whitened over all tokens of the step",
        "verl `reinforce_plus_plus_baseline`",
        words=_words("reinforce_plus_plus_baseline"),
        compares=True,
        whitens=True,
    ),
    "remax": Advantage(
        "advantages.baselines:remax",
        "R - R of the greedy completion, which each step generates as well",
        "verl, Trinity-RFT `remax`",
        words=_words("remax"),
    ),
    "opo": Advantage(
        "advantages.baselines:opo",
        "R - sum of l R / sum of l over the group",
        "verl `opo`",
        words=_words("opo"),
        compares=True,
    ),
    "gpg": Advantage(
        "advantages.baselines:gpg",
        "N / (N - M) (R - mean over the group), M of N completions in groups of equal rewards",
        "verl `gpg`",
        words=_words("gpg"),
        compares=True,
    ),
    "pass_at_k": Advantage(
        "advantages.pass_at_k:pass_at_k",
        "mean of (b - mean) / std over those subsets of `k` completions of the group that have it; b is 1 for a subset "
        "with a right one (R >= `full_reward`), else 0; mean and std of b are over all subsets; `advantage_kwargs.k` "
        "is 4, below `gconfig.n_samples`, and `full_reward` 1",
        compares=True,
    ),
    "pass_at_k_best": Advantage(
        "advantages.pass_at_k:pass_at_k_best",
        "for the best of the group its distance from the second best, else 0; over the standard deviation with "
        "`advantage_kwargs.divide_by_std`",
        "verl `grpo_passk`",
        words=_words("grpo_passk"),
        compares=True,
    ),
    "asymre": Advantage(
        "advantages.baselines:asymre",
        "R - (mean over the group + `baseline_shift`); `advantage_kwargs.baseline_shift` is -0.1",
        "Trinity-RFT `asymre`",
        words=_words("asymre"),
        compares=True,
    ),
    "opmd": Advantage(
        "advantages.baselines:opmd",
        "R - tau log(mean over the group of exp(R / tau)); `advantage_kwargs.tau` is 1",
        "Trinity-RFT `opmd` with `logavgexp`",
        compares=True,
    ),
    "optimal_token_baseline": Advantage(
        "advantages.token_baseline:optimal_token_baseline",
        "of its token t: R - sum of W_t R / sum of W_t over the group, W_t = w_1 + ... + w_t, w = 1 - 2 p + the sum "
        "of squared probabilities over the vocabulary; `advantage_kwargs.zero_tail` (true): no baseline where the "
        "longest completion is alone",
        "verl `optimal_token_baseline`, `tir_optimal_token_baseline`",
        words=_words("optimal_token_baseline", "tir_optimal_token_baseline"),
        compares=True,
        scores=True,
    ),
    "dpo": Advantage(
        "advantages.pairs:dpo",
        "-N dL/ds for the best and the worst completion of the group, N in all, else 0; L is the mean over pairs of "
        "`advantage_kwargs.loss_type`: `sigmoid` (with `label_smoothing`), `hinge` or `ipo` of [DPO](preferences.md), "
        "beta is `kl_ctl`, s = log p - log p_ref of the completion",
        "TRL `OnlineDPOTrainer`",
        compares=True,
        scores=True,
    ),
    "raft": Advantage(
        "advantages.plain:raft",
        "1 where R >= `full_reward`, else 0; `advantage_kwargs.full_reward` is 1",
        "Trinity-RFT and ROLL `raft`",
        words=_words("raft"),
    ),
    "gae": Advantage(
        "advantages.plain:rewards",
        "generalised advantage estimation, with a [critic](critic.md)",
        "verl, ROLL `gae`",
        reads=frozenset({"discount", "gae_lambda", "gae_length_alpha"}),
        whitens=True,
        by_token=True,
    ),
    "none": Advantage(
        "advantages.plain:none",
        "0: rewards are measured, and a [teacher](distillation.md) or a KL term trains",
    ),
}
"""Values of `actor.advantage`; any other is a user's function."""


def scored() -> list[str]:
    """Return the advantages that take the policy's own pass over the samples."""
    return [name for name, row in ADVANTAGES.items() if row.scores]
