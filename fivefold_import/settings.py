"""Settings that most frameworks have under their own names, and that take more than a lookup to convert."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fivefold.config.methods import ADVANTAGES
from fivefold_import import reasons
from fivefold_import.defaults import own_default
from fivefold_import.draft import Draft, Role, RolePlan, Rule
from fivefold_import.values import ROLLOUT_ENGINE, Unfit, flag, number, positive, top_k, whole

MEAN_LEVEL, STD_LEVEL = "actor.reward_norm.mean_level", "actor.reward_norm.std_level"
ADVANTAGE = "actor.advantage"
WORDS = {word: name for name, row in ADVANTAGES.items() for word in row.words}
"""Values of `actor.advantage`, by the names that frameworks give them."""
COEFF = "actor.distill.coeff"
TEACHER_PATH = "teacher.path"
ONE_TEACHER = "nothing says which prompts each of several teachers has: the first is taken (teachers)"
NO_REWARD = "no reward is trained on: the teacher is the only signal"
TOKEN_BUDGET_KEY = "actor.mb_spec.max_tokens_per_mb"

SCREEN = ("console", "stdout", "file", "none", "")
"""Names that frameworks give to no tracker, to the screen, or to a file of metrics, which a run always has."""
TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")
"""Values of `stats.trackers`."""
SWITCHED_OFF = ("disabled", "disable", "", None)


def ask_as_user(draft: Draft, framework: str) -> None:
    """Put each prompt of the data into the chat template as a message of a user, as a framework does."""
    draft.recipe["train_dataset.apply_chat_template"] = True
    draft.notes.append(f"train_dataset.apply_chat_template=true: {framework} asks each prompt as a user's message")


# Rules, for the tables


def dropout_position(draft: Draft, key: str) -> None:
    """Say whether adapters drop what they drop here; without dropout, it does not matter."""
    if draft.get(key) == "pre" or not draft.get(key.removesuffix("_position")):
        draft.implied(key, reasons.DROPS_INPUTS)
    draft.unsupported(key, f"{reasons.DROPS_INPUTS}: write dropout_position=pre")


def trackers(draft: Draft, key: str) -> None:
    """Convert a tracker or a list of trackers; the console always shows metrics."""
    value = draft.get(key)
    names = [str(name).lower() for name in (value if isinstance(value, list) else [value])]
    wanted = [name for name in dict.fromkeys(names) if name not in SCREEN]
    if others := [name for name in wanted if name not in TRACKERS]:
        draft.unsupported(key, f"there is no tracker {', '.join(others)}: stats.trackers takes {', '.join(TRACKERS)}")
    else:
        draft.mapped(key, "stats.trackers", wanted)


def switched_trackers(key: str, names: Sequence[str]) -> Rule:
    """Map the switches of several trackers, each under `key` with its name in place of `*`; TensorBoard stays on."""

    def rule(draft: Draft, source: str) -> None:
        if draft.get(source) in SWITCHED_OFF:
            return draft.implied(source, "it is switched off")
        on = [name for name in names if draft.get(key.replace("*", name)) not in SWITCHED_OFF]
        return draft.mapped(source, "stats.trackers", ["tensorboard", *on])

    return rule


def paths(key: str) -> Rule:
    """Map a file or a list of files."""

    def rule(draft: Draft, source: str) -> None:
        value = draft.get(source)
        if value is None:  # What the value depends on is not known; the entry says so.
            return draft.mapped(source, key, value)
        given = [path for path in (value if isinstance(value, list) else [value]) if path not in (None, "")]
        if not given:
            if key.startswith("valid_dataset."):
                return draft.implied(source, "it names no file, so there are no held-out prompts")
            raise Unfit(f"{value!r} names no file")
        if "${" in str(given):
            raise Unfit(reasons.LEADS_NOWHERE)
        return draft.mapped(source, key, [str(path) for path in given] if len(given) > 1 else str(given[0]))

    return rule


def thinking(draft: Draft, source: str) -> None:
    """Map a switch of the template's thoughts to the variable of that name."""
    draft.mapped(source, "chat_template_kwargs.enable_thinking", flag(draft.get(source)))


def template_variable(draft: Draft, source: str) -> None:
    """Map a value that the chat template gets, under its own name."""
    draft.mapped(source, f"chat_template_kwargs.{source.rpartition('.')[2]}", draft.get(source))


DECIMAL = re.compile(r"\d*\.?\d+(e-?\d+)?")
"""A number of a list that stays a text, as `[0.9,0.95]` does without spaces."""


def betas(draft: Draft, key: str) -> None:
    """Convert Adam's [beta1, beta2]."""
    written = draft.get(key)
    value = written.strip("[] ").split(",") if isinstance(written, str) else written
    if not isinstance(value, list) or len(value) != 2:
        raise Unfit(f"{value!r} is not a list of two numbers")
    beta1, beta2 = (number(float(each) if DECIMAL.fullmatch(str(each).strip()) else each) for each in value)
    if draft.writes(key) or beta2 != own_default("actor.optimizer.beta2"):
        draft.recipe.setdefault("actor.optimizer.beta2", beta2)
    draft.mapped(key, "actor.optimizer.beta1", beta1, "and actor.optimizer.beta2")


def wsd_option(draft: Draft, key: str) -> None:
    """Convert the shape or the length of the decay with which Megatron-Core's schedule WSD ends."""
    if draft.get(f"{key.partition('lr_wsd_')[0]}lr_decay_style") not in ("wsd", "WSD"):
        draft.implied(key, "only the schedule wsd reads this")
    elif key.endswith("style"):
        draft.mapped(key, "actor.optimizer.decay_shape", str(draft.get(key)))
    else:
        draft.mapped(key, "actor.optimizer.decay_steps", positive(draft.get(key)))


# Conversions that a dialect calls


def cut_of_held_out(
    draft: Draft, own: str, training: str, *, samples: bool, unwritten: Mapping[str, Any] | None = None
) -> None:
    """Convert `top_p` and `top_k` of held-out prompts.

    Args:
        draft: receives the entries.
        own: the section of their options.
        training: the section of the options of training, which hold where `own` has none.
        samples: whether held-out prompts are sampled, and not answered greedily.
        unwritten: the framework's values where the source writes none; None: as in training.
    """
    for name, convert, everything in (("top_p", number, 1.0), ("top_k", top_k, 0)):
        key, trained = own + name, draft.read(training + name, convert, everything)
        value = draft.read(key, convert, trained if unwritten is None else unwritten[name])
        if samples and value != trained:
            draft.sets(key, f"evaluator.{name}", value)
        draft.implied(key, reasons.AS_IN_TRAINING if samples else reasons.GREEDY)


def train_on_teacher_alone(draft: Draft, source: str, weight: float = 1.0) -> None:
    """Convert a key that asks for distillation without rewards: the teacher's log-probs are the advantage."""
    draft.recipe[COEFF] = weight
    draft.mapped(source, "actor.advantage", "none", f"{NO_REWARD}; {COEFF}={weight:g}")


def token_budget(draft: Draft, key: str, sequences: Any, length: int | None, to: str = TOKEN_BUDGET_KEY) -> None:
    """Convert a micro-batch of so many sequences, each of at most `length` tokens, to a number of tokens."""
    if length is None:
        draft.unsupported(key, f"the longest sequence is not known, which would turn this into {to}")
        return
    try:
        count = whole(sequences)
    except Unfit as error:
        draft.unsupported(key, str(error))
        return
    sequences = "1 sequence" if count == 1 else f"{count} sequences"
    note = f"{sequences} of at most {length} tokens; a micro-batch of shorter sequences holds more of them"
    draft.mapped(key, to, count * length, note)


def warmup(draft: Draft, key: str, total_steps: int | None, *, updates: int = 1) -> None:
    """Convert warm-up steps: to a share of all steps if their number is known, else to updates of the optimizer.

    Args:
        draft: receives the entry.
        key: the source's key of the warm-up.
        total_steps: steps of the whole run, if known.
        updates: updates of the optimizer in each of the steps.
    """
    steps = draft.read(key, whole)
    if steps <= 0:
        draft.implied(key, "it is 0, so nothing is warmed up by a number of steps")
    elif total_steps is None or total_steps < 1:
        note = f"{steps} steps of {updates} updates" if updates > 1 else ""
        draft.mapped(key, "actor.optimizer.warmup_steps", steps * updates, note)
    else:
        # The share is not rounded: the trainer turns it back into steps, and has to get the same number.
        share = min(1.0, steps / total_steps)
        draft.mapped(key, "actor.optimizer.warmup_steps_proportion", share, f"{steps} of {total_steps} steps")


def min_lr(draft: Draft, key: str, lr_key: str) -> None:
    """Convert the learning rate at the end of the decay to a share of the peak."""
    peak, least = draft.read(lr_key, number, 1e-6), draft.read(key, number)
    if peak > 0:
        # Twelve digits, because 1e-7 / 1e-6 is not 0.1 to the last one.
        draft.mapped(key, "actor.optimizer.min_lr_ratio", float(f"{least / peak:.12g}"), f"{least:g} of {peak:g}")
    draft.implied(key, f"{lr_key} is 0")


def advantages(draft: Draft, key: str, estimator: str, *, divides_by_std: bool, n_samples: int) -> None:
    """Convert an advantage estimator: GRPO's is a normalisation of rewards, others have names.

    Args:
        draft: receives the recipe's values and the entry of `key`.
        key: the source's key of the estimator.
        estimator: its name.
        divides_by_std: whether GRPO divides by the standard deviation.
        n_samples: responses of a prompt.
    """
    match estimator:
        case "grpo" | "grpo_vectorized":
            draft.recipe.setdefault(STD_LEVEL, "group" if divides_by_std else "none")
            draft.mapped(key, MEAN_LEVEL, "group", f"with {STD_LEVEL}={draft.recipe[STD_LEVEL]}")
        case _ if estimator in WORDS and (n_samples > 1 or not ADVANTAGES[WORDS[estimator]].compares):
            # The key may have named a loss as well, and so have an entry.
            draft.recipe.setdefault(ADVANTAGE, WORDS[estimator])
            draft.mapped(key, ADVANTAGE, WORDS[estimator])
        case _:
            draft.unsupported(key, f"the estimator {estimator!r} is not offered; the recipe trains with GRPO instead")


OTHER_ENGINES: Mapping[Any, str] = {"trtllm": "TensorRT-LLM", "megatron": "Megatron-Core's own inference"}
"""Engines in whose place vLLM generates, by the names that frameworks give them."""


def rollout_engine(draft: Draft, key: str, role: Role = "rollout") -> None:
    """Read the engine of a role that generates into its plan; an engine that is not offered is replaced by vLLM."""
    plan = draft.plans.setdefault(role, RolePlan())
    value = draft.get(key)
    if (title := OTHER_ENGINES.get(value)) is not None:
        plan.backend = "vllm"
        plan.keys[key] = f"in the place of {title}"
        draft.notes.append(
            f"vLLM generates in the place of {title}: it samples from the same weights, with its own speed and memory, "
            "so look at the degrees of rollout.backend"
        )
        return
    try:
        plan.backend = ROLLOUT_ENGINE(value)
        plan.keys[key] = ""
    except Unfit as error:
        plan.backend = "vllm"
        draft.unsupported(key, f"{error}; vllm is laid out in its place")
