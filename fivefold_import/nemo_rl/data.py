"""NeMo-RL's data and environments: its data sets by name, files of the user's own, and what judges the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fivefold.config.schema.data import PROMPT
from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold_import import reasons
from fivefold_import.agents import leave_open, limit_length
from fivefold_import.draft import Draft
from fivefold_import.files import FileText
from fivefold_import.settings import ask_as_user
from fivefold_import.values import number, positive, text, whole

PREPARE = (
    "NeMo-RL's code makes its rows: write them to a file, or read them with train_dataset.reader, and name it in "
    "train_dataset.path (docs/data.md)"
)
SPLIT = (
    "rows are held out by chance only where no file has them: drop valid_dataset, or write both to one file for "
    "valid_dataset.path"
)
GYM, MATH = "nemo_gym", "math"
GAMES = ("sliding_puzzle_game",)


@dataclass(frozen=True)
class Rows:
    """A data set of the hub that NeMo-RL knows by a name, and reads without changing its rows."""

    path: str
    split: str
    prompt: str
    answer: str | None
    """None: the ground truth is where Fivefold looks for it anyway."""


HUB: Mapping[str, Rows] = {
    "OpenMathInstruct-2": Rows("nvidia/OpenMathInstruct-2", "train_1M", "problem", "expected_answer"),
    "DeepScaler": Rows("agentica-org/DeepScaleR-Preview-Dataset", "train", "problem", "answer"),
    "DAPOMath17K": Rows("BytedTsinghua-SIA/DAPO-Math-17k", "train", "prompt", None),
    "DAPOMathAIME2024": Rows("BytedTsinghua-SIA/AIME-2024", "train", "prompt", None),
    "AIME2024": Rows("HuggingFaceH4/aime_2024", "train", "problem", "answer"),
    "AIME2026": Rows("MathArena/aime_2026", "train", "problem", "answer"),
    "gsm8k": Rows("openai/gsm8k:main", "train", "question", "answer"),
    "GSM8K": Rows("openai/gsm8k:main", "train", "question", "answer"),
}
GIVEN: Mapping[str, Mapping[str, str]] = {
    "HelpSteer3": {"path": "nvidia/HelpSteer3:preference", "reader": "fivefold.data.known:helpsteer3"},
    "Tulu3Preference": {"path": "allenai/llama-3.1-tulu-3-8b-preference-mixture"},
    "tulu3_sft_mixture": {"path": "allenai/tulu-3-sft-mixture", "messages_key": "messages"},
    "squad": {"path": "rajpurkar/squad", "reader": "fivefold.data.known:squad", "messages_key": "messages"},
}
"""Data sets with answers that NeMo-RL knows by a name, with Fivefold's keys of them."""
OF_PAIRS = ("HelpSteer3", "Tulu3Preference")
DIVIDED: Mapping[str, float] = {
    **dict.fromkeys(("OpenMathInstruct-2", "open_assistant", "tulu3_sft_mixture"), 0.05),
    **dict.fromkeys(("ResponseDataset", "NuminaMath-1.5", "OpenR1-Math-220k", "Nemotron-Cascade-2-SFT-Math"), 0.0),
    **dict.fromkeys(("arrow_text", "audiomcq", "avqa", "daily-omni", "mmpr-tiny", "general-conversation-jsonl"), 0.0),
}
"""Data sets whose rows NeMo-RL can divide, with the share that it holds out unless the source says otherwise."""
SECTIONS = {"data.train.": "train_dataset.", "data.validation.": "valid_dataset."}


def convert_data(draft: Draft) -> None:
    """Convert the data sets of training and evaluation."""
    for section, to in SECTIONS.items():
        if draft.keys(f"{section}0.*"):
            draft.all_unsupported(f"{section}*", "files of one form are listed in train_dataset.path: prepare them")
        elif draft.keys(f"{section}*"):
            _convert_set(draft, section, to)
    for key in draft.keys("data.*prompt_file"):
        if draft.get(key) is not None:
            _text_of_file(draft, key)
    if {"train_dataset.path", "train_dataset.prompt_key"} <= set(draft.recipe):
        ask_as_user(draft, "NeMo-RL")


def _text_of_file(draft: Draft, key: str) -> None:
    """Convert a file with the text around each prompt, or with the system's message."""
    _, section, name = key.rsplit(".", 2)
    to = "system_prompt" if name == "system_prompt_file" else "prompt_template"
    found = draft.get(key)
    if not isinstance(found, FileText):
        draft.unsupported(key, f"this file was not found: write its text into train_dataset.{to}")
        return
    try:
        text = found.content if to == "system_prompt" else found.content.format(PROMPT)
    except (IndexError, KeyError, ValueError) as error:
        draft.unsupported(key, f"its text is no text with one pair of braces ({error}): write train_dataset.{to}")
        return
    first, *others = [to_section for part, to_section in SECTIONS.items() if section in ("default", part.split(".")[1])]
    for other in others:
        if f"{other}path" in draft.recipe:
            draft.recipe.setdefault(f"{other}{to}", text)
    if f"{first}path" in draft.recipe:
        draft.mapped(key, f"{first}{to}", text)
    else:
        draft.implied(key, "the data set is yours to name")


def _convert_set(draft: Draft, section: str, to: str) -> None:
    name_key, path_key = f"{section}dataset_name", f"{section}data_path"
    name = draft.get(name_key, draft.get("data.default.dataset_name"))
    _division(draft, section, to, str(name))
    if draft.get(path_key) is not None:
        _own_file(draft, section, to, str(name))
    elif name in HUB and draft.schema is TrainRecipe:
        rows = HUB[str(name)]
        draft.sets(name_key, f"{to}path", rows.path)
        draft.sets(f"{section}split", f"{to}split", draft.get(f"{section}split", rows.split))
        draft.recipe[f"{to}prompt_key"] = rows.prompt
        if rows.answer is not None:
            draft.recipe[f"{to}answer_key"] = rows.answer
    elif name == "OpenMathInstruct-2" and draft.schema is SFTRecipe:
        rows = HUB[str(name)]
        draft.sets(name_key, f"{to}path", rows.path)
        draft.sets(f"{section}split", f"{to}split", draft.get(f"{section}split", rows.split))
        answers = draft.get(f"{section}output_key", rows.answer)
        draft.recipe[f"{to}prompt_key"] = rows.prompt
        draft.sets(f"{section}output_key", f"{to}response_key", answers)
    elif name in GIVEN and draft.schema in ((DPORecipe, RMRecipe) if name in OF_PAIRS else (SFTRecipe,)):
        draft.recipe |= {f"{to}{key}": value for key, value in GIVEN[str(name)].items() if key != "path"}
        draft.sets(name_key, f"{to}path", GIVEN[str(name)]["path"])
        draft.sets(f"{section}split", f"{to}split", draft.get(f"{section}split", "train"))
        if name == "HelpSteer3":
            draft.recipe[f"{to}apply_chat_template"] = True
    elif name is not None:
        draft.unsupported(name_key, PREPARE)
        draft.all_implied(f"{section}*", "the data set is yours to name")
    repeat = f"{section}repeat"
    if draft.get(repeat, 1) == 1 or to != "valid_dataset.":
        draft.implied(repeat, "prompts are read once")


def _division(draft: Draft, section: str, to: str, name: str) -> None:
    """Convert the rows that are held out by chance: a share of them, or a number. Not all data sets have them."""
    key = f"{section}split_validation_size"
    if name not in DIVIDED:
        draft.implied(key, f"NeMo-RL divides no rows of {name}")
        return
    if to == "train_dataset." and draft.schema is not TrainRecipe:
        draft.assume({key: DIVIDED[name]})
    if not draft.get(key):
        draft.implied(key, "all rows are trained on")
    elif to == "train_dataset." and not draft.keys("data.validation.*"):
        draft.mapped(key, "train_dataset.hold_out", number(draft.get(key)))
    else:
        draft.unsupported(key, SPLIT)


def _own_file(draft: Draft, section: str, to: str, name: str) -> None:
    """Convert a file of the user's, or a data set of the hub by its path."""
    path_key = f"{section}data_path"
    path = draft.read(path_key, text)
    subset = draft.get(f"{section}subset")
    draft.sets(path_key, f"{to}path", f"{path}:{subset}" if subset else path)
    draft.implied(f"{section}subset", f"{to}path names it")
    if draft.get(f"{section}split") is not None:
        draft.mapped(f"{section}split", f"{to}split", draft.get(f"{section}split"))
    columns = _columns(draft, name)
    if columns is None:
        draft.unsupported(f"{section}dataset_name", PREPARE)
    for column, (own, default) in (columns or {}).items():
        key = next((one for one in (section + own, f"data.default.{own}") if draft.writes(one)), section + own)
        draft.sets(key, f"{to}{column}", draft.read(key, text, default))
    draft.implied(f"{section}dataset_name", "train_dataset's keys name the columns")


def _columns(draft: Draft, name: str) -> dict[str, tuple[str, str]] | None:
    """Return the columns of a class of NeMo-RL's: Fivefold's key with NeMo-RL's and its default; None: not known."""
    if name == "NemoGymDataset":
        return {}
    if name == "openai_format":
        return {"messages_key": ("chat_key", "messages")} if draft.schema is SFTRecipe else None
    if name == "BinaryPreferenceDataset" and draft.schema in (DPORecipe, RMRecipe):
        return {f"{one}_key": (f"{one}_key", one) for one in ("prompt", "chosen", "rejected")}
    if name == "ResponseDataset" and draft.schema in (TrainRecipe, SFTRecipe):
        answer = "answer_key" if draft.schema is TrainRecipe else "response_key"
        return {"prompt_key": ("input_key", "input"), answer: ("output_key", "output")}
    return None


def convert_environment(draft: Draft, section: str) -> None:
    """Convert what judges the answers or plays the episodes.

    Args:
        draft: the conversion.
        section: `grpo.` or the like, which has the limits of an episode.
    """
    keys = ("data.train.env_name", "data.default.env_name")
    key = next((one for one in keys if draft.get(one) is not None), keys[1])
    name = str(draft.get(key, MATH))
    if name == GYM or draft.get("env.should_use_nemo_gym") is True:
        leave_open(draft, "agent")
        draft.unsupported(key, reasons.WRITE_AGENT)
        length = draft.get("policy.max_total_sequence_length")
        limit_length(draft, length if isinstance(length, int) else None, "policy.max_total_sequence_length")
    elif name in GAMES:
        leave_open(draft, "game")
        draft.unsupported(key, reasons.WRITE_GAME)
    elif name in (MATH, "dapo"):
        _math(draft, key)
    elif name == "reward_model":
        model = "env.reward_model.model_name"
        draft.sets(key, "reward.fn", "model")
        draft.sets(model, "reward.model.path", draft.read(model, text, "???"))
    else:
        draft.unsupported(key, f"what {name} judges is code of NeMo-RL's: write it as reward.fn=file.py:function")
    turns = f"{section}max_rollout_turns"
    if draft.get(turns) is not None and draft.read(turns, positive) > 1:
        draft.mapped(turns, "environment.max_turns", draft.read(turns, whole))


ANSWER = r"(?i)Answer\s*:\s*([^\n]+)"
"""What finds the answer by DAPO's rule."""


def _math(draft: Draft, key: str) -> None:
    """Convert the judge of mathematics: math-verify, or a rule of DAPO's."""
    name = str(draft.get(key, MATH))
    at = f"env.{name}."
    how, kind = draft.get(f"{at}math_verify_impl", "hf_math_verify"), draft.get(f"{at}verifier_type", "math")
    if how == "hf_math_verify" and kind == "math":
        draft.sets(key, "reward.fn", "math", "by math-verify")
        for one in (f"{at}math_verify_impl", f"{at}verifier_type"):
            draft.mapped(one, "reward.fn", "math", "by math-verify")
        return
    draft.implied(key, f"{at}* says how answers are judged")
    if kind != "math":
        draft.unsupported(f"{at}verifier_type", f"the verifier {kind!r} is not offered: write it as reward.fn")
    draft.implied(f"{at}verifier_type", "it is the verifier of mathematics")
    if how == "dapo_math_verify" and kind == "math":
        draft.recipe |= {"reward.kwargs.pattern": ANSWER, "reward.kwargs.minerva": True}
        note = "DAPO's rule: the text after the last `Answer:`, of the whole response and not of its end alone"
        draft.mapped(f"{at}math_verify_impl", "reward.fn", "exact_match", note)
    elif how != "hf_math_verify":
        draft.unsupported(f"{at}math_verify_impl", f"the verifier {how!r} is not offered: write it as reward.fn")
    draft.implied(f"{at}math_verify_impl", "it is math-verify")
