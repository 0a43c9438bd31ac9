"""The rules of verl's section `distillation`: a teacher on the student's own samples."""

from __future__ import annotations

from fivefold_import.draft import Draft
from fivefold_import.settings import COEFF, NO_REWARD, ONE_TEACHER, TEACHER_PATH
from fivefold_import.values import flag, number, text, whole

LOSS = "distillation.distillation_loss."
OF_TOP_K = {"forward_kl_topk": "forward", "reverse_kl_topk": "reverse"}
"""Modes over the teacher's most likely tokens, with their direction."""
OF_SAMPLED = ("k1", "kl")
"""Modes at the sampled token that are an advantage with `use_policy_gradient`."""


def _trains_on_rewards(draft: Draft) -> bool:
    return bool(draft.read(LOSS + "use_task_rewards", flag, True))


def _switch(draft: Draft, source: str) -> None:
    weight = draft.read(LOSS + "distillation_loss_coef", number, 1.0) if _trains_on_rewards(draft) else 1.0
    draft.sets(source, COEFF, weight)


def _weight(draft: Draft, source: str) -> None:
    if _trains_on_rewards(draft):
        draft.mapped(source, COEFF, number(draft.get(source)))
    draft.implied(source, "without task rewards, the divergence has the weight 1")


def _task_rewards(draft: Draft, source: str) -> None:
    if flag(draft.get(source)):
        draft.implied(source, "rewards are trained on too")
        return
    draft.demote("actor.advantage", NO_REWARD, "implied")
    draft.mapped(source, "actor.advantage", "none", NO_REWARD)


def _mode(draft: Draft, source: str) -> None:
    mode, as_reward = str(draft.get(source)), draft.get(LOSS + "use_policy_gradient")
    if mode in OF_TOP_K and as_reward is not True:
        draft.recipe["actor.distill.direction"] = OF_TOP_K[mode]
        note = f"direction={OF_TOP_K[mode]}; all other tokens count as one more"
        draft.mapped(source, "actor.distill.over", "top_k", note)
    elif mode in OF_SAMPLED and as_reward is not False:
        draft.mapped(source, "actor.distill.over", "sampled")
        draft.implied(source, "the reverse divergence at the sampled token is an advantage, as by default")
    draft.unsupported(
        source,
        "this estimator is not offered with this use_policy_gradient: the divergence is taken at the sampled token, as "
        "an advantage; actor.distill.over may also be top_k or full",
    )


def _top_k(draft: Draft, source: str) -> None:
    if str(draft.get(LOSS + "loss_mode")) in OF_TOP_K and draft.get(LOSS + "use_policy_gradient") is not True:
        draft.mapped(source, "actor.distill.top_k", whole(draft.get(source)))
    draft.implied(source, "only a divergence over the teacher's top tokens reads this")


def _path(draft: Draft, source: str) -> None:
    if source == draft.keys("distillation.teacher_model*.model_path")[0]:
        draft.mapped(source, TEACHER_PATH, text(draft.get(source)))
    draft.unsupported(source, ONE_TEACHER)
