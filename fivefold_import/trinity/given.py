"""Trinity-RFT's algorithms that train on given answers, without an explorer: `sft` and `dpo`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.config.schema.preferences import DPORecipe
from fivefold_import import reasons
from fivefold_import.defaults import none
from fivefold_import.dialect import Conversion
from fivefold_import.draft import Draft, Rule
from fivefold_import.rules import for_each, implied, off, only, to, under, unknown
from fivefold_import.settings import ask_as_user
from fivefold_import.trinity.defaults import OWN_OPTIMIZER
from fivefold_import.trinity.rules import IN_MEMORY, RULES, TREE
from fivefold_import.trinity.trainer import finish, micro_batches, override_layout, path_of_data
from fivefold_import.values import flag, number, text, whole
from fivefold_import.verl import tree as verl_tree
from fivefold_import.verl.actor_rules import MODEL

ROWS = "buffer.trainer_input.experience_buffer."
FORMAT = ROWS + "format."
LENGTHS = ("model.max_prompt_tokens", "model.max_response_tokens")
MAX_LENGTH = "train_dataset.max_length"
NO_FURTHER_TERM = "DPO's loss holds the distance to the reference, and has no further KL term; its weight is actor.beta"

WITHOUT = ("explorer.", "synchronizer.", "buffer.explorer_input.")
"""Sections that have no effect without an explorer."""

GIVEN: Mapping[str, Rule] = {
    **{key: rule for key, rule in RULES.items() if not key.startswith(WITHOUT)},
    "mode": only("train", holds="nothing is explored"),
    "algorithm.algorithm_type": implied("the command trains with it"),
    "algorithm.policy_loss_fn": only("sft", "dpo", holds="the command trains with it"),
    "algorithm.policy_loss_fn_args.beta": to("actor.beta", number),
    "algorithm.policy_loss_fn_args.label_smoothing": to("actor.label_smoothing", number),
    "algorithm.policy_loss_fn_args.use_token_level_loss": only(True, holds="the loss is the mean over tokens"),
    "algorithm.policy_loss_fn_args.loss_agg_mode": only("token-mean", holds="the loss is the mean over tokens"),
    "algorithm.kl_loss_fn*": off(NO_FURTHER_TERM),
    **under("algorithm.", dict.fromkeys(("advantage_fn*", "kl_penalty_fn*", "repeat_times"), implied("not read"))),
    "algorithm.entropy_loss_fn*": off("the loss has no entropy bonus"),
    "buffer.batch_size": implied("train_batch_size is the number of rows of a step"),
    **under(
        ROWS,
        {
            "name": implied("it has no effect on what is read"),
            "storage_type": only(
                "file", "FILE", holds="rows are read from files", otherwise="rows are read from files"
            ),
            "split": to("train_dataset.split", text),
            "enable_progress_bar": implied("steps are shown on the console"),
            "total_epochs": implied("buffer.total_epochs is the number of epochs"),
            "format.chosen_key": to("train_dataset.chosen_key", text),
            "format.rejected_key": to("train_dataset.rejected_key", text),
            "format.tools_key": implied("a conversation is rendered without tools"),
            "format.chat_template": off(reasons.TEMPLATE),
            "format.system_prompt*": off("write the system's message into the rows, as chat messages"),
            "format.enable_concatenated_multi_turn": implied("prompt_type is not messages, or rows are pairs"),
            "*": unknown("the rows"),
        },
    ),
    "buffer.trainer_input.sft_warmup*": off("a run has one stage"),
    **for_each(WITHOUT, {"*": implied(reasons.NOTHING_GENERATED)}),
    "buffer.explorer_output*": implied(IN_MEMORY),
    **dict.fromkeys(("model.temperature", "model.top_p", "model.top_k"), implied(reasons.NOTHING_GENERATED)),
    "model.min_response_tokens": implied(reasons.NOTHING_GENERATED),
    "model.critic_model_path": implied("there is no critic"),
    TREE + "critic.*": implied("there is no critic"),
}

DEFAULTS: Mapping[str, Any] = {
    "project": "Trinity-RFT",
    "name": "rft",
    "buffer.total_epochs": 1,
    "trainer.save_interval": 0,
    "trainer.grad_clip": 1.0,
    **under("algorithm.optimizer.", OWN_OPTIMIZER),
    TREE + MODEL + "enable_gradient_checkpointing": True,
    # 0.1 and 0, as in Fivefold.
    **none("algorithm.policy_loss_fn_args.beta", "algorithm.policy_loss_fn_args.label_smoothing"),
    **none(ROWS + "split", FORMAT + "chosen_key", FORMAT + "rejected_key"),
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
    finish(draft, GIVEN)


def _columns(draft: Draft) -> None:
    """Convert the columns: those of texts, which a user asks, or those of chat messages."""
    key = FORMAT + "prompt_type"
    kind = str(draft.get(key, "messages")).lower()
    draft.implied(key, "the keys of the columns say it")
    is_dpo = draft.schema is DPORecipe
    used = {"prompt_key": "prompt", "response_key": "response"}
    if kind == "messages":
        to_ = "prompt_key" if is_dpo else "messages_key"
        # The default's name differs from the one that most data sets have.
        draft.recipe[f"train_dataset.{to_}"] = draft.read(FORMAT + "messages_key", text, "message")
        draft.mapped(FORMAT + "messages_key", f"train_dataset.{to_}", draft.recipe[f"train_dataset.{to_}"])
        for name in used:
            draft.implied(FORMAT + name, "prompt_type is messages")
        if not is_dpo:
            learns_all = FORMAT + "enable_concatenated_multi_turn"
            only_last = not draft.read(learns_all, flag, False)
            draft.recipe["train_dataset.mask_history"] = only_last
            draft.mapped(learns_all, "train_dataset.mask_history", only_last)
        return
    for name, otherwise in used.items():
        if name == "prompt_key" or not is_dpo:
            draft.recipe[f"train_dataset.{name}"] = draft.get(FORMAT + name, otherwise)
            draft.mapped(FORMAT + name, f"train_dataset.{name}", draft.recipe[f"train_dataset.{name}"])
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
    """Read the layout of the trainer, which has all devices, and that of DPO's reference."""
    verl_tree.lay_out_trainers(draft, verl_tree.Tree(etp_follows_tp=True, prefix=TREE))
    override_layout(draft)
    verl_tree.recompute(draft, TREE)
    verl_tree.router(draft, TREE, "model.model_path")
    nodes, per_node = draft.get("cluster.node_num"), draft.get("cluster.gpu_per_node")
    is_known = isinstance(nodes, int) and isinstance(per_node, int)
    for plan in draft.plans.values():
        plan.n_devices = nodes * per_node if is_known else None


CONVERSION = Conversion(convert, DEFAULTS)
