"""Environments of GEM that Fivefold has too: a guessing game, and reasoning-gym's problems."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import.draft import Draft
from fivefold_import.roll.games import (
    ENVS,
    HELD_OUT_ENVS,
    HELD_OUT_SEED,
    MEMORY,
    MOST_ROWS,
    TRAIN_ENVS,
    sampling,
)
from fivefold_import.roll.single_turns import limits_held_out
from fivefold_import.values import positive, whole

GUESSING = "game:GuessTheNumber-v0"
PROBLEMS = "rg:"
GAME, GAME_READER = (f"fivefold.environments.games.guess_number:{name}" for name in ("GuessNumber", "rows"))
READER, REWARD = (f"fivefold.environments.others.reasoning_gym:{name}" for name in ("read", "score"))
MANAGER = ".StepConcatEnvManager"
PAST, OBSERVATION = "{history}\n", "{current_observation}"
KEYS: Mapping[str, str] = {"min_number": "least", "max_number": "most", "max_turns": "turns"}


def only_tag(draft: Draft) -> str | None:
    """Return the beginning of the keys of the one environment that is trained on and evaluated; None of several."""
    tags = {str(tag) for section in (TRAIN_ENVS, HELD_OUT_ENVS) for tag in draft.get(f"{section}tags") or ()}
    return f"{ENVS}{tags.pop()}." if len(tags) == 1 else None


def _kind(draft: Draft) -> str:
    own = only_tag(draft)
    is_played = own is not None and str(draft.get(f"{own}env_manager_cls")).endswith(MANAGER)
    return str(draft.get(f"{own}env_type")) if is_played and not draft.keys(f"{own}tool_wrapper.*") else ""


def guesses(draft: Draft) -> bool:
    """Return whether the guessing game is played, with all earlier turns in each."""
    own = only_tag(draft)
    if own is None or _kind(draft) != GUESSING:
        return False
    turns, kept = draft.get(f"{own}max_steps"), draft.get(f"{own}history_length")
    has_all = isinstance(turns, int) and isinstance(kept, int) and kept >= turns
    return has_all and PAST + OBSERVATION in str(draft.get(f"{own}agent_template"))


def solves(draft: Draft) -> bool:
    """Return whether reasoning-gym's problems are solved, each with one answer."""
    own = only_tag(draft)
    is_single = draft.get(f"{own}max_steps") == 1 and OBSERVATION in str(draft.get(f"{own}agent_template"))
    return _kind(draft).startswith(PROBLEMS) and is_single


def convert_guessing(draft: Draft, prompts: int) -> None:
    """Convert the guessing game, with `prompts` games in a step, and its chats, one for each turn."""
    own = str(only_tag(draft))
    n, seed = prompts * draft.read("max_steps", whole, 500), draft.read("seed", whole, 42)
    source = own.split(".")[1]
    options = {to: value for name, to in KEYS.items() if (value := draft.get(f"{own}env_config.{name}")) is not None}
    sections = {"train_dataset.": (min(n, MOST_ROWS), seed)}
    if isinstance(draft.get(f"{HELD_OUT_ENVS}tags"), list):
        sections["valid_dataset."] = draft.read(f"{HELD_OUT_ENVS}num_env_groups", positive, 128), seed + HELD_OUT_SEED
        draft.mapped(f"{HELD_OUT_ENVS}num_env_groups", "valid_dataset.reader_kwargs.n", sections["valid_dataset."][0])
    for to, (n_rows, first) in sections.items():
        draft.recipe |= {f"{to}path": source, f"{to}reader": GAME_READER}
        draft.recipe |= {f"{to}reader_kwargs.{key}": value for key, value in options.items()}
        draft.recipe |= {f"{to}reader_kwargs.n": n_rows, f"{to}reader_kwargs.seed": first}
    for name, key in KEYS.items():
        draft.mapped(f"{own}env_config.{name}", f"train_dataset.reader_kwargs.{key}", options.get(key))
    for key in ("tags", "num_groups_partition"):
        for section in (TRAIN_ENVS, HELD_OUT_ENVS):
            draft.implied(f"{section}{key}", "one game is played")
    template = str(draft.get(f"{own}agent_template")).replace(PAST + OBSERVATION, "{prompt}\n{observation}")
    draft.recipe[MEMORY] = 0
    draft.mapped(f"{own}env_type", "environment.game", GAME)
    draft.mapped(f"{own}agent_template", "environment.turn_template", unescaped(template))
    draft.implied(f"{own}history_length", "an observation has all hints so far")
    _of_chat(draft, own, "each turn is a separate chat")
    sampling(draft)
    draft.notes.append(
        "environment.game is Fivefold's own guessing game: rewards and ends are GEM's, the words are others, and a "
        "turn shows the hints so far without the earlier invitations to guess"
    )


def convert_problems(draft: Draft) -> None:
    """Convert a data set of reasoning-gym and its reward."""
    own = str(only_tag(draft))
    config = f"{own}env_config."
    name = _kind(draft).removeprefix(PROBLEMS)
    draft.mapped(f"{own}env_type", "train_dataset.path", name)
    draft.recipe |= {"reward.fn": REWARD, "reward.kwargs.boxed": True}
    options = {key.removeprefix(config): draft.get(key) for key in draft.keys(f"{config}*")}
    options |= {"n": options.pop("size", 500), "seed": options.pop("seed", 42)}
    template = unescaped(str(draft.get(f"{own}agent_template")).replace(OBSERVATION, "{prompt}"))
    sections = ["train_dataset.", "valid_dataset."] if limits_held_out(draft) else ["train_dataset."]
    for to in sections:
        draft.recipe |= {f"{to}path": name, f"{to}reader": READER, f"{to}prompt_template": template}
        draft.recipe |= {f"{to}reader_kwargs.{key}": value for key, value in options.items()}
        draft.recipe[f"{to}apply_chat_template"] = True
    for key in draft.keys(f"{config}*"):
        to = key.removeprefix(config)
        draft.mapped(key, f"train_dataset.reader_kwargs.{'n' if to == 'size' else to}", draft.get(key))
    draft.mapped(f"{own}agent_template", "train_dataset.prompt_template", template)
    for key in ("max_steps", "history_length"):
        draft.implied(f"{own}{key}", "an answer ends the episode")
    _of_chat(draft, own, "an answer ends the episode")
    sampling(draft)


def _of_chat(draft: Draft, own: str, why: str) -> None:
    system = draft.get(f"{own}agent_system_template")
    if system is not None:
        draft.mapped(f"{own}agent_system_template", "train_dataset.system_prompt", system)
        draft.recipe["train_dataset.system_prompt"] = system
    draft.implied(f"{own}agent_system_template", "there is no message of the system")
    draft.implied(f"{own}env_manager_cls", why)


def unescaped(template: str) -> str:
    """Return a template of ROLL's with braces as Fivefold writes them."""
    return template.replace("{{", "{").replace("}}", "}")
