"""The replay buffer of experiences: samples that are trained several times, by age and use."""

from __future__ import annotations

from fivefold_import.draft import Draft
from fivefold_import.trinity.rules import AGE, age_of_weights
from fivefold_import.values import flag, number, positive, whole

BUFFER = "buffer.trainer_input.experience_buffer.replay_buffer."
TO = "rollout.replay_buffer."
LIMITED = ("decay_limit_randomization", "linear_decay_use_count_control_randomization")
"""Names of the priority that limits how often a sample is used, and adds noise."""


def convert_replay(draft: Draft) -> None:
    """Convert a buffer that is switched on; without a time after which samples come back, it uses none twice."""
    enable, cooldown = f"{BUFFER}enable", f"{BUFFER}reuse_cooldown_time"
    if not draft.read(enable, flag, False):
        return
    if draft.get(cooldown) is None:
        draft.implied(enable, "without reuse_cooldown_time, samples are trained once, in the order of the data")
        return
    function, arguments = f"{BUFFER}priority_fn", f"{BUFFER}priority_fn_args."
    name = str(draft.get(function, "linear_decay"))
    if name not in ("linear_decay", *LIMITED):
        draft.unsupported(function, "the priority is the version of the weights minus decay times the uses")
    age = max(1, age_of_weights(draft))
    if age_of_weights(draft) == 0:
        draft.recipe[AGE] = age
        draft.notes.append(f"{AGE}={age}: samples that are trained again need asynchronous training")
    n_again, oldest = draft.read("buffer.batch_size", positive, 1), 2 * age + 4
    draft.sets(enable, f"{TO}batch_size", n_again, "a step trains up to as many old prompts as new ones")
    draft.recipe[f"{TO}max_age"] = oldest
    draft.notes.append(f"{TO}max_age={oldest}: the age of samples is bounded, which Trinity-RFT leaves open")
    draft.mapped(cooldown, f"{TO}cooldown_steps", 1, "in steps, not in seconds")
    draft.implied(function, "it is the priority of rollout.replay_buffer")
    draft.sets(f"{arguments}decay", f"{TO}decay", draft.read(f"{arguments}decay", number, 2.0))
    # Its default has no limit; the least here is two uses.
    limit = draft.read(f"{arguments}use_count_limit", whole, 3) if name in LIMITED else 0
    draft.sets(f"{arguments}use_count_limit", f"{TO}max_uses", max(2, limit) if limit > 0 else 1000)
    draft.sets(f"{arguments}sigma", f"{TO}sigma", draft.read(f"{arguments}sigma", number, 0.0))
