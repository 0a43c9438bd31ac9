"""Trinity-RFT's algorithms that train on given answers, without an explorer: `sft` and `dpo`."""

from __future__ import annotations

from fivefold.config.schema.preferences import DPORecipe
from fivefold_import.dialect import Conversion
from fivefold_import.draft import Draft
from fivefold_import.settings import ask_as_user
from fivefold_import.tables import Table
from fivefold_import.trinity.rules import RULES, TABLES, TREE
from fivefold_import.trinity.trainer import finish, micro_batches, override_layout, path_of_data
from fivefold_import.values import flag, text, whole
from fivefold_import.verl import tree as verl_tree
from fivefold_import.verl.rules import MODEL

ROWS = "buffer.trainer_input.experience_buffer."
FORMAT = ROWS + "format."
LENGTHS = ("model.max_prompt_tokens", "model.max_response_tokens")
MAX_LENGTH = "train_dataset.max_length"
WITHOUT = ("explorer.", "synchronizer.", "buffer.explorer_input.")
"""Sections that have no effect without an explorer."""
KEPT = ("project", "name", "buffer.total_epochs", "trainer.save_interval", "trainer.grad_clip")
"""Keys that have the same defaults as in reinforcement learning."""

GIVEN = Table({key: row for key, row in RULES.rows.items() if not key.startswith(WITHOUT)}) | TABLES["given"]
DEFAULTS = {
    **{key: RULES.defaults[key] for key in KEPT},
    **TABLES["optimizer"].under("algorithm.optimizer.").defaults,
    TREE + MODEL + "enable_gradient_checkpointing": True,
}


def convert(draft: Draft) -> None:
    """Convert the keys that need other keys, then the rest by the rule table."""
    _columns(draft)
    path_of_data(draft, ROWS, "train_dataset")
    rows = "buffer.train_batch_size" if draft.writes("buffer.train_batch_size") else "buffer.batch_size"
    if draft.writes(rows):
        draft.mapped(rows, "train_dataset.batch_size", draft.read(rows, whole))
    _lengths(draft)
    _lay_out(draft)
    micro_batches(draft)
    finish(draft, GIVEN.rules)


def _columns(draft: Draft) -> None:
    """Convert the columns: texts, which a user asks, or chat messages."""
    key = FORMAT + "prompt_type"
    kind = str(draft.get(key, "messages")).lower()
    draft.implied(key, "the keys of the columns say it")
    is_dpo = draft.schema is DPORecipe
    used = {"prompt_key": "prompt", "response_key": "response"}
    if kind == "messages":
        to_ = "prompt_key" if is_dpo else "messages_key"
        # The default's name differs from the one that most data sets have.
        draft.sets(
            FORMAT + "messages_key", f"train_dataset.{to_}", draft.read(FORMAT + "messages_key", text, "message")
        )
        for name in used:
            draft.implied(FORMAT + name, "prompt_type is messages")
        if not is_dpo:
            learns_all = FORMAT + "enable_concatenated_multi_turn"
            only_last = not draft.read(learns_all, flag, False)
            draft.sets(learns_all, "train_dataset.mask_history", only_last)
        return
    for name, otherwise in used.items():
        if name == "prompt_key" or not is_dpo:
            draft.sets(FORMAT + name, f"train_dataset.{name}", draft.get(FORMAT + name, otherwise))
        draft.implied(FORMAT + name, "it is not read")
    if kind == "plaintext":
        ask_as_user(draft, "Trinity-RFT")
    draft.implied(FORMAT + "messages_key", f"prompt_type is {kind}")


def _lengths(draft: Draft) -> None:
    """Convert the length of prompt and response together."""
    longest = "model.max_model_len"
    if all(isinstance(draft.get(key), int) for key in LENGTHS):
        total = sum(draft.read(key, whole) for key in LENGTHS)
        for key in LENGTHS:
            draft.mapped(key, MAX_LENGTH, total, "prompt and response together")
    elif isinstance(draft.get(longest), int):
        draft.mapped(longest, MAX_LENGTH, draft.read(longest, whole), "longer examples are dropped")
    for key in (*LENGTHS, longest):
        draft.implied(key, f"{MAX_LENGTH} is the limit of prompt and response together")


def _lay_out(draft: Draft) -> None:
    """Read the layout of the trainer, which has all devices, and of DPO's reference."""
    verl_tree.lay_out_trainers(draft, verl_tree.Tree(etp_follows_tp=True, prefix=TREE))
    override_layout(draft)
    verl_tree.recompute(draft, TREE)
    verl_tree.router(draft, TREE, "model.model_path")
    nodes, per_node = draft.get("cluster.node_num"), draft.get("cluster.gpu_per_node")
    is_known = isinstance(nodes, int) and isinstance(per_node, int)
    for plan in draft.plans.values():
        plan.n_devices = nodes * per_node if is_known else None


CONVERSION = Conversion(convert, DEFAULTS)
