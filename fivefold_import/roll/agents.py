"""ROLL's agentic pipeline: environments that play episodes of several turns, in groups with one start each."""

from __future__ import annotations

from fivefold_import import reasons
from fivefold_import.agents import MAX_LENGTH, MAX_TURNS, Player, by_hand, has_turns, leave_open, limit, player
from fivefold_import.draft import Draft, Rule
from fivefold_import.roll import gem, tools
from fivefold_import.roll.games import GAME, are_known, convert_games
from fivefold_import.roll.single_turns import asks_once, convert_lengths, convert_questions
from fivefold_import.settings import MEAN_LEVEL, STD_LEVEL
from fivefold_import.values import positive

TRAIN_ENVS, HELD_OUT_ENVS, OWN_ENVS = "train_env_manager.", "val_env_manager.", "custom_envs."
ESTIMATOR = "adv_estimator"
BATCH, GROUP, GROUPS = "rollout_batch_size", f"{TRAIN_ENVS}group_size", f"{TRAIN_ENVS}num_env_groups"
TURNS, TOKENS = "max_actions_per_traj", "max_tokens_per_step"
ENGINES_TOKENS = "actor_infer.generating_args.max_new_tokens"
GROUPING, METHOD = "reward_normalization.grouping", "reward_normalization.method"
LEVELS = {"traj_group_id": "group", "batch": "batch"}
"""Values of `grouping`, with the recipe's level."""
METHODS = {"mean_std": (True, True), "mean": (True, False), "identity": (False, False)}
"""Values of `method`: whether the mean is taken off, and whether the standard deviation divides."""
TYPES = {"reward_normalization.norm_mean_type": MEAN_LEVEL, "reward_normalization.norm_std_type": STD_LEVEL}
"""Keys that say one of both apart, before `method`."""
CREDIT = {"gigpo": "state", "step_reinforce": "turn"}
"""Estimators whose advantages differ from turn to turn, with the value of `actor.credit`."""


def is_agentic(draft: Draft) -> bool:
    """Return whether the source is for the agentic pipeline."""
    return bool(draft.keys(f"{TRAIN_ENVS}*") or draft.keys(f"{OWN_ENVS}*"))


def step_of(draft: Draft) -> tuple[int, int]:
    """Return the prompts of a step, and the responses or episodes of each."""
    batch = draft.read(BATCH, positive)
    if not is_agentic(draft):
        return batch, draft.read("num_return_sequences_in_group", positive)
    group = draft.read(GROUP, positive, 1)
    return max(1, batch // group), group


def convert_agents(draft: Draft) -> None:
    """Convert the episodes of a step, and their limits."""
    if asks_once(draft):
        _groups(draft)
        _held_out_group(draft)
        convert_questions(draft)
        return
    if gem.solves(draft):
        _groups(draft)
        _held_out_group(draft)
        convert_lengths(draft, str(gem.only_tag(draft)))
        gem.convert_problems(draft)
        return
    has_games = are_known(draft)
    if has_games:
        draft.recipe["environment.game"] = GAME
    elif gem.guesses(draft):
        draft.recipe["environment.game"] = gem.GAME
    elif tools.uses_tool(draft):
        draft.recipe["environment.game"] = tools.GAME
    else:
        leave_open(draft, _player(draft))
    _groups(draft)
    _lengths(draft)
    _turns(draft)
    _held_out_group(draft)
    if has_games:
        convert_games(draft, step_of(draft)[0])
        return
    if gem.guesses(draft):
        gem.convert_guessing(draft, step_of(draft)[0])
        return
    if tools.uses_tool(draft):
        tools.convert_questions_with_tool(draft)
        return
    draft.notes.append(
        "ROLL's environments make their tasks themselves; here each group starts from a row of train_dataset, and an "
        "evaluation from the rows of valid_dataset: write files of prompts, whose values your code may take "
        "(docs/agents.md)"
    )


def _held_out_group(draft: Draft) -> None:
    held_out = f"{HELD_OUT_ENVS}group_size"
    if draft.writes(held_out):
        draft.mapped(held_out, "evaluator.n_samples", draft.read(held_out, positive))


def _player(draft: Draft) -> Player:
    """Return what plays the episodes: a game, or an agent if each turn is a prompt that stands alone."""
    managers = [draft.get(key) for key in ("env_manager_cls", *draft.keys(f"{OWN_ENVS}*.env_manager_cls"))]
    words = " ".join(map(str, managers)).lower()
    return "agent" if "step" in words or "native" in words else "game"


def _groups(draft: Draft) -> None:
    """Convert the episodes of a step, which come in groups."""
    batch = draft.read(BATCH, positive)
    prompts, group = step_of(draft)
    draft.sets(GROUP, "gconfig.n_samples", group)
    draft.implied("num_return_sequences_in_group", f"{GROUP} is the number of episodes of a group")
    to = "train_dataset.batch_size"
    draft.recipe[to] = prompts
    if batch % group:
        draft.unsupported(BATCH, f"{batch} episodes do not divide into groups of {group}: {prompts} groups are a step")
    draft.mapped(BATCH, to, prompts, f"{batch} episodes in groups of {group}")
    if draft.get(GROUPS) == prompts:
        draft.mapped(GROUPS, to, prompts)
    draft.implied(GROUPS, f"a step has {prompts} groups, which {BATCH} says")


def _lengths(draft: Draft) -> None:
    """Convert the lengths of an episode and of a turn."""
    draft.mapped("sequence_length", MAX_LENGTH, draft.read("sequence_length", positive, 1))
    if not draft.writes("prompt_length"):
        draft.implied("prompt_length", "the episode's length counts")
    keys = (TOKENS, ENGINES_TOKENS, *(f"{OWN_ENVS}{tag}.{TOKENS}" for tag in played(draft)))
    limits = {key: value for key in keys if isinstance(value := draft.get(key), int) and value > 0}
    if limits:
        limit(draft, "gconfig.max_new_tokens", limits, "limits each turn", note="tokens of a turn")
    draft.implied("response_length", "sequence_length limits the episode")


def _turns(draft: Draft) -> None:
    """Convert the most turns: the environments' own ones, or the variable that they are usually set by."""
    keys = (TURNS, *(f"{OWN_ENVS}{tag}.max_steps" for tag in played(draft)))
    limits = {key: value for key in keys if isinstance(value := draft.get(key), int) and value > 0}
    if not limits:
        return
    own = {key: value for key, value in limits.items() if key != TURNS}
    most = draft.recipe[MAX_TURNS] = max((own or limits).values())
    for key, value in limits.items():
        if value == most:
            draft.mapped(key, MAX_TURNS, most)
        if key == TURNS:
            draft.implied(key, f"only {OWN_ENVS}* reads this")
        draft.unsupported(key, f"all games have {MAX_TURNS}={most}: let step end the shorter ones")


def played(draft: Draft) -> list[str]:
    """Return the names of the environments that are trained on."""
    names = {key.split(".")[1]: None for key in draft.keys(f"{OWN_ENVS}*.*")}
    tags = draft.get(f"{TRAIN_ENVS}tags")
    return [name for name in names if not isinstance(tags, list) or name in tags]


def normalise(draft: Draft) -> None:
    """Convert how the rewards of episodes are normalised, whatever the estimator."""
    estimator, method = str(draft.get(ESTIMATOR)), str(draft.get(METHOD, "identity"))
    takes_mean, divides = METHODS.get(method, METHODS["mean_std"])
    level = LEVELS.get(str(draft.get(GROUPING)), "group")
    draft.recipe[MEAN_LEVEL] = level if takes_mean else "none"
    draft.recipe[STD_LEVEL] = level if divides else "none"
    for key, to in TYPES.items():
        if (kind := draft.get(key)) in ("group", "batch"):
            # Over a group that is the whole batch, both are the same.
            draft.sets(key, to, "batch" if level == "batch" else kind)
            takes_mean = True
    if all(map(draft.writes, TYPES)):
        draft.implied(METHOD, "norm_mean_type and norm_std_type are in its place")
    if method not in METHODS:
        draft.unsupported(METHOD, "advantages are not clipped: mean_std is in its place")
    draft.mapped(METHOD, MEAN_LEVEL, draft.recipe[MEAN_LEVEL], f"with {STD_LEVEL}={draft.recipe[STD_LEVEL]}")
    if not takes_mean:
        draft.implied(GROUPING, "rewards are not normalised")
    elif draft.get(GROUPING) in LEVELS:
        if any(map(draft.writes, TYPES)):
            draft.implied(GROUPING, "it is the group of a prompt, or the batch")
        draft.mapped(GROUPING, MEAN_LEVEL, level)
    draft.unsupported(GROUPING, "rewards are normalised over the group, the batch, or not at all")
    if estimator in CREDIT and has_turns(draft):
        draft.mapped(ESTIMATOR, "actor.credit", CREDIT[estimator])
    if estimator == "agentic_reinforce":
        draft.unsupported(ESTIMATOR, f"{reasons.OWN_TURNS}: the rewards of whole episodes are compared instead")
    draft.implied(ESTIMATOR, "the advantages are the normalised rewards of episodes")


# Rules, for the tables


def of_played(rule: Rule) -> Rule:
    """Return a rule for a key of an environment, which has no effect if the environment is not trained on."""

    def wrapped(draft: Draft, source: str) -> None:
        if source.split(".")[1] not in played(draft):
            draft.implied(source, f"{TRAIN_ENVS}tags does not have it")
        rule(draft, source)

    return wrapped


def _manager(draft: Draft, source: str) -> None:
    if player(draft) == "game":
        draft.implied(source, "an episode is one text, to which moves and answers are added")
    draft.implied(source, reasons.ONE_SEQUENCE)


def _tags(draft: Draft, source: str) -> None:
    tags = draft.get(source)
    if isinstance(tags, list) and len(tags) > 1:
        draft.unsupported(source, "one class plays all episodes: a row says in extra_info which game it starts")
    if draft.keys(f"{OWN_ENVS}*"):
        draft.implied(source, f"it names what {OWN_ENVS}* describes")
    by_hand(draft, source)


def _of_steps(draft: Draft, source: str) -> None:
    """Convert the discount and the weight of turns, which the estimators by turn read."""
    estimator, value = draft.get(ESTIMATOR), draft.get(source)
    if estimator not in CREDIT:
        draft.implied(source, f"only {' and '.join(CREDIT)} read this")
    if source == "step_reward_gamma":
        draft.mapped(source, "actor.turn_discount", value)
    if estimator != "gigpo":
        draft.implied(source, "only gigpo reads this")
    if source == "step_reward_weight":
        draft.mapped(source, "actor.state_weight", value)
    if value == 1:
        draft.implied(source, "the episode's advantage has this weight")
    draft.unsupported(source, "the episode's advantage has the weight 1: divide actor.state_weight by this number")
