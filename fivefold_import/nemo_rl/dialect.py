"""NeMo-RL: YAML files with `defaults`, and scripts that start its examples."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.config.schema.preferences import DPORecipe
from fivefold.config.schema.sft import SFTRecipe
from fivefold_import import reasons
from fivefold_import.agents import player
from fivefold_import.critic import ForCritic, has_critic, of_critic
from fivefold_import.defaults import own_default
from fivefold_import.dialect import Conversion, Dialect
from fivefold_import.draft import Draft
from fivefold_import.nemo_rl import files
from fivefold_import.nemo_rl.algorithm import (
    convert_advantage_bounds,
    convert_correction,
    convert_distillation,
    convert_estimator,
    convert_kl,
    convert_loss,
    convert_rewards,
)
from fivefold_import.nemo_rl.batches import micro_batches, mini_batches, passes_without_gradients
from fivefold_import.nemo_rl.data import convert_data, convert_environment
from fivefold_import.nemo_rl.layout import (
    GENERATION,
    POLICY,
    VALUE,
    convert_engine,
    lay_out_model,
    lay_out_rollout,
    n_devices,
)
from fivefold_import.nemo_rl.rules import TABLES, convert_steps, convert_switches, section_of_task
from fivefold_import.nemo_rl.serving import convert_server_options
from fivefold_import.settings import TEACHER_PATH, cut_of_held_out
from fivefold_import.tasks import DISTILLATION, EVALUATION, PREFERENCES, REINFORCEMENT, REWARD_MODEL, SFT, Sign
from fivefold_import.values import number, positive, text, whole

HOLD_OUT = "train_dataset.hold_out"
SIGNS = (
    *(Sign(f"{key}.*", DISTILLATION) for key in ("loss_fn.xtoken_loss", "token_aligner", "teachers")),
    Sign("loss_fn.kd_loss_mode", DISTILLATION),
    Sign("eval.*", EVALUATION),
    Sign("sft.max_num_*", SFT),
    Sign("dpo.max_num_*", PREFERENCES),
    Sign("rm.max_num_*", REWARD_MODEL),
)
"""Sections of NeMo-RL's other trainers."""


def convert(draft: Draft) -> None:
    """Convert the keys that need other keys, then the rest by the rule table."""
    section = section_of_task(draft)
    if section == "grpo.":
        draft.assume(RULES.defaults)
    prompts = draft.read(f"{section}num_prompts_per_step", positive, 32)
    n_samples = draft.read(f"{section}num_generations_per_prompt", positive, 16)
    convert_data(draft)
    convert_environment(draft, section)
    if section == "distillation.":
        convert_distillation(draft)
    else:
        convert_estimator(draft, section)
        convert_kl(draft, section)
        convert_loss(draft)
        convert_correction(draft, section)
        convert_advantage_bounds(draft, section)
        convert_rewards(draft, section)
    trainers, rollout = n_devices(draft)
    lay_out_rollout(draft, rollout)
    if draft.plans["rollout"].backend == "vllm":
        convert_server_options(draft)
    _policy(draft, trainers, prompts, n_samples)
    _teacher(draft, trainers)
    _critic(draft, trainers, prompts, n_samples)
    convert_steps(draft, section)
    convert_switches(draft, section)
    _evaluation(draft, section)
    _length_together(draft)
    table = {"grpo.": "rl", "ppo.": "ppo", "distillation.": "distillation"}[section]
    draft.apply((TABLES[table] | OF_VALUE).rules)
    _leave_room(draft)


def _length_together(draft: Draft) -> None:
    """Convert the most tokens of a prompt and its response together."""
    together = f"{POLICY}max_total_sequence_length"
    if player(draft) is None and isinstance(draft.get(together), int):
        draft.sets(together, "gconfig.max_tokens", draft.read(together, positive))


def _leave_room(draft: Draft) -> None:
    """Let each prompt leave room for a response."""
    most = draft.recipe.get("gconfig.max_tokens")
    if most is None:
        return
    for section in ("train_dataset", "valid_dataset"):
        key = f"{section}.max_length"
        if draft.recipe.get(key, own_default("train_dataset.max_length", draft.schema)) >= most:
            draft.revise(key, most - 1, "so that a prompt leaves room for a response")


def convert_given(draft: Draft) -> None:
    """Convert sources that train on given answers."""
    section = section_of_task(draft)
    convert_data(draft)
    trainers, _ = n_devices(draft)
    plan = lay_out_model(draft, "actor", POLICY, _model(draft), trainers)
    convert_engine(draft, POLICY, _model(draft), plan)
    rows = f"{POLICY}train_global_batch_size"
    draft.sets(rows, "train_dataset.batch_size", draft.read(rows, whole, 32))
    micro_batches(draft, POLICY, sequences_of_row=1 if draft.schema is SFTRecipe else 2)
    draft.all_implied(f"{GENERATION}*", reasons.NOTHING_GENERATED)
    if draft.schema is DPORecipe:
        _preferences(draft)
    _held_out_rows(draft, section)
    convert_steps(draft, section)
    convert_switches(draft, section)
    draft.apply((TABLES["top"] | TABLES["given"].under(section)).rules)


def _policy(draft: Draft, devices: int, prompts: int, n_samples: int) -> None:
    plan = lay_out_model(draft, "actor", POLICY, _model(draft), devices)
    convert_engine(draft, POLICY, _model(draft), plan)
    mini_batches(draft, POLICY, prompts, n_samples)
    micro_batches(draft, POLICY)
    passes_without_gradients(draft, POLICY)


def _critic(draft: Draft, devices: int, prompts: int, n_samples: int) -> None:
    if not has_critic(draft):
        return
    own = ForCritic(draft)
    model = str(draft.get(f"{VALUE}model_name", ""))
    plan = lay_out_model(draft, "critic", VALUE, model, devices)
    convert_engine(own, VALUE, model, plan)
    mini_batches(own, VALUE, prompts, n_samples)
    micro_batches(own, VALUE)


def _teacher(draft: Draft, devices: int) -> None:
    """Convert a teacher: its model and layout; the rest of its section is an actor's, and has no effect."""
    if not draft.keys("teacher.*"):
        return
    model = "teacher.model_name"
    draft.sets(model, TEACHER_PATH, draft.read(model, text, "???"))
    lay_out_model(draft, "teacher", "teacher.", str(draft.get(model, "")), devices)
    later = draft.plans["teacher"].keys
    for key in draft.keys("teacher.*"):
        if key not in later:
            draft.implied(key, "the teacher is not trained, and generates nothing")


def _model(draft: Draft) -> str:
    return str(draft.get(f"{POLICY}model_name", ""))


def _preferences(draft: Draft) -> None:
    """Convert DPO's loss."""
    draft.sets(
        "dpo.reference_policy_kl_penalty", "actor.beta", draft.read("dpo.reference_policy_kl_penalty", number, 0.05)
    )
    key = "dpo.preference_average_log_probs"
    if draft.get(key) is True:
        draft.mapped(key, "actor.average_log_prob", True)
    draft.implied(key, "log-probs of an answer are summed, as by default")
    if draft.get("dpo.preference_loss_weight", 1) == 1:
        draft.implied("dpo.preference_loss_weight", "it is 1")
    draft.unsupported("dpo.preference_loss_weight", "the preference's loss has the weight 1: scale the learning rate")
    weight, average = "dpo.sft_loss_weight", "dpo.sft_average_log_probs"
    if draft.get(weight):
        draft.mapped(weight, "actor.nll_weight", draft.read(weight, number))
        how = "sequence_mean" if draft.get(average) is True else "sequence_sum"
        draft.sets(average, "actor.nll_aggregation", how)
    draft.implied(weight, "it is switched off")
    draft.implied(average, "only sft_loss_weight reads this")


def _evaluation(draft: Draft, section: str) -> None:
    """Convert how held-out prompts are answered: sampled as in training unless the source says otherwise."""
    own = f"{GENERATION}val_"
    temperature = draft.read(f"{own}temperature", number, draft.read(f"{GENERATION}temperature", number, 1.0))
    if temperature > 0:
        draft.recipe["evaluator.greedy"] = False
        draft.sets(f"{own}temperature", "evaluator.temperature", temperature)
        cut_of_held_out(draft, own, GENERATION, samples=True)
    draft.implied(f"{own}temperature", reasons.GREEDY)
    for name in ("top_p", "top_k"):
        draft.implied(own + name, reasons.GREEDY)
    count, repeat = f"{section}val_num_generations_per_prompt", "data.validation.repeat"
    times = draft.read(count, positive, 1) * draft.read(repeat, positive, 1)
    draft.sets(count, "evaluator.n_samples", times)
    draft.mapped(repeat, "evaluator.n_samples", times)
    most = f"{section}max_val_samples"
    if draft.get(most) is not None:
        limit = max(1, draft.read(most, positive) // draft.read(repeat, positive, 1))
        _evaluate_at_most(draft, (most,), limit)


def _held_out_rows(draft: Draft, section: str) -> None:
    """Convert the batches of held-out rows that are evaluated; all of them, if their number is not above 0."""
    batches, size = f"{section}val_batches", f"{section}val_global_batch_size"
    count, rows = draft.get(batches, -1), draft.get(size)
    if isinstance(count, int) and isinstance(rows, int) and count > 0:
        _evaluate_at_most(draft, (batches, size), count * rows)


def _evaluate_at_most(draft: Draft, keys: Sequence[str], limit: int) -> None:
    """Evaluate the first rows alone; of rows that are held out by chance, no more are held out than are evaluated."""
    if not draft.recipe.get(HOLD_OUT):
        for key in keys:
            draft.sets(key, "valid_dataset.limit", limit)
        return
    rows = draft.recipe[HOLD_OUT]
    if rows < 1 or rows > limit:
        note = f"NeMo-RL holds out {rows:g} and evaluates {limit} of them; here, the others are trained on"
        draft.revise(HOLD_OUT, limit, note)
    for key in keys:
        draft.mapped(key, HOLD_OUT, draft.recipe[HOLD_OUT])


OF_VALUE = TABLES["model"].wrapped(of_critic).under(VALUE) | TABLES["value"]
RULES = TABLES["rl"] | OF_VALUE
DIALECT = Dialect(
    "NeMo-RL",
    {
        REINFORCEMENT: Conversion(convert, {}),
        SFT: Conversion(convert_given, {}),
        PREFERENCES: Conversion(convert_given, {}),
        REWARD_MODEL: Conversion(convert_given, {}),
    },
    SIGNS,
    files.merge,
    files.read,
)
