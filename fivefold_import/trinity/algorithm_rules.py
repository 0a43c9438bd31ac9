"""Trinity-RFT's section `algorithm`: losses, advantages, KL terms and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import import reasons
from fivefold_import.algorithms import loss_by_name, option_of_loss
from fivefold_import.draft import Draft, Rule
from fivefold_import.rules import for_each, implied, off, only, to, unknown, unsupported
from fivefold_import.settings import betas
from fivefold_import.values import LOSS_AGGREGATION, LR_SCHEDULE, Convert, number, one_of, whole

TYPE = "algorithm.algorithm_type"


def _of_adaptive_weight(rule: Rule) -> Rule:
    """Apply `rule` to an option of a KL weight that is adapted, if the key `adaptive` beside it is on."""

    def only_if_on(draft: Draft, key: str) -> None:
        if draft.get(key.rpartition(".")[0] + ".adaptive") is True and draft.recipe.get("actor.kl_ctl"):
            rule(draft, key)
        draft.implied(key, "only an adaptive weight reads this")

    return only_if_on


ADAPTIVE: Mapping[str, Rule] = {
    "adaptive": _of_adaptive_weight(implied("actor.kl_target is the divergence that is wanted")),
    "target_kl": _of_adaptive_weight(to("actor.kl_target", number)),
    "horizon": _of_adaptive_weight(to("actor.kl_horizon", whole)),
}


def _sequence_masking(draft: Draft, key: str) -> None:
    """Convert off-policy sequence masking, whose bound is 0.1 unless it is written."""
    section = "algorithm.policy_loss_fn_args."
    if draft.get(section + "enable_sequence_masking") is True:
        draft.mapped(key, "actor.opsm_delta", draft.read(section + "delta_sequence_masking", number, 0.1))
    draft.implied(key, "sequence masking is switched off")


REC_OPTIONS: Mapping[str, tuple[str, Convert]] = {
    "epsilon_low": ("actor.eps_clip", number),
    "epsilon_high": ("actor.eps_clip_higher", number),
    "epsilon_low_prime": ("actor.loss_kwargs.ring_low", number),
    "epsilon_high_prime": ("actor.loss_kwargs.ring_high", number),
    "clip_mode": (
        "actor.loss_kwargs.region",
        one_of(none="none", one_side="one_side", two_side="two_side", ring="ring"),
    ),
    "weight": (
        "actor.loss_kwargs.weight",
        one_of(none="none", importance_sampling="ratio", advantage="advantage"),
    ),
    "regularizer": ("actor.loss_kwargs.penalty", one_of(none="none", k2="k2", forward_kl="forward_kl")),
    "regularizer_coef": ("actor.loss_kwargs.penalty_coeff", number),
    "temp": ("actor.loss_kwargs.weight_temperature", number),
}
"""Options of the loss `rec`, each with the recipe's key and a conversion."""


def _is_loss(draft: Draft, name: str) -> bool:
    return draft.get("algorithm.policy_loss_fn", draft.get(TYPE)) == name


def _of_rec(target: tuple[str, Convert]) -> Rule:
    def rule(draft: Draft, key: str) -> None:
        if _is_loss(draft, "rec"):
            draft.mapped(key, target[0], target[1](draft.get(key)))
        draft.implied(key, "only the loss rec reads this")

    return rule


def _range_of_sppo(draft: Draft, key: str) -> None:
    """Convert sPPO's range of ratios, from 1 / (1 + epsilon) to 1 + epsilon."""
    if _is_loss(draft, "sppo"):
        epsilon = number(draft.get(key))
        draft.recipe["actor.eps_clip"] = epsilon / (1.0 + epsilon)
        draft.mapped(key, "actor.eps_clip_higher", epsilon, "actor.eps_clip=epsilon / (1 + epsilon)")
    draft.implied(key, "only the loss sppo reads this")


ALGORITHM: Mapping[str, Rule] = {
    "policy_loss_fn": loss_by_name("ppo"),
    "policy_loss_fn_args.clip_ratio_c": to("actor.c_clip", number),
    "policy_loss_fn_args.loss_agg_mode": to("actor.loss_aggregation", LOSS_AGGREGATION),
    "policy_loss_fn_args.enable_sequence_masking": _sequence_masking,
    "policy_loss_fn_args.delta_sequence_masking": _sequence_masking,
    **{f"policy_loss_fn_args.{name}": _of_rec(to_) for name, to_ in REC_OPTIONS.items()},
    "policy_loss_fn_args.epsilon": _range_of_sppo,
    "policy_loss_fn_args.fallback_to_policy_gradient": off("old log-probabilities are always known"),
    **{
        f"policy_loss_fn_args.{tau}": option_of_loss(tau, "sapo", "algorithm.policy_loss_fn", "sapo")
        for tau in ("tau_pos", "tau_neg")
    },
    "policy_loss_fn_args.*": unknown("the loss"),
    "loss_agg_mode": to("actor.loss_aggregation", LOSS_AGGREGATION),
    "advantage_fn_args.epsilon": to("actor.reward_norm.eps", number),
    "advantage_fn_args.*": unsupported("advantages are rewards, normalised over groups or the batch"),
    "entropy_loss_fn": only(
        "default",
        "none",
        holds="actor.entropy_coeff is the weight of the entropy",
        otherwise="this entropy term is not offered",
    ),
    "entropy_loss_fn_args.entropy_coef": to("actor.entropy_coeff", number),
    **for_each(("kl_loss_fn_args.", "kl_penalty_fn_args."), ADAPTIVE),
    "sample_strategy": only("default", "warmup", holds="each sample is trained once", otherwise=reasons.SYNCHRONOUS),
    "sample_strategy_args.*": unsupported(reasons.SYNCHRONOUS),
    "enable_router_replay": off(reasons.NO_ROUTER_REPLAY),
    "bypass_old_logprobs": implied(reasons.OLD_LOGPROBS),
    "rollout_correction.*": off(reasons.NO_CORRECTION),
    "optimizer.betas": betas,
    "optimizer.lr": to("actor.optimizer.lr", number),
    "optimizer.weight_decay": to("actor.optimizer.weight_decay", number),
    "optimizer.clip_grad": to("actor.optimizer.gradient_clipping", number),
    "optimizer.lr_warmup_steps_ratio": to("actor.optimizer.warmup_steps_proportion", number),
    "optimizer.min_lr_ratio": to("actor.optimizer.min_lr_ratio", number),
    "optimizer.lr_scheduler_type": to("actor.optimizer.lr_scheduler_type", LR_SCHEDULE),
    "optimizer.warmup_style": to("actor.optimizer.lr_scheduler_type", LR_SCHEDULE),
    "optimizer.optimizer_type": only("adam", "adamw", holds=reasons.ADAMW),
    "*": unknown("the algorithm"),
}
