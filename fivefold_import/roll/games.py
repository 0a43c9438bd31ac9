"""ROLL's games on a board, FrozenLake and Sokoban, which Fivefold has too: their tasks are rows made by a seed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fivefold_import.agents import MAX_TURNS
from fivefold_import.draft import Draft
from fivefold_import.values import number, positive, top_k, whole

ENVS, TRAIN_ENVS, HELD_OUT_ENVS = "custom_envs.", "train_env_manager.", "val_env_manager."
GENERATING = "actor_infer.generating_args."
OPTIONS: Mapping[str, Sequence[str]] = {
    "frozen_lake": ("size", "p", "is_slippery"),
    "sokoban": ("dim_room", "num_boxes", "search_depth"),
}
"""Games by `env_type`, with the options that both have under the same names."""
KEYS: Mapping[str, str] = {
    "action_pattern": "move_pattern",
    "format_penalty": "format_penalty",
    "env_instruction": "rules",
}
FIELDS: Mapping[str, str] = {
    "observation": "observation",
    "turn_idx": "turn",
    "actions_left": "turns_left",
    "max_response_length": "max_new_tokens",
}
"""What the template of a turn can show, if an episode is one chat."""
FIELDS_OF_STEPS: Mapping[str, str] = {
    "env_instruction": "prompt",
    "history": "history",
    "current_observation": "observation",
    "current_step": "turn",
    "step_count": "turns_done",
    "history_length": "turns_shown",
    "max_response_length": "max_new_tokens",
}
"""What it can show, if each turn is a separate chat."""
MANAGERS: Mapping[str, Mapping[str, str]] = {
    "TrajEnvManager": FIELDS,
    "ProxyEnvManager": FIELDS,
    "StepEnvManager": FIELDS_OF_STEPS,
}
"""The managers of episodes that Fivefold plays too, with their fields."""
RUNNER = "GEMRunner"
"""The runner with which `ProxyEnvManager` plays a game in one chat."""
MOST_ROWS = 100_000
"""Most tasks of training; each is played again after so many."""
HELD_OUT_SEED = 1_000_000_000
"""Added to the seed of the tasks that are evaluated."""
MEMORY = "environment.memory"
GAME, READER = "fivefold.environments.games.grid:GridGame", "fivefold.environments.games.rows:rows"


def are_known(draft: Draft) -> bool:
    """Return whether all games of the source are known, and are played in chats of one form."""
    tags = _tags(draft) if isinstance(draft.get(f"{TRAIN_ENVS}tags"), list) else []
    names = ("agent_system_template", "agent_template", "env_manager_cls", "history_length")
    forms = {tuple(draft.get(f"{ENVS}{tag}.{name}") for name in names) for tag in tags}
    if len(forms) != 1:
        return False
    known = MANAGERS.get(_manager(draft, tags[0]), {})
    shown = set(re.findall(r"\{(\w*)\}", str(draft.get(f"{ENVS}{tags[0]}.agent_template"))))
    return (
        shown <= known.keys()
        and "observation" in {known[field] for field in shown}
        and all(draft.get(f"{ENVS}{tag}.env_type") in OPTIONS for tag in tags)
        and all(_is_played_in_a_chat(draft, tag) for tag in tags)
    )


def _is_played_in_a_chat(draft: Draft, tag: str) -> bool:
    runner = str(draft.get(f"{ENVS}{tag}.agent_runner_cls", "")).rpartition(".")[2]
    return runner == (RUNNER if _manager(draft, tag) == "ProxyEnvManager" else "")


def _manager(draft: Draft, tag: str) -> str:
    return str(draft.get(f"{ENVS}{tag}.env_manager_cls", "")).rpartition(".")[2]


def convert_games(draft: Draft, prompts: int) -> None:
    """Convert the games, with `prompts` tasks in a step, and how they are evaluated."""
    draft.recipe |= {"environment.game": GAME, "train_dataset.path": "games", "train_dataset.reader": READER}
    sampling(draft)
    n = prompts * draft.read("max_steps", whole, 500)
    if n > MOST_ROWS:
        draft.notes.append(f"train_dataset has {MOST_ROWS} tasks, which come again: ROLL makes {n} of them")
    _rows(draft, TRAIN_ENVS, "train_dataset.", min(n, MOST_ROWS), draft.read("seed", whole, 42))
    if isinstance(draft.get(f"{HELD_OUT_ENVS}tags"), list):
        groups = draft.read(f"{HELD_OUT_ENVS}num_env_groups", positive, 128)
        draft.recipe |= {"valid_dataset.path": "games", "valid_dataset.reader": READER}
        _rows(draft, HELD_OUT_ENVS, "valid_dataset.", groups, draft.read("seed", whole, 42) + HELD_OUT_SEED)
    for tag in _tags(draft):
        _chat(draft, f"{ENVS}{tag}.", MANAGERS[_manager(draft, tag)])
    draft.notes.append(
        "FrozenLake and Sokoban are Fivefold's own games: symbols and rewards are ROLL's, the rules have other "
        "words unless env_instruction has them, and boards of the same kind are drawn otherwise"
    )


def _tags(draft: Draft) -> list[str]:
    """Return the names of the environments that are trained on or evaluated."""
    found = [draft.get(f"{section}tags") for section in (TRAIN_ENVS, HELD_OUT_ENVS)]
    return list(dict.fromkeys(str(tag) for tags in found if isinstance(tags, list) for tag in tags))


def _rows(draft: Draft, section: str, to: str, n: int, seed: int) -> None:
    """Convert the tasks of a section: each game's share of `n`."""
    found = draft.get(f"{section}tags")
    tags = [str(tag) for tag in found] if isinstance(found, list) else []
    shares = draft.get(f"{section}num_groups_partition")
    known = isinstance(shares, list) and len(shares) == len(tags) and all(isinstance(each, int) for each in shares)
    parts = dict(zip(tags, shares if known else [1] * len(tags), strict=True))
    total = sum(parts.values()) or 1
    key = f"{to}reader_kwargs.games"
    games = draft.recipe[key] = {
        tag: {"n": max(1, n * part // total), **_game(draft, tag)} for tag, part in parts.items()
    }
    draft.recipe[f"{to}reader_kwargs.seed"] = seed
    if section == TRAIN_ENVS and len(tags) > 1:
        draft.recipe["train_dataset.source_weights"] = parts
    for name in ("tags", "num_groups_partition"):
        draft.mapped(f"{section}{name}", key, games, "tasks of each game")
    if section == HELD_OUT_ENVS:
        draft.mapped(f"{section}num_env_groups", key, games, "tasks of each game")
    for tag in tags:
        for own in draft.keys(f"{ENVS}{tag}.env_config.*"):
            name = own.split(".env_config.")[1].partition(".")[0]
            if name in (*KEYS, *OPTIONS[str(draft.get(f"{ENVS}{tag}.env_type"))], "grid_lookup", "grid_vocab"):
                draft.mapped(own, key, games)
            elif name == "max_steps" and draft.get(own) == draft.get(f"{ENVS}{tag}.max_steps"):
                draft.implied(own, f"{MAX_TURNS} ends an episode")
        draft.mapped(f"{ENVS}{tag}.env_type", key, games)


def _game(draft: Draft, tag: str) -> dict[str, Any]:
    """Return what a row says of a game."""
    own, kind = f"{ENVS}{tag}.env_config.", str(draft.get(f"{ENVS}{tag}.env_type"))
    options = {name: value for name in OPTIONS[kind] if (value := draft.get(f"{own}{name}")) is not None}
    symbols = [draft.get(key) for key in draft.keys(f"{own}grid_lookup.*")]
    if symbols:
        meanings = {symbol: draft.get(f"{own}grid_vocab.{symbol}", "") for symbol in map(str, symbols)}
        meanings |= {
            key.removeprefix(f"{own}grid_vocab."): draft.get(key)
            for key in draft.keys(f"{own}grid_vocab.*")
            if key.removeprefix(f"{own}grid_vocab.") in meanings
        }
        options["symbols"] = meanings
    texts = {to: value for name, to in KEYS.items() if (value := draft.get(f"{own}{name}")) is not None}
    return {"game": kind, **texts, **({"options": options} if options else {})}


def _chat(draft: Draft, own: str, fields: Mapping[str, str]) -> None:
    """Convert the form of a game's chat, or of the chats of its turns."""
    template = str(draft.get(f"{own}agent_template"))
    turn = re.sub(r"\{(\w+)\}", lambda match: f"{{{fields[match[1]]}}}", template)
    if fields is FIELDS_OF_STEPS:
        _memory(draft, own, turn)
    draft.mapped(f"{own}agent_template", "environment.turn_template", turn)
    draft.mapped(f"{own}agent_system_template", "train_dataset.system_prompt", draft.get(f"{own}agent_system_template"))
    for name, to in (("max_steps", MAX_TURNS), ("max_tokens_per_step", "gconfig.max_new_tokens")):
        if draft.get(f"{own}{name}") == draft.recipe.get(to):
            draft.implied(f"{own}{name}", f"all games have {to}={draft.recipe.get(to)}")
    why = "an episode is one chat, whose tokens stay as they were sampled"
    if fields is FIELDS_OF_STEPS:
        why = f"{MEMORY} makes each turn a separate chat"
    draft.implied(f"{own}env_manager_cls", why)
    if draft.writes(f"{own}agent_runner_cls"):
        draft.implied(f"{own}agent_runner_cls", why)
        note = f"the rules of a game begin the user's first message: ROLL's {RUNNER} has them in the system's"
        draft.notes.extend([note] if note not in draft.notes else [])


def _memory(draft: Draft, own: str, turn: str) -> None:
    """Convert the turns that a turn shows: ROLL counts the one that is played among them."""
    length = draft.read(f"{own}history_length", whole, 1)
    draft.recipe[MEMORY] = max(0, length - 1) if "{history}" in turn else 0
    draft.mapped(f"{own}history_length", MEMORY, draft.recipe[MEMORY], "without the turn itself")
    note = (
        f"{MEMORY}={draft.recipe[MEMORY]}: a turn shows these turns whole; ROLL's StepEnvManager shows "
        "the ones alone whose answer had no move, with a warning"
    )
    if draft.recipe[MEMORY] and note not in draft.notes:
        draft.notes.append(note)


def sampling(draft: Draft) -> None:
    """Convert how moves are sampled: in training as in evaluation, unless only the managers say it."""
    of_all = bool(draft.keys(f"{GENERATING}*"))
    names = (("temperature", number), ("top_p", number), ("top_k", top_k))
    if draft.keys(f"{HELD_OUT_ENVS}*"):
        draft.recipe["evaluator.greedy"] = False
    for section, to in ((TRAIN_ENVS, "gconfig."), (HELD_OUT_ENVS, "evaluator.")):
        own = f"{section}generating_args."
        for name, convert in names:
            if draft.writes(f"{own}{name}") and not of_all:
                draft.mapped(f"{own}{name}", f"{to}{name}", draft.read(f"{own}{name}", convert))
            draft.implied(f"{own}{name}", f"{GENERATING}* overrides it")
        if draft.get(f"{own}max_new_tokens", 0) >= draft.recipe.get("gconfig.max_new_tokens", 1):
            draft.implied(f"{own}max_new_tokens", "the limit of a turn is lower")
        for name in ("num_beams", "num_return_sequences"):
            if draft.get(f"{own}{name}") == 1:
                draft.implied(f"{own}{name}", "each turn is sampled once")
    if of_all and draft.writes(f"{GENERATING}temperature") and "evaluator.greedy" in draft.recipe:
        draft.recipe["evaluator.temperature"] = draft.read(f"{GENERATING}temperature", number)
