"""What all of Trinity-RFT's trainers have: their layout, micro-batches, data sets and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fivefold_import import adapters, megatron, reasons
from fivefold_import.checkpoints import note_kept
from fivefold_import.critic import ForCritic, has_critic
from fivefold_import.draft import Draft, Rule
from fivefold_import.settings import TOKEN_BUDGET_KEY, warmup
from fivefold_import.trinity.rules import TREE
from fivefold_import.values import whole
from fivefold_import.verl import tree as verl_tree
from fivefold_import.verl.adapters import PEFT, convert_adapters
from fivefold_import.verl.rules import ACTOR, CRITIC, MODEL

OWN_ADAPTERS = "model.lora_configs.0."
"""Trinity-RFT's first set of adapters."""


def override_layout(draft: Draft) -> None:
    """Read `trainer.trainer_strategy` and `trainer.megatron`, which override the tree."""
    plan, strategy = draft.plans["actor"], "trainer.trainer_strategy"
    if draft.writes(strategy):
        plan.backend = "megatron" if str(draft.get(strategy)).startswith("megatron") else "fsdp"
        plan.keys[strategy] = ""
    own = draft.keys("trainer.megatron.*")
    if plan.shards_weights:
        megatron.ignore(draft, "trainer.megatron.")
    elif own:
        plan.degrees.clear()
        megatron.degrees(draft, "actor", "trainer.megatron.")
    if plan.shards_weights and draft.writes("trainer.ulysses_sequence_parallel_size"):
        plan.degrees.clear()
        draft.lay_out("trainer.ulysses_sequence_parallel_size", "actor", "cp")
    if own or draft.writes(strategy):
        draft.plans["ref"] = replace(plan, degrees=dict(plan.degrees), keys={}, degree_keys={})


def micro_batches(draft: Draft) -> None:
    """Convert the size of a micro-batch: a token budget in the trainer's own keys, or what the tree says."""
    # The framework's budget is one context parallel shard's, the recipe's is a whole micro-batch's.
    shards, sequences = draft.plans["actor"].get("cp"), TREE + ACTOR + "ppo_micro_batch_size_per_gpu"
    counts_sequences = draft.get("trainer.use_dynamic_bsz") is False and draft.writes(sequences)
    for key in ("trainer.max_token_len_per_gpu", "trainer.ppo_max_token_len_per_gpu"):
        if counts_sequences:
            draft.implied(key, f"trainer.use_dynamic_bsz is off, so {sequences} counts")
        elif isinstance(draft.get(key), int):
            note = f"times {shards} context parallel shards" if shards > 1 else ""
            draft.mapped(key, TOKEN_BUDGET_KEY, draft.read(key, whole) * shards, note)
    draft.implied("trainer.use_dynamic_bsz", reasons.TOKEN_BUDGET)
    if TOKEN_BUDGET_KEY not in draft.recipe:
        verl_tree.micro_batches(draft, TREE, sequence_length(draft))
    draft.implied(sequences, "the token budget counts")


def critics_batches(draft: Draft) -> None:
    """Convert the critic's batches, whose micro-batches have a token budget where the trainer's have."""
    tokens, dynamic = (TREE + CRITIC + name for name in ("ppo_max_token_len_per_gpu", "use_dynamic_bsz"))
    of_trainer = draft.get("trainer.use_dynamic_bsz") is not False and not draft.writes(dynamic)
    if has_critic(draft) and of_trainer and draft.writes(tokens):
        budget = draft.read(tokens, whole) * draft.plans["critic"].get("cp")
        ForCritic(draft).mapped(tokens, TOKEN_BUDGET_KEY, budget, "trainer.use_dynamic_bsz is the critic's too")
        draft.implied(
            TREE + CRITIC + "ppo_micro_batch_size_per_gpu", f"trainer.use_dynamic_bsz is on, so {tokens} counts"
        )
    verl_tree.critics_batches(draft, TREE, sequence_length(draft), batch=None)


def sequence_length(draft: Draft) -> int | None:
    """Return the tokens of the longest prompt and response together; None if the source does not say."""
    lengths = [draft.get("model.max_prompt_tokens"), draft.get("model.max_response_tokens")]
    if all(isinstance(length, int) for length in lengths):
        return sum(lengths)
    longest = draft.get("model.max_model_len")
    return longest if isinstance(longest, int) else None


def path_of_data(draft: Draft, section: str, target: str) -> None:
    """Convert a data set's path; a hub name gets the name of its subset, as in `openai/gsm8k:main`."""
    path, subset = draft.get(section + "path"), draft.get(section + "subset_name")
    if not isinstance(path, str):
        return
    is_hub = not path.startswith(("/", "./", "../", "~")) and path.count("/") == 1
    value = f"{path}:{subset}" if subset and is_hub else path
    draft.mapped(section + "path", f"{target}.path", value)
    if subset and is_hub:
        draft.mapped(section + "subset_name", f"{target}.path", value)
    elif subset:
        draft.unsupported(section + "subset_name", "only a data set of the hub has subsets")


def _optimizer(draft: Draft) -> None:
    """Convert the warm-up and the rates, which depend on the number of steps and on the schedule."""
    own, total = "algorithm.optimizer.", draft.get("buffer.total_steps", draft.get("trainer.total_steps"))
    steps = own + "lr_warmup_steps"
    if draft.writes(steps):
        passes = draft.get(TREE + ACTOR + "ppo_epochs", 1)
        warmup(
            draft, steps, total if isinstance(total, int) else None, updates=passes if isinstance(passes, int) else 1
        )
        if draft.read(steps, whole) > 0:
            draft.implied(own + "lr_warmup_steps_ratio", f"{steps} overrides it")
    name = "warmup_style" if draft.writes(own + "warmup_style") else "lr_scheduler_type"
    if draft.get(own + name, "constant") == "constant":
        draft.implied(own + "min_lr_ratio", "the learning rate is constant")
    # A step of the trainer is one update of `buffer.train_batch_size` experiences.
    verl_tree.warmup_and_rates(
        draft, TREE + ACTOR + "optim.", total if isinstance(total, int) else None, mini_batches=False
    )


def finish(draft: Draft, rules: Mapping[str, Rule]) -> None:
    """Convert what all kinds of training end with: the optimizer, where the run is, and the rest by a rule table."""
    _optimizer(draft)
    _trainers_file(draft)
    _adapters(draft)
    if draft.writes("cluster.ray_address"):
        draft.recipe["scheduler.type"] = "ray"
    draft.apply(rules)
    note_kept(draft, "Trinity-RFT")


def _adapters(draft: Draft) -> None:
    """Convert the adapters: the first set in Trinity-RFT's own keys, or what the tree says."""
    path = "model.model_path"
    if not draft.keys(OWN_ADAPTERS + "*"):
        convert_adapters(draft, TREE + MODEL, path, TREE + CRITIC + "model.")
        return
    for key in (*(TREE + MODEL + name for name in PEFT), *draft.keys(TREE + MODEL + "lora.*")):
        draft.implied(key, "model.lora_configs overrides it")
    draft.assume({OWN_ADAPTERS + name: 32 for name in ("lora_rank", "lora_alpha")})
    adapters.convert_adapters(
        draft,
        OWN_ADAPTERS,
        "lora_rank",
        str(draft.get(path, "")),
        targets="target_modules",
        excluded="exclude_modules",
    )


def _trainers_file(draft: Draft) -> None:
    """Say whether the trainer's own file was among those that were read."""
    key = "trainer.trainer_config_path"
    if draft.keys(TREE + "*"):
        draft.implied(key, "that file was read")
    draft.unsupported(key, "that file was not read: give it after this one")
