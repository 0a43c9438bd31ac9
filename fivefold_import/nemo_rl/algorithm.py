"""NeMo-RL's algorithms: what its estimators, its one policy loss and its rewards become."""

from __future__ import annotations

from fivefold_import.algorithms import choose_loss
from fivefold_import.corrections import CORRECTION, correct_rollout
from fivefold_import.critic import gae
from fivefold_import.draft import Draft
from fivefold_import.settings import ADVANTAGE, MEAN_LEVEL, STD_LEVEL
from fivefold_import.values import Unfit, flag, number, one_of

LOSS = "loss_fn."
KL, KL_KIND, IN_REWARD = (
    f"{LOSS}reference_policy_kl_penalty",
    f"{LOSS}reference_policy_kl_type",
    f"{LOSS}use_kl_in_reward",
)
CORRECTS, BY_SEQUENCE = f"{LOSS}use_importance_sampling_correction", f"{LOSS}sequence_level_importance_ratios"
TRUNCATION = f"{LOSS}truncated_importance_sampling_"
SWITCHES = (
    (f"{LOSS}use_cispo", "cispo"),
    (f"{LOSS}force_on_policy_ratio", "reinforce"),
    (f"{LOSS}disable_ppo_ratio", "reinforce"),
    (BY_SEQUENCE, "gspo"),
)
"""Switches of the loss with what they choose, in the order in which the source asks for them."""
ESTIMATOR = one_of(k1="k1", k2="k2", k3="k3")
WITH_REWARD = ("reinforce_plus_plus", "gae")
"""Estimators that subtract a KL term from the reward."""


def convert_estimator(draft: Draft, section: str) -> None:
    """Convert what turns rewards into advantages.

    Args:
        draft: the conversion.
        section: `grpo.` or `ppo.`.
    """
    at = f"{section}adv_estimator."
    name = str(draft.get(f"{at}name", "grpo"))
    if name == "grpo":
        _grpo(draft, section)
    elif name == "reinforce_plus_plus":
        less_mean = draft.read(f"{at}minus_baseline", flag, True)
        to = "reinforce_pp_baseline" if less_mean else "reinforce_pp"
        draft.sets(f"{at}name", ADVANTAGE, to)
        draft.implied(f"{at}minus_baseline", f"{ADVANTAGE}={to} says so")
    elif name == "gdpo":
        draft.sets(f"{at}name", ADVANTAGE, "gdpo")
        if draft.get(f"{at}use_leave_one_out_baseline", True) is True:
            draft.unsupported(f"{at}use_leave_one_out_baseline", "gdpo takes mean and deviation over the whole group")
        draft.implied(f"{at}normalize_rewards", "gdpo divides by the standard deviation")
        draft.unsupported(f"{at}reward_weights", "each of reward.rewards has its weight")
    elif name == "gae":
        _gae(draft, at)
    else:
        draft.unsupported(f"{at}name", f"the estimator {name!r} is not offered; the recipe trains with GRPO instead")
    draft.all_implied(f"{at}*", f"the estimator {name} does not read this")
    draft.implied(f"{at}use_leave_one_out_baseline", f"the estimator {name} does not read this")
    for key in ("normalize_rewards", "use_leave_one_out_baseline"):
        draft.implied(f"{section}{key}", f"adv_estimator says so, or the estimator {name} does not read this")


def _gae(draft: Draft, at: str) -> None:
    """Convert GAE, with VAPO's weights: one for the advantages, which may follow the length, one for the critic."""
    own, critics, alpha = (f"{at}{name}" for name in ("gae_lambda_policy", "gae_lambda_value", "length_adaptive_alpha"))
    gae(draft, f"{at}name", {f"{at}gae_gamma": "actor.discount"})
    if draft.get(alpha):
        draft.sets(alpha, "actor.gae_length_alpha", draft.read(alpha, number))
    else:
        key = own if draft.get(own) is not None else f"{at}gae_lambda"
        draft.sets(key, "actor.gae_lambda", draft.read(key, number, 1.0))
    if draft.get(critics) is not None:
        draft.sets(critics, "critic.gae_lambda", draft.read(critics, number))
    elif draft.get(alpha):
        draft.sets(f"{at}gae_lambda", "critic.gae_lambda", draft.read(f"{at}gae_lambda", number, 1.0))
    whitens = f"{at}normalize_advantages"
    draft.sets(whitens, "actor.whiten_advantages", draft.read(whitens, flag, True))
    for key in draft.keys(f"{at}*"):
        draft.implied(key, "another key says how estimates are weighted")


def _grpo(draft: Draft, section: str) -> None:
    """Convert GRPO, whose mean and deviation are over the group's other responses unless the source says otherwise."""
    divides_key, others_key = (
        _of_estimator(draft, section, name) for name in ("normalize_rewards", "use_leave_one_out_baseline")
    )
    divides, others = (_switch(draft, key) for key in (divides_key, others_key))
    if others:
        to = "grpo_leave_one_out" if divides else "rloo"
        for key in (others_key, divides_key):
            draft.sets(key, ADVANTAGE, to)
    else:
        draft.sets(others_key, MEAN_LEVEL, "group")
        draft.sets(divides_key, STD_LEVEL, "group" if divides else "none")
    for name in ("name", "normalize_rewards", "use_leave_one_out_baseline"):
        draft.implied(f"{section}adv_estimator.{name}", "other keys say what is subtracted and divided by")


def _switch(draft: Draft, key: str) -> bool:
    """Return a switch that is on by default, and report one that is neither on nor off."""
    try:
        return flag(draft.get(key, True))
    except Unfit as error:
        draft.unsupported(key, str(error))
        return True


def _of_estimator(draft: Draft, section: str, name: str) -> str:
    """Return the key of the estimator that has a value; releases before `adv_estimator` have it in the section."""
    own = f"{section}adv_estimator.{name}"
    return own if draft.writes(own) or not draft.writes(f"{section}{name}") else f"{section}{name}"


def convert_loss(draft: Draft) -> None:
    """Convert the policy loss: PPO's, or the one of the first switch that is on, and how tokens become one number."""
    chosen = next(((key, name) for key, name in SWITCHES if draft.read(key, flag, False)), None)
    if chosen is not None:
        choose_loss(draft, *chosen)
        for key, _ in SWITCHES:
            if draft.get(key) is True and key != BY_SEQUENCE:
                draft.implied(key, f"{chosen[0]} chooses the loss")
    key = f"{LOSS}token_level_loss"
    by_token = draft.read(key, flag, True)
    draft.sets(key, "actor.loss_aggregation", "token_mean" if by_token else "sequence_mean")


def convert_advantage_bounds(draft: Draft, section: str) -> None:
    """Convert the bounds of advantages, which are off unless the source has some."""
    least, most = (f"{section}advantage_clip_{side}" for side in ("low", "high"))
    written = [key for key in (least, most) if draft.get(key) is not None]
    if len(written) == 2 and draft.read(least, number) == -draft.read(most, number) < 0:
        draft.sets(most, "actor.advantage_clip", draft.read(most, number))
        draft.implied(least, f"{most} bounds both sides")
    for key in written:
        draft.unsupported(key, "actor.advantage_clip bounds both sides alike")
    draft.all_implied(f"{section}advantage_clip_*", "advantages have no bounds")


def convert_correction(draft: Draft, section: str) -> None:
    """Convert weights and masks for the mismatch of rollout and trainer, which are off unless the source has some."""
    error = f"{section}seq_logprob_error_threshold"
    if draft.get(error) is not None:
        keys = {"mask": "geometric", "mask_by": "error", "mask_above": draft.read(error, number)}
        correct_rollout(draft, error, keys, "sequences that are left out still count in the loss's divisor")
    draft.implied(error, "no sequence is left out")
    if not draft.read(CORRECTS, flag, False):
        if f"{CORRECTION}mask" not in draft.recipe:
            draft.sets(CORRECTS, f"{CORRECTION}method", "none")
        draft.implied(CORRECTS, f"{error} leaves sequences out, and nothing has another weight")
        return
    level = "sequence" if draft.read(BY_SEQUENCE, flag, False) else "token"
    correct_rollout(draft, CORRECTS, {"weight": level})
    kind, most, least = (f"{TRUNCATION}{name}" for name in ("type", "ratio", "ratio_min"))
    if draft.get(most) is None:
        return
    above = draft.read(most, number)
    below = draft.read(least, number, 0.0)
    name = str(draft.get(kind, "tis"))
    if name == "tis":
        keys = {"weight_cap": above} | ({"weight_floor": below} if below > 0 else {})
    elif name in ("icepop", "seq-mask-tis") and f"{CORRECTION}mask" in draft.recipe:
        draft.unsupported(kind, f"there is one mask, and {error} has another")
        return
    elif name in ("icepop", "seq-mask-tis"):
        keys = {"mask": "token" if name == "icepop" else "geometric", "mask_above": above, "mask_below": below}
    else:
        draft.unsupported(kind, f"the truncation {name!r} is not offered")
        return
    for key in (most, least, kind):
        if draft.get(key) is not None:
            correct_rollout(draft, key, keys)


def convert_kl(draft: Draft, section: str) -> None:
    """Convert the KL term: in the loss, or in the reward with the estimators that have it there."""
    weight = draft.read(KL, number, 0.01)
    in_reward = draft.read(IN_REWARD, flag, False)
    estimator = str(draft.get(f"{section}adv_estimator.name", "grpo"))
    if weight == 0 or (in_reward and estimator not in WITH_REWARD):
        draft.implied(KL, "there is no KL term")
        draft.all_implied(f"{LOSS}*kl*", "there is no KL term")
        return
    try:
        kind = ESTIMATOR(draft.get(KL_KIND, "k3"))
    except Unfit as error:
        draft.unsupported(KL_KIND, str(error))
        kind = "k3"
    draft.sets(KL, "actor.kl_ctl", weight)
    draft.sets(KL_KIND, "actor.kl_estimator", kind)
    if in_reward:
        draft.sets(IN_REWARD, "actor.kl_in", "reward")
        return
    draft.recipe["actor.kl_unbiased"] = True
    draft.notes.append(
        "actor.kl_unbiased=true: NeMo-RL's KL term has the gradient of the probability of its samples too; there its "
        "factor is 1 in value, here p / p_old, which differs with several updates a step"
    )
    if draft.get(f"{LOSS}use_on_policy_kl_approximation") is True:
        draft.unsupported(
            f"{LOSS}use_on_policy_kl_approximation", "the KL term is weighted by p / p_old, not by p over the rollout's"
        )
    draft.implied(f"{LOSS}use_on_policy_kl_approximation", "it is switched off")
    if draft.get(f"{LOSS}kl_output_clamp_value") is not None:
        draft.sets(f"{LOSS}kl_output_clamp_value", "actor.kl_clip", draft.read(f"{LOSS}kl_output_clamp_value", number))


def convert_rewards(draft: Draft, section: str) -> None:
    """Convert the scale of rewards, and the penalty on long responses, which NeMo-RL subtracts after scaling."""
    factor = _scale(draft, f"{section}reward_scaling.")
    at = f"{section}reward_shaping."
    if not draft.read(f"{at}enabled", flag, False) or draft.get(f"{at}stop_properly_penalty_coef") is not None:
        return
    draft.recipe["actor.overlong_reward_penalty"] = True
    draft.mapped(f"{at}enabled", "actor.overlong_reward_penalty", True)
    stretch = _stretch(draft, at)
    penalty = f"{at}overlong_buffer_penalty"
    if draft.get(penalty) is not None:
        note = f"over the factor {factor:g} of the rewards, which are scaled after it here" if factor != 1 else ""
        draft.sets(penalty, "actor.overlong_penalty_factor", draft.read(penalty, number) * stretch / factor, note)


def _stretch(draft: Draft, at: str) -> float:
    """Convert where the penalty on long responses begins; return by what its weight grows with the stretch.

    NeMo-RL's penalty grows evenly from `max_response_length` less the buffer on, and without an end: a response may be
    longer. Here it ends at gconfig.max_new_tokens, with as much as it has grown to there.
    """
    limit, buffer = f"{at}max_response_length", f"{at}overlong_buffer_length"
    longest, known = draft.get("policy.generation.max_new_tokens"), [draft.get(limit), draft.get(buffer)]
    if known[0] == longest:
        draft.implied(limit, "it is gconfig.max_new_tokens")
        return 1.0
    if not all(isinstance(value, int) for value in (*known, longest)) or known[1] <= 0:
        draft.unsupported(limit, f"the penalty counts from gconfig.max_new_tokens, which is {longest}")
        return 1.0
    begin = known[0] - known[1]
    if not 0 <= begin < longest:
        draft.unsupported(
            limit, f"the penalty begins at {begin} tokens, and not between 0 and gconfig.max_new_tokens={longest}"
        )
        return 1.0
    tokens = longest - begin
    note = f"from {begin} tokens on, up to gconfig.max_new_tokens"
    for key in (buffer, limit):
        draft.mapped(key, "actor.overlong_tokens", tokens, note)
    return tokens / known[1]


def _scale(draft: Draft, at: str) -> float:
    """Convert a map of rewards from one range to another; return its factor."""
    if not draft.read(f"{at}enabled", flag, False):
        return 1.0
    low, high = draft.read(f"{at}source_min", number, 0.0), draft.read(f"{at}source_max", number, 1.0)
    to_low, to_high = draft.read(f"{at}target_min", number, 0.0), draft.read(f"{at}target_max", number, 1.0)
    if high <= low or to_high <= to_low:
        for key in draft.keys(f"{at}*"):
            draft.unsupported(key, "the ranges need a smaller and a larger end")
        return 1.0
    factor = (to_high - to_low) / (high - low)
    bias = to_low / factor - low
    draft.recipe["actor.reward_bias"] = bias
    draft.mapped(f"{at}enabled", "actor.reward_scaling", factor, f"with actor.reward_bias={bias:g}")
    for name in ("target_min", "target_max", "source_min", "source_max"):
        draft.mapped(f"{at}{name}", "actor.reward_scaling", factor, "rewards beyond the range are not cut off")
    return factor


def convert_distillation(draft: Draft) -> None:
    """Convert on-policy distillation: the divergence from the teacher's most likely tokens is the only loss."""
    kind = str(draft.get(f"{LOSS}kl_type", "mixed"))
    draft.recipe |= {"actor.distill.coeff": 1.0, ADVANTAGE: "none", "actor.distill.over": "top_k"}
    key = f"{LOSS}kl_type"
    if kind in ("forward", "reverse"):
        draft.sets(key, "actor.distill.direction", kind, "all tokens beyond the teacher's top ones count as one more")
    else:
        draft.sets(
            key, "actor.distill.direction", "mixed", "all tokens beyond the teacher's top ones count as one more"
        )
        share = f"{LOSS}mixed_kl_weight"
        draft.sets(share, "actor.distill.teacher_share", draft.read(share, number, 0.5))
    if draft.get("distillation.topk_logits_k") is not None:
        top = "distillation.topk_logits_k"
        draft.sets(top, "actor.distill.top_k", draft.get(top))
    draft.implied(f"{LOSS}mixed_kl_weight", "only the mixed divergence reads this")
    if draft.get(f"{LOSS}zero_outside_topk") is True:
        draft.unsupported(f"{LOSS}zero_outside_topk", "all tokens beyond the teacher's top ones count as one more")
