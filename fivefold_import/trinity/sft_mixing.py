"""SFT mixing: expert data in addition to rewards, as in Trinity-RFT's algorithms `mix` and `mix_chord`."""

from __future__ import annotations

from math import ceil

from fivefold_import.draft import Draft
from fivefold_import.values import number, text, whole

ALGORITHMS = ("mix", "mix_chord")
LOSS_ARGS = "algorithm.policy_loss_fn_args."
RATIO = "algorithm.sample_strategy_args.expert_data_ratio"
EXPERT = "expert_dataset."
SECTIONS = ("buffer.trainer_input.auxiliary_buffers.sft_dataset.", "buffer.trainer_input.sft_warmup_dataset.")
"""Where releases have the expert's data."""
IN_COUNTS = "examples are counted, however batches are split"


def is_mixed(draft: Draft, algorithm: str) -> bool:
    """Return whether the source trains on expert data in addition to rewards."""
    return draft.get("algorithm.policy_loss_fn", algorithm) in ALGORITHMS


def convert_mix(draft: Draft, algorithm: str, n_samples: int) -> None:
    """Convert the weight of the expert's data, their share of a batch, and where they are."""
    has_data = any(draft.writes(section + "path") for section in SECTIONS)
    for key in ("algorithm.algorithm_type", "algorithm.policy_loss_fn"):
        if draft.get(key) in ALGORITHMS and not has_data:
            draft.unsupported(key, f"the expert's data have no path: give {SECTIONS[0]}path")
        elif draft.get(key) in ALGORITHMS:
            draft.implied(key, "expert_dataset is a term of the loss, added to PPO's clipped loss")
    if not has_data:
        return
    is_chord = draft.get("algorithm.policy_loss_fn", algorithm) == "mix_chord"
    _weights(draft, is_chord)
    _batch(draft, n_samples)
    for section in SECTIONS:
        _data(draft, section)
    # Its entropy is over the samples, as everywhere.
    if draft.get("algorithm.entropy_loss_fn", "mix") == "mix":
        draft.implied("algorithm.entropy_loss_fn", "only samples count for the entropy")
    if draft.get("algorithm.sample_strategy", "mix") == "mix":
        draft.implied("algorithm.sample_strategy", "each update has its share of expert_dataset")
    for name in (
        "use_dynamic_bsz",
        "ppo_*",
        "ngpus_trainer",
        "train_batch_size_*",
        "read_batch_size_*",
        "repeat_times",
    ):
        draft.all_implied(LOSS_ARGS + name, IN_COUNTS)


def _weights(draft: Draft, is_chord: bool) -> None:
    names = {"mu_peak": "weight", "mu_valley": "final_weight"} if is_chord else {"mu": "weight"}
    for source, to in names.items():
        value = draft.read(LOSS_ARGS + source, number, 0.1)
        draft.sets(LOSS_ARGS + source, EXPERT + to, value)
    if not is_chord:
        by_token = draft.get(LOSS_ARGS + "use_token_level_loss_in_sft", False)
        _aggregation(draft, LOSS_ARGS + "use_token_level_loss_in_sft", by_token)
        return
    for source, to in (("mu_warmup_steps", "warmup_steps"), ("mu_decay_steps", "decay_steps")):
        if draft.writes(LOSS_ARGS + source):
            draft.mapped(LOSS_ARGS + source, EXPERT + to, draft.read(LOSS_ARGS + source, whole))
    phi = "phi" if draft.get(LOSS_ARGS + "enable_phi_function", True) is True else "one"
    draft.sets(LOSS_ARGS + "enable_phi_function", EXPERT + "token_weight", phi)
    _aggregation(
        draft, LOSS_ARGS + "use_token_level_loss_in_sft", draft.get(LOSS_ARGS + "use_token_level_loss_in_sft", True)
    )


def _aggregation(draft: Draft, key: str, by_token: object) -> None:
    mode = str(draft.get(LOSS_ARGS + "sft_loss_agg_mode", "token-mean" if by_token else "seq-mean-token-mean"))
    aggregation = "sequence_mean" if mode.startswith("seq") else "token_mean"
    draft.recipe[EXPERT + "loss_aggregation"] = aggregation
    for written in (key, LOSS_ARGS + "sft_loss_agg_mode"):
        draft.mapped(written, EXPERT + "loss_aggregation", aggregation)


def _batch(draft: Draft, n_samples: int) -> None:
    """Convert the share of a batch: so many of `batch_size` x `repeat_times` experiences are the expert's."""
    tasks, ratio = draft.get("buffer.batch_size"), draft.read(RATIO, number, 0.5)
    if not isinstance(tasks, int):
        draft.unsupported(RATIO, "buffer.batch_size says of how many experiences this is a share: set it")
        return
    size = max(1, ceil(ratio * tasks * n_samples))
    draft.sets(RATIO, EXPERT + "batch_size", size, f"{ratio:g} of {tasks}*{n_samples}, in addition to the samples")


def _data(draft: Draft, section: str) -> None:
    for source, to in (
        ("path", "path"),
        ("split", "split"),
        ("format.prompt_key", "prompt_key"),
        ("format.response_key", "response_key"),
    ):
        if draft.writes(section + source):
            draft.mapped(section + source, EXPERT + to, draft.read(section + source, text))
    draft.all_unsupported(
        section + "*", "an example is a prompt, a text or chat messages, and a response, which is a text"
    )
