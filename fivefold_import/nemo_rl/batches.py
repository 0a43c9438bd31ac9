"""NeMo-RL's batches: samples of an update, and the tokens of a micro-batch."""

from __future__ import annotations

from fivefold_import.critic import INFER_BUDGET_KEY, REFERENCE_BUDGET_KEY, has_critic
from fivefold_import.draft import Draft
from fivefold_import.settings import TOKEN_BUDGET_KEY, token_budget
from fivefold_import.values import Unfit, flag, positive, whole

PACKERS = ("sequence_packing", "dynamic_batching")
"""Sections with token budgets; the first one that is enabled counts."""


def mini_batches(own: Draft, section: str, prompts: int, n_samples: int) -> None:
    """Convert the samples of an update: a step has `prompts` x `n_samples`, and an update takes whole groups."""
    key = f"{section}train_global_batch_size"
    if not own.writes(key):
        return
    size, samples = own.read(key, positive), prompts * n_samples
    updates, rest = divmod(samples, size)
    if rest or not updates or prompts % updates:
        own.unsupported(
            key, f"the {prompts} prompts of a step, {n_samples} responses each, do not divide into updates of {size}"
        )
    else:
        own.mapped(key, "actor.ppo_n_minibatches", updates, f"{samples} samples in updates of {size}")


def micro_batches(own: Draft, section: str, *, sequences_of_row: int = 1) -> None:
    """Convert the size of micro-batches: a token budget, or a number of rows.

    Args:
        own: the draft, or the critic's view of it.
        section: what precedes the keys.
        sequences_of_row: sequences of a row: two, for a pair of answers.
    """
    packer = next((one for one in PACKERS if own.read(f"{section}{one}.enabled", flag, False)), None)
    length = own.get(f"{section}max_total_sequence_length")
    rows, tokens = f"{section}train_micro_batch_size", f"{section}{packer}.train_mb_tokens"
    if packer and own.writes(tokens):
        _tokens(own, tokens, TOKEN_BUDGET_KEY)
        own.implied(rows, f"{tokens} counts")
    elif own.writes(rows):
        count = own.read(rows, whole) * sequences_of_row
        token_budget(own, rows, count, length if isinstance(length, int) else None)


def _tokens(own: Draft, key: str, to: str) -> int | None:
    """Convert a number of tokens, and return it; None if it is none."""
    try:
        budget = positive(own.get(key))
    except Unfit as error:
        own.unsupported(key, str(error))
        return None
    own.mapped(key, to, budget)
    return budget


def passes_without_gradients(draft: Draft, section: str) -> None:
    """Convert the micro-batches of log-probs, which a reference has too."""
    packer = next((one for one in PACKERS if draft.read(f"{section}{one}.enabled", flag, False)), None)
    rows, tokens = f"{section}logprob_batch_size", f"{section}{packer}.logprob_mb_tokens"
    length = draft.get(f"{section}max_total_sequence_length")
    budget: int | None = None
    if packer and draft.writes(tokens):
        budget = _tokens(draft, tokens, INFER_BUDGET_KEY)
    elif draft.writes(rows) and isinstance(length, int):
        budget = draft.read(rows, positive) * length
        draft.mapped(rows, INFER_BUDGET_KEY, budget)
    if budget is None:
        return
    if draft.compares_with_reference:
        draft.recipe[REFERENCE_BUDGET_KEY] = budget
    if has_critic(draft):
        draft.recipe[INFER_BUDGET_KEY.replace("actor.", "critic.")] = budget
