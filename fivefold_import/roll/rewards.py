"""ROLL's rewards: rules, code, judges, and models with a head for a score."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fivefold_import import reasons
from fivefold_import.draft import Draft
from fivefold_import.files import FileText
from fivefold_import.roll.layout import lay_out_engine, lay_out_frozen
from fivefold_import.roll.rules import DOMAINS
from fivefold_import.values import DTYPE, number, positive, top_k

READER = "fivefold.data.roll:rows"
RULES: Mapping[str, str] = {
    "MathRule": "math",
    "CrossThinkQA": "choice",
    "GeneralVal": "choice",
    "MultipleChoiceBoxed": "choice",
    "GeneralRuleReward": "instructions",
    "CodeSandbox": "code",
    "DetectionReward": "detection",
}
"""Parts of the names of workers whose rewards ship with Fivefold."""
REPETITIONS: Mapping[str, float] = {"CrossThinkQA": 0.5, "GeneralRuleReward": 0.5}
"""Workers that take off so much for words that are repeated all the time."""
GRADED = ("right", "right_unboxed", "wrong", "wrong_unboxed")
GRADES: Mapping[Any, Sequence[float]] = {
    "soft": (1.0, 0.5, -0.5, -1.0),
    "loose": (1.0, 1.0, -1.0, -1.0),
    "strict": (1.0, -1.0, -1.0, -1.0),
}
"""Rewards of a choice by `reward_type`."""
SECONDS = 20
"""Time limit of a test of a program."""
IMPORTED = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
"""Modules of the standard library that each program has, by their own names and by those that they define."""
PREAMBLE = "\n".join(
    [
        "; ".join(f"from {name} import *" for name in IMPORTED),
        f"import {', '.join(IMPORTED)}",
        "sys.setrecursionlimit(600_000)",
    ]
)
IN_PIXELS = re.compile(r"qwen2\.5-vl", re.IGNORECASE)
"""Names of models that say where objects are in pixels."""
PIXELS_PER_TOKEN = 28
IN_SANDBOX = "the sandbox of the driver's machine runs the programs"
SCORING = ("format_pattern", "response_length_penalty_coef", "reward_type")
"""Keys of a reward that change it."""
HOSTING = ("world_size", "infer_batch_size", "device_mapping", "model_args", "strategy_args", "data_args")
"""The keys of a reward that say where it runs."""
SHARED_JUDGE = "reward_model."
"""The section of a judge that several rewards ask."""
SCORED = ("auto_sequence_classification", "auto_token_classification", "trl")
"""Values of `model_type` for models that score a text."""


def convert_rewards(draft: Draft) -> None:
    """Convert the rewards: one becomes `reward.fn`, one for each domain become `reward.rewards`."""
    if _is_scored(draft, "reward."):
        _score_model(draft, "reward.", "reward.")
    names = sorted({key.split(".")[1] for key in draft.keys("rewards.*")})
    repeats = {name: weight for name in names if (weight := _repetition(draft, f"rewards.{name}."))}
    is_several = len(names) > 1 or bool(repeats)
    if is_several:
        _domains(draft, names)
    for name in names:
        to = f"reward.rewards.{name}." if is_several else "reward."
        if _reward(draft, f"rewards.{name}.", to) and is_several:
            draft.recipe[f"{to}data_sources"] = [name]
    for weight in sorted(set(repeats.values())):
        own = "reward.rewards.repetition" if len(set(repeats.values())) == 1 else f"reward.rewards.repetition{weight}"
        domains = [name for name in names if repeats.get(name) == weight]
        draft.recipe |= {f"{own}.fn": "repetition", f"{own}.weight": weight, f"{own}.data_sources": domains}
        draft.notes.append(f"{own}: ROLL's workers of {' and '.join(domains)} take this off for repeated words")


def _domains(draft: Draft, names: Sequence[str]) -> None:
    """Let the rows' tags become data sources, which ROLL calls domains: the names of the rewards."""
    tags = {name: f"rewards.{name}.tag_included" for name in names}
    for key in [key for key in tags.values() if draft.writes(key) and not isinstance(draft.get(key), list)]:
        draft.unsupported(key, f"{draft.get(key)!r} is not a list of tags")
    lists = {name: draft.get(key) for name, key in tags.items() if isinstance(draft.get(key), list)}
    domains = {str(tag): name for name, own in lists.items() for tag in own}
    draft.recipe |= {"train_dataset.reader": READER, DOMAINS: domains}
    for key in filter(draft.writes, tags.values()):
        draft.mapped(key, DOMAINS, domains, f"{READER} reads ROLL's rows: the domain of the tag is the data source")


def _repetition(draft: Draft, own: str) -> float | None:
    """Return what a worker takes off, at most, for repeated words."""
    worker = str(draft.get(f"{own}worker_cls", ""))
    return next((most for name, most in REPETITIONS.items() if name in worker), None)


def _reward(draft: Draft, own: str, to: str) -> bool:
    """Convert one reward; return whether it has a counterpart.

    Args:
        draft: the conversion.
        own: beginning of its keys in the source.
        to: beginning of its keys in the recipe.
    """
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
    return _rule(draft, own, to)


def _rule(draft: Draft, own: str, to: str) -> bool:
    """Convert a reward that no model gives; return whether it has a counterpart."""
    worker, kind = f"{own}worker_cls", str(draft.get(f"{own}worker_cls", ""))
    fn = next((fn for name, fn in RULES.items() if name in kind), None)
    if fn is not None:
        draft.mapped(worker, f"{to}fn", fn)
    if fn == "choice":
        _graded(draft, own, to)
        if "MultipleChoiceBoxed" in kind:
            draft.recipe[f"{to}kwargs.right_unboxed"] = 0.0
    elif fn == "code":
        draft.recipe |= {f"{to}kwargs.timeout_s": SECONDS, f"{to}kwargs.preamble": PREAMBLE}
        for key in ("use_local", "code_url"):
            draft.implied(f"{own}{key}", IN_SANDBOX)
        if draft.get(f"{own}use_local") is not True:
            draft.notes.append(f"{to}fn=code: ROLL sends programs to a service; here, {IN_SANDBOX}")
    elif fn == "detection":
        _boxes(draft, own, to)
    elif fn == "instructions":
        draft.implied(f"{own}reward_type", "an instruction is followed or not")
    for key in draft.keys(f"{own}query_filter_config.*"):
        if draft.get(f"{own}query_filter_config.type", "no_filter") != "no_filter":
            draft.unsupported(key, "actor.dynamic_sampling replaces prompts whose responses all have one reward")
    for key in draft.keys(f"{own}*"):
        name = key.removeprefix(own)
        if name in SCORING or (fn is None and not name.startswith(HOSTING)):
            draft.unsupported(key, f"write this reward as {to}fn=module:function")
    return fn is not None


def _boxes(draft: Draft, own: str, to: str) -> None:
    """Convert in which unit a model says where objects are; how the boxes of a row are scored is in the row."""
    model = str(draft.get(f"{own}model_args.model_name_or_path", draft.get("pretrain", "")))
    if IN_PIXELS.search(model):
        draft.recipe[f"{to}kwargs.pixels_per_token"] = PIXELS_PER_TOKEN
    draft.notes.append(
        f"{to}fn=detection scores boxes as ROLL's worker does, by each row's det_reward_ratio; where that has "
        "iou_max_iou_first, the greatest overlaps are pairs: ROLL's loop takes the last two boxes that are left"
    )


def _graded(draft: Draft, own: str, to: str) -> None:
    """Convert how a choice is graded, with or without a box, and a penalty for its length."""
    kind, length = f"{own}reward_type", f"{own}response_length_penalty_coef"
    if draft.get(kind) in GRADES:
        for name, value in zip(GRADED, GRADES[draft.get(kind)], strict=True):
            draft.recipe[f"{to}kwargs.{name}"] = value
        draft.mapped(kind, f"{to}kwargs.right", GRADES[draft.get(kind)][0], "with the rewards of other answers")
    if not draft.get(length):
        draft.implied(length, "it is 0")


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
    _judges_question(draft, own, to)


def _judges_question(draft: Draft, own: str, to: str) -> None:
    """Convert the question to a judge, whose text ROLL's code has: all answers but yes count as no."""
    key, question = f"{own}judge_prompt", draft.get(f"{own}judge_prompt")
    if isinstance(question, FileText):
        text = question.content.replace("{reference}", "{ground_truth}").replace("{{", "{").replace("}}", "}")
        draft.recipe |= {
            f"{to}kwargs.words": {"yes": 1, "no": 0},
            f"{to}kwargs.retries": 0,
            f"{to}kwargs.on_failure": 0,
        }
        draft.mapped(key, f"{to}kwargs.template", text, "the text of this name in ROLL's code")
    elif draft.writes(key):
        draft.unsupported(key, reasons.OWN_QUESTION)
    else:
        draft.notes.append(
            f"{to}fn=judge asks whether the answer agrees with the reference; ROLL asks without judge_prompt for a "
            f"score, and looks for yes or no: write the question as {to}kwargs.template"
        )


def _is_hosted(draft: Draft, own: str) -> bool:
    """Return whether a reward is a judge in ROLL's own processes, the first of its kind: a run hosts one."""
    path = draft.get(f"{_host(draft, own)}model_args.model_name_or_path")
    is_first = draft.recipe.get("reward.judge.path", path) == path
    return draft.get(f"{own}judge_model_type") in ("inference", "cluster") and path is not None and is_first


def _host(draft: Draft, own: str) -> str:
    """Return the section that has the model and the devices of a reward's judge: its own, or what rewards share."""
    return SHARED_JUDGE if draft.get(f"{own}judge_model_type") == "cluster" else own


def _hosted_judge(draft: Draft, own: str, to: str) -> None:
    host = _host(draft, own)
    path, dtype = f"{host}model_args.model_name_or_path", f"{host}model_args.dtype"
    draft.sets(f"{own}worker_cls", f"{to}fn", "judge", "the score that reward.judge writes")
    draft.implied(f"{own}judge_model_type", "without kwargs.base_url, the run hosts the judge")
    draft.sets(path, "reward.judge.path", draft.get(path))
    if draft.writes(dtype):
        draft.mapped(dtype, "reward.judge.dtype", draft.read(dtype, DTYPE))
    options = (("max_new_tokens", "max_tokens", positive), ("temperature", "temperature", number))
    for key, name, convert in (*options, ("top_p", "top_p", number), ("top_k", "top_k", top_k)):
        if draft.writes(written := f"{own}generating_args.{key}"):
            draft.mapped(written, f"{to}kwargs.{name}", draft.read(written, convert))
    for key in draft.keys(f"{own}generating_args.*"):
        if key.endswith(("num_beams", "num_return_sequences")) and draft.get(key) == 1:
            draft.implied(key, "a judge gives one answer")
        draft.unsupported(key, f"a judge samples with temperature, top_p and top_k of {to}kwargs")
    _judges_question(draft, own, to)
    draft.implied(f"{own}data_args.template", "the judge's own chat template renders the question")
    plan = lay_out_engine(draft, "judge", host) if "judge" not in draft.plans else draft.plans["judge"]
    for key in draft.keys(f"{host}generating_args.*"):
        if draft.get(key) != draft.get(key.replace(host, own)):
            draft.unsupported(key, f"a judge samples with {to}kwargs, which {own}generating_args say")
    for key in (*draft.keys(f"{own}*"), *draft.keys(f"{host}*")):
        if key != f"{own}tag_included" and key not in plan.keys:
            draft.implied(key, reasons.JUDGE_HOSTED)


def _judges_with_a_model(draft: Draft, own: str) -> bool:
    """Return whether a reward comes from a model: one that judges, or one that has devices."""
    signs = ("judge_*", "strategy_args*", "generating_args*")
    is_placed = draft.writes(own + "device_mapping")
    return is_placed or "Judge" in str(draft.get(own + "worker_cls", "")) or any(draft.keys(own + s) for s in signs)
