"""The rules of verl's section `distillation`: a teacher on the student's own samples."""

from __future__ import annotations

from fivefold_import.draft import Draft
from fivefold_import.settings import COEFF, NO_REWARD, ONE_TEACHER, TEACHER_PATH
from fivefold_import.values import flag, number, text, whole

LOSS = "distillation.distillation_loss."
OF_TOP_K = {"forward_kl_topk": "forward", "reverse_kl_topk": "reverse"}
"""Modes over the teacher's most likely tokens, with their direction."""
PATHS = "distillation.teacher_model*.model_path"
"""Keys of the teachers' models."""
BY_SOURCE = "data_source"
"""The column by which Fivefold finds a prompt's teacher, which is verl's default."""
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


def _least_logprob(draft: Draft, source: str) -> None:
    if str(draft.get(LOSS + "loss_mode")) in OF_TOP_K:
        draft.mapped(source, "actor.distill.min_logprob", number(draft.get(source)))
    draft.implied(source, "only a divergence over the teacher's top tokens reads this")


def _path(draft: Draft, source: str) -> None:
    if not _teach_by_source(draft):
        if source == draft.keys(PATHS)[0]:
            draft.mapped(source, TEACHER_PATH, text(draft.get(source)))
        draft.unsupported(source, ONE_TEACHER)
        return
    name = source.split(".")[2]
    draft.mapped(source, f"teachers.{name}.path", text(draft.get(source)))


def _prompts_of_teacher(draft: Draft, source: str) -> None:
    """Convert the value of `teacher_key` whose prompts a teacher has."""
    if _teach_by_source(draft):
        name = source.split(".")[2]
        draft.mapped(source, f"teachers.{name}.data_sources", [text(draft.get(source))])
    draft.implied(source, "there is one teacher, for all prompts")


def _teacher_key(draft: Draft, source: str) -> None:
    """Convert the column that names each prompt's teacher."""
    if draft.get(source) == BY_SOURCE:
        draft.implied(source, "teachers.<name>.data_sources are values of this column")
    elif len(draft.keys(PATHS)) > 1:
        draft.unsupported(source, f"a prompt's teacher is found by {BY_SOURCE}")
    draft.implied(source, "there is one teacher, for all prompts")


def _teach_by_source(draft: Draft) -> bool:
    """Return whether there are several teachers, each of some data sources."""
    several = [key.removesuffix(".model_path") for key in draft.keys("distillation.teacher_models.*.model_path")]
    is_by_source = draft.get("distillation.teacher_key", BY_SOURCE) == BY_SOURCE
    return is_by_source and len(several) > 1 and all(draft.get(f"{own}.key") is not None for own in several)
