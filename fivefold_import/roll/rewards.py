"""ROLL's rewards: rules, code, judges, and models with a head for a score."""

from __future__ import annotations

from fivefold_import import reasons
from fivefold_import.draft import Draft
from fivefold_import.roll.layout import lay_out_engine, lay_out_frozen
from fivefold_import.values import DTYPE, number, positive

HOSTING = ("world_size", "infer_batch_size", "device_mapping", "model_args", "strategy_args", "data_args")
"""The keys of a reward that say where it runs."""
SCORED = ("auto_sequence_classification", "auto_token_classification", "trl")
"""Values of `model_type` for models that score a text."""


def convert_rewards(draft: Draft) -> None:
    """Convert the rewards: one becomes `reward.fn`, one for each domain become `reward.rewards`."""
    if _is_scored(draft, "reward."):
        _score_model(draft, "reward.", "reward.")
    names = sorted({key.split(".")[1] for key in draft.keys("rewards.*")})
    for name in names:
        to = f"reward.rewards.{name}." if len(names) > 1 else "reward."
        if _reward(draft, f"rewards.{name}.", to) and len(names) > 1:
            tags = f"rewards.{name}.tag_included"
            draft.mapped(tags, f"{to}data_sources", draft.get(tags), "rows name them in the column data_source")


def _reward(draft: Draft, own: str, to: str) -> bool:
    """Convert one reward; return whether it has a counterpart.

    Args:
        draft: the conversion.
        own: beginning of its keys in the source.
        to: beginning of its keys in the recipe.
    """
    worker = str(draft.get(f"{own}worker_cls", ""))
    if _is_behind_url(draft, own):
        _judge_behind_url(draft, own, to)
        return True
    if _is_hosted(draft, own):
        _hosted_judge(draft, own, to)
        return True
    if _is_scored(draft, own):
        _score_model(draft, own, to)
        return True
    if _judges_with_a_model(draft, own):
        draft.all_unsupported(f"{own}*", reasons.NO_REWARD_MODEL)
        return False
    hosting = tuple(own + part for part in HOSTING)
    if "MathRule" in worker:
        draft.mapped(f"{own}worker_cls", f"{to}fn", "math")
        instead = f"write it in {to}fn=module:function"
    elif "CodeSandbox" in worker:
        instead = f"write {to}fn=code, and the rows' tests in its form (docs/rewards.md)"
    else:
        instead = f"write this reward as {to}fn=module:function"
    for key in draft.keys(f"{own}query_filter_config.*"):
        if draft.get(f"{own}query_filter_config.type", "no_filter") != "no_filter":
            draft.unsupported(key, "actor.dynamic_sampling replaces prompts whose responses all have one reward")
    for key in draft.keys(f"{own}*"):
        is_scoring = key.removeprefix(own) in ("format_pattern", "response_length_penalty_coef", "reward_type")
        if is_scoring or ("MathRule" not in worker and not key.startswith(hosting)):
            draft.unsupported(key, instead)
    return "MathRule" in worker


def _is_scored(draft: Draft, own: str) -> bool:
    """Return whether a reward is the score of a model with a head for it, and not a judgement that a model writes."""
    is_judged = "Judge" in str(draft.get(f"{own}worker_cls", "")) or bool(draft.keys(f"{own}judge_*"))
    return (
        not is_judged
        and draft.get(f"{own}model_args.model_type") in SCORED
        and draft.writes(f"{own}model_args.model_name_or_path")
    )


def _score_model(draft: Draft, own: str, to: str) -> None:
    path, dtype = f"{own}model_args.model_name_or_path", f"{own}model_args.dtype"
    draft.mapped(f"{own}model_args.model_type", f"{to}fn", "model", "the score of reward.model")
    draft.mapped(path, "reward.model.path", draft.get(path))
    if draft.writes(dtype):
        draft.mapped(dtype, "reward.model.dtype", draft.read(dtype, DTYPE))
    if draft.get(f"{own}model_args.num_labels", 1) != 1:
        draft.unsupported(f"{own}model_args.num_labels", "a reward model has one label, its score")
    plan = lay_out_frozen(draft, "reward", own)
    otherwise = "the reward model is laid out as the actor, on its devices: change reward.model.backend"
    for key in draft.keys(f"{own}*"):
        if key != f"{own}tag_included" and (plan is None or key not in plan.keys):
            draft.implied(key, otherwise if plan is None else "reward.model has its model, layout, dtype and batches")


def _is_behind_url(draft: Draft, own: str) -> bool:
    """Return whether a reward is a judge behind a known URL with a known model."""
    known = all(draft.writes(own + key) for key in ("judge_api_url", "judge_model_name"))
    return known and draft.get(f"{own}judge_model_type") == "api" and not draft.writes(f"{own}device_mapping")


def _judge_behind_url(draft: Draft, own: str, to: str) -> None:
    url = str(draft.get(f"{own}judge_api_url")).rstrip("/").removesuffix("/chat/completions")
    draft.mapped(f"{own}worker_cls", f"{to}fn", "judge")
    draft.mapped(f"{own}judge_api_url", f"{to}kwargs.base_url", url)
    draft.mapped(f"{own}judge_model_name", f"{to}kwargs.model", draft.get(f"{own}judge_model_name"))
    draft.implied(f"{own}judge_model_type", "the judge is behind a URL")
    draft.unsupported(f"{own}judge_api_key", f"export the key, and name its variable in {to}kwargs.api_key_env")
    draft.unsupported(f"{own}judge_prompt", f"write the prompt as {to}kwargs.template")


def _is_hosted(draft: Draft, own: str) -> bool:
    """Return whether a reward is a judge in ROLL's own processes, the first of its kind: a run hosts one."""
    path = draft.get(f"{own}model_args.model_name_or_path")
    is_first = draft.recipe.get("reward.judge.path", path) == path
    return draft.get(f"{own}judge_model_type") == "inference" and path is not None and is_first


def _hosted_judge(draft: Draft, own: str, to: str) -> None:
    path, dtype = f"{own}model_args.model_name_or_path", f"{own}model_args.dtype"
    draft.sets(f"{own}worker_cls", f"{to}fn", "judge", "the score that reward.judge writes")
    draft.implied(f"{own}judge_model_type", "without kwargs.base_url, the run hosts the judge")
    draft.sets(path, "reward.judge.path", draft.get(path))
    if draft.writes(dtype):
        draft.mapped(dtype, "reward.judge.dtype", draft.read(dtype, DTYPE))
    for key, name, convert in (("max_new_tokens", "max_tokens", positive), ("temperature", "temperature", number)):
        if draft.writes(written := f"{own}generating_args.{key}"):
            draft.mapped(written, f"{to}kwargs.{name}", draft.read(written, convert))
    for key in draft.keys(f"{own}generating_args.*"):
        draft.unsupported(key, f"a judge samples with {to}kwargs.temperature alone")
    draft.unsupported(f"{own}judge_prompt", reasons.OWN_QUESTION)
    draft.implied(f"{own}data_args.template", "the judge's own chat template renders the question")
    plan = lay_out_engine(draft, "judge", own) if "judge" not in draft.plans else draft.plans["judge"]
    for key in draft.keys(f"{own}*"):
        if key != f"{own}tag_included" and key not in plan.keys:
            draft.implied(key, reasons.JUDGE_HOSTED)
    draft.notes.append(
        f"{to}fn=judge asks whether the answer agrees with the reference; ROLL asks for a score from 0 to 10, and "
        f"takes a tenth of it: for that, write the question as {to}kwargs.template, with {to}kwargs.scale=0.1"
    )


def _judges_with_a_model(draft: Draft, own: str) -> bool:
    """Return whether a reward comes from a model: one that judges, or one that has devices."""
    signs = ("judge_*", "strategy_args*", "generating_args*")
    is_placed = draft.writes(own + "device_mapping")
    return is_placed or "Judge" in str(draft.get(own + "worker_cls", "")) or any(draft.keys(own + s) for s in signs)
