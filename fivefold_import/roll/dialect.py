"""ROLL: one YAML file with a block for each role (actor_train, actor_infer, reference, rewards)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fivefold_import import corrections, megatron, reasons
from fivefold_import.agents import MAX_LENGTH
from fivefold_import.checkpoints import note_kept
from fivefold_import.critic import NOT_NORMALISED, WHITENS, ForCritic, gae, has_critic, infer_budgets
from fivefold_import.dialect import Conversion, Dialect, merged
from fivefold_import.draft import Draft, Role
from fivefold_import.roll import agents, files, gem, given, tools
from fivefold_import.roll.adapters import convert_adapters
from fivefold_import.roll.games import READER as GAMES_READER
from fivefold_import.roll.images import convert_frozen_tower, convert_images
from fivefold_import.roll.layout import lay_out, lay_out_frozen, router
from fivefold_import.roll.rewards import convert_rewards
from fivefold_import.roll.rules import (
    CONFIG,
    CRITIC,
    CRITICS,
    GENERATING,
    HELD_OUT,
    INFER,
    OF_SECTIONS,
    PURE,
    REF,
    RULES,
    TEACHER,
    TRAIN,
    has_teacher,
)
from fivefold_import.roll.teachers import convert_teachers
from fivefold_import.settings import (
    MEAN_LEVEL,
    NO_REWARD,
    STD_LEVEL,
    TOKEN_BUDGET_KEY,
    advantages,
    cut_of_held_out,
    token_budget,
    train_on_teacher_alone,
    warmup,
)
from fivefold_import.source import Document
from fivefold_import.tasks import DISTILLATION, PICTURES, PREFERENCES, REINFORCEMENT, SFT, Sign
from fivefold_import.values import KL_ESTIMATOR, flag, number, whole

PER_DEVICE = TRAIN + "training_args.per_device_train_batch_size"
ACCUMULATION = TRAIN + "training_args.gradient_accumulation_steps"
WARMUP = TRAIN + "training_args.warmup_steps"
STUDENT: Mapping[str, str] = {"student_train.": TRAIN, "student_infer.": INFER}
"""Names of roles in on-policy distillation, with the names that ROLL gives them when it reads its files."""
ADVANTAGE_KEYS = (
    "adv_estimator",
    "norm_mean_type",
    "norm_std_type",
    "reward_norm",
    "reward_shift",
    "reward_scale",
    "whiten_advantages",
)
"""Keys that make advantages of rewards."""
OWN_ROWS = (GAMES_READER, gem.GAME_READER, gem.READER, tools.READER)
"""Readers that make rows themselves, with answers as verl has them."""
ANSWERS = "ground_truth"
"""The column that holds the answer in ROLL's rows."""


SIGNS = (
    Sign("sft_train.*", SFT),
    *(Sign(key, PREFERENCES) for key in ("chosen_key", "rejected_key", "ipo")),
    *(Sign(key, DISTILLATION) for key in ("student.*", "student_pretrain", "distill_*", "opsd_mode")),
    *(
        Sign("pipeline*", task, (name,))
        for name, task in (("sft", SFT), ("dpo", PREFERENCES), ("distill", DISTILLATION))
    ),
    Sign("actor_train.model_args.model_type", PICTURES, ("diffusion_module",)),
    Sign("actor_train.strategy_args.strategy_name", PICTURES, ("diffusion_deepspeed_train",)),
)
"""Keys of ROLL's other pipelines."""


def merge(documents: Sequence[Document]) -> Document:
    """Merge the files; the roles of on-policy distillation get the names that ROLL itself gives them."""
    whole = merged(documents)
    is_pure = any(key.startswith(tuple(STUDENT)) for key in whole.values)
    named = whole.renamed(_renamed)
    if is_pure and PURE not in named.values:
        # Its launcher sets this key; what shows it in the source are the student's sections.
        named.values[PURE] = True
        named.written[PURE] = "student_*"
    return named


def _renamed(key: str) -> str:
    role = next((role for role in STUDENT if key.startswith(role)), "")
    return STUDENT[role] + key.removeprefix(role) if role else key


def convert(draft: Draft) -> None:
    """Convert the keys that need other keys, then the rest by the rule table."""
    _sections(draft)
    lay_out(draft)
    if has_teacher(draft):
        lay_out_frozen(draft, "teacher", TEACHER)
    router(draft)
    if agents.is_agentic(draft):
        agents.convert_agents(draft)
    else:
        _lengths(draft)
    _advantages(draft)
    _kl(draft)
    _clipping(draft)
    corrections.of_roll(draft)
    convert_adapters(draft)
    _micro_batches(draft)
    _critics_batches(draft)
    _passes_without_gradients(draft)
    draft.awaiting |= {ACCUMULATION, WARMUP}
    _evaluation(draft)
    convert_rewards(draft)
    convert_teachers(draft)
    convert_frozen_tower(draft)
    draft.apply(RULES.rules)
    note_kept(draft, "ROLL")
    has_rows = "train_dataset.path" in draft.recipe and draft.recipe.get("train_dataset.reader") not in OWN_ROWS
    # Rows with images have their answers as verl's have.
    has_images = convert_images(draft)
    if has_rows and not has_images and "train_dataset.answer_key" not in draft.recipe:
        draft.recipe["train_dataset.answer_key"] = ANSWERS
        draft.notes.append(f"train_dataset.answer_key={ANSWERS}, the column that holds the answer in ROLL's rows")


def _sections(draft: Draft) -> None:
    """Take the defaults of the sections that the source has."""
    for section, defaults in OF_SECTIONS.items():
        if draft.keys(section + "*"):
            draft.assume(defaults)


# Batches and lengths


def _lengths(draft: Draft) -> None:
    """Convert the length of prompt and response together, which comes first in ROLL, or the response's."""
    prompt, response, sequence = draft.get("prompt_length"), "response_length", "sequence_length"
    if isinstance(draft.get(sequence), int) and isinstance(prompt, int):
        longest, stronger = draft.read(sequence, whole) - prompt, sequence
        draft.mapped(sequence, "gconfig.max_new_tokens", longest, f"less prompt_length={prompt}")
        draft.implied(response, f"{sequence} overrides it")
    elif isinstance(draft.get(response), int):
        stronger = response
        draft.mapped(response, "gconfig.max_new_tokens", draft.read(response, whole))
    else:
        return
    for section in (GENERATING, HELD_OUT):
        draft.implied(section + "max_new_tokens", f"{stronger} overrides it")
    _held_out_length(draft, draft.recipe["gconfig.max_new_tokens"])


def _held_out_length(draft: Draft, of_training: int) -> None:
    """Convert the length of held-out prompts and responses together."""
    key = "val_sequence_length"
    if not draft.writes(key):
        return
    longest = draft.read(key, whole) - draft.read("val_prompt_length", whole, draft.get("prompt_length"))
    if longest == of_training:
        draft.implied(key, f"held-out responses have gconfig.max_new_tokens={of_training} too")
    else:
        draft.mapped(key, "evaluator.max_new_tokens", longest, "without the prompt")


def _sequence_length(draft: Draft) -> int | None:
    """Return the tokens of the longest prompt and response together; None if the source does not say."""
    for key in (MAX_LENGTH, "gconfig.max_tokens"):
        if key in draft.recipe:
            return int(draft.recipe[key])
    lengths = draft.get("prompt_length"), draft.recipe.get("gconfig.max_new_tokens")
    return sum(lengths) if all(isinstance(length, int) for length in lengths) else None


def _micro_batches(draft: Draft) -> None:
    """Convert the size of a micro-batch: a token budget with dynamic batches or packing, else a number of sequences."""
    packed = TRAIN + "sequence_packing_args.max_packed_sequence_length_train"
    dynamic = TRAIN + "max_tokens_per_microbatch_in_train"
    for switch, key in ((TRAIN + "use_sequence_packing", packed), (TRAIN + "use_dynamic_batching_in_train", dynamic)):
        if draft.get(switch) is True and draft.get(key):
            draft.mapped(key, TOKEN_BUDGET_KEY, draft.read(key, whole))
            draft.implied(PER_DEVICE, f"{key} overrides it")
        draft.implied(switch, f"{reasons.ALWAYS_PACKED}, under a token budget")
        draft.implied(key, f"{switch} is off")
    if draft.is_open(PER_DEVICE):
        token_budget(draft, PER_DEVICE, draft.get(PER_DEVICE), _sequence_length(draft))


def _passes_without_gradients(draft: Draft) -> None:
    """Convert the batch sizes for log-probs and values of the actor, a critic and a reference."""
    sections = {"actor": TRAIN, "ref": REF, "critic": CRITIC}
    for role, to, own in infer_budgets(draft):
        section = sections[role]
        switch, tokens = section + "use_dynamic_batching_in_infer", section + "max_tokens_per_microbatch_in_infer"
        sequences = section + "infer_batch_size"
        if draft.get(switch) is True and draft.get(tokens) is not None:
            own.mapped(tokens, to, draft.read(tokens, whole))
            draft.implied(switch, reasons.TOKEN_BUDGET)
            draft.implied(sequences, f"{tokens} overrides it")
        elif draft.writes(sequences):
            token_budget(own, sequences, draft.get(sequences), _sequence_length(draft), to)
        draft.implied(tokens, f"{switch} is off")


def count_updates(draft: Draft) -> None:
    """Convert gradient accumulation to updates in a step, and warm-up steps, which are counted in updates.

    In ROLL, an update takes per_device_train_batch_size * gradient_accumulation_steps sequences of each replica, and
    the number of replicas is known only after the layout.
    """
    _updates(draft, "actor", ACCUMULATION, PER_DEVICE)
    if draft.writes(WARMUP):
        warmup(draft, WARMUP, None)
    if has_critic(draft):
        own = CRITIC + "training_args."
        _updates(draft, "critic", own + "gradient_accumulation_steps", own + "per_device_train_batch_size")


def _updates(draft: Draft, role: Role, accumulation: str, per_device_key: str) -> None:
    """Convert a role's accumulation to the updates in a step; it is unsupported if they do not divide its sequences."""
    steps, per_device, to = draft.get(accumulation), draft.get(per_device_key), f"{role}.ppo_n_minibatches"
    plan = draft.plans.get(role, draft.plans.get("actor"))
    if plan is None or plan.n_devices is None or not isinstance(steps, int) or not isinstance(per_device, int):
        draft.unsupported(accumulation, f"the updates in a step cannot be counted here: set {to}")
        return
    replicas = plan.n_devices // (plan.get("tp") * plan.get("pp") * plan.get("cp"))
    prompts, group = agents.step_of(draft)
    update, responses = per_device * steps * replicas, prompts * group
    if update < 1 or responses % update or prompts % (responses // update):
        text = (
            f"{prompts} prompts of {group} responses do not divide into updates of {update} sequences in whole groups"
        )
        draft.unsupported(accumulation, text)
        return
    note = f"{prompts}*{group} sequences in updates of {per_device}*{steps}*{replicas} replicas"
    draft.mapped(accumulation, to, responses // update, note)


# Algorithm


def _advantages(draft: Draft) -> None:
    """Convert `norm_mean_type` and `norm_std_type`, or the older `reward_norm`, or whitening if neither is set."""
    if draft.get(PURE) is True:
        train_on_teacher_alone(draft, PURE)
        for key in ADVANTAGE_KEYS:
            draft.implied(key, NO_REWARD)
        return
    estimator, (_, n_samples) = str(draft.get("adv_estimator")), agents.step_of(draft)
    if estimator in ("gae", "ppo"):
        _gae(draft)
        return
    if agents.is_agentic(draft):
        agents.normalise(draft)
        _whitening(draft)
        return
    if estimator != "reinforce":
        advantages(draft, "adv_estimator", estimator, divides_by_std=True, n_samples=n_samples)
    draft.implied("adv_estimator", "the advantages are the normalised rewards")
    levels = {"batch": "batch", "group": "group"}
    for key, target in (("norm_mean_type", MEAN_LEVEL), ("norm_std_type", STD_LEVEL)):
        if draft.get(key) in levels:
            draft.mapped(key, target, levels[draft.get(key)])
        elif draft.get(key) is not None:
            draft.unsupported(key, "rewards are normalised over the group, the batch, or not at all")
    if draft.get("reward_norm") in levels:
        target = STD_LEVEL if draft.get("reward_scale") is True else MEAN_LEVEL
        draft.mapped("reward_norm", target, levels[draft.get("reward_norm")])
        if draft.get("reward_shift") is not True:
            draft.recipe.setdefault(STD_LEVEL, levels[draft.get("reward_norm")])
    for key in ("reward_shift", "reward_scale"):
        draft.implied(key, "it says whether reward_norm is about the mean or the standard deviation")
    if draft.get("reward_norm") in (None, "None"):
        draft.implied("reward_norm", "norm_mean_type and norm_std_type say how rewards are normalised")
    _whitening(draft)
    if estimator == "reinforce":
        for target in (MEAN_LEVEL, STD_LEVEL):
            draft.recipe.setdefault(target, "none")


def _gae(draft: Draft) -> None:
    """Convert the keys of PPO with a critic; the critic's own section is converted by the rule table."""
    draft.assume(CRITICS)
    gae(draft, "adv_estimator", {"gamma": "actor.discount", "lambd": "actor.gae_lambda"})
    draft.sets(
        "value_clip", "critic.eps_clip", draft.read("value_clip", number) if draft.writes("value_clip") else None
    )
    draft.sets("whiten_advantages", WHITENS, draft.get("whiten_advantages") is True)
    for key in ("norm_mean_type", "norm_std_type", "reward_norm"):
        if draft.get(key) is not None:
            draft.unsupported(key, NOT_NORMALISED)
    for key in ("reward_shift", "reward_scale"):
        draft.implied(key, "it says whether reward_norm is about the mean or the standard deviation")


def _critics_batches(draft: Draft) -> None:
    """Convert the critic's micro-batches and what is counted in its updates."""
    if not has_critic(draft):
        return
    own, critic = CRITIC + "training_args.", ForCritic(draft)
    if draft.writes(own + "per_device_train_batch_size"):
        per_device = draft.get(own + "per_device_train_batch_size")
        token_budget(critic, own + "per_device_train_batch_size", per_device, _sequence_length(draft))
    warmup(critic, own + "warmup_steps", None)
    draft.awaiting.add(own + "gradient_accumulation_steps")
    switch = CRITIC + "model_args.disable_gradient_checkpointing"
    is_on = not draft.read(switch, flag, False)
    if (plan := draft.plans.get("critic")) is not None and plan.shards_weights:
        megatron.checkpoint_layers(critic, switch, is_on)
    else:
        megatron.recompute(critic, CRITIC + CONFIG, switch, is_on)


def _whitening(draft: Draft) -> None:
    key = "whiten_advantages"
    if draft.get(key) is True:
        draft.mapped(key, "actor.whiten_advantages", True)
        if len({name.split(".")[1] for name in draft.keys("rewards.*")}) > 1:
            draft.recipe["actor.whiten_by_source"] = True
            draft.notes.append("actor.whiten_by_source=true: ROLL whitens the advantages of each domain")
    draft.implied(key, "it is switched off")


def _kl(draft: Draft) -> None:
    """Convert the KL term to the reference: a loss (estimator k3), or a penalty on each token's reward."""
    if draft.get("use_kl_loss") is True:
        draft.mapped("use_kl_loss", "actor.kl_in", "loss")
        draft.recipe["actor.kl_estimator"] = "k3"
        draft.mapped("kl_loss_coef", "actor.kl_ctl", draft.read("kl_loss_coef", number, 0.0), "estimator k3")
    elif draft.get("add_token_level_kl") is True:
        draft.mapped("add_token_level_kl", "actor.kl_in", "reward")
        draft.mapped("kl_penalty", "actor.kl_estimator", draft.read("kl_penalty", KL_ESTIMATOR, "kl"))
        draft.recipe.setdefault("actor.kl_estimator", "k1")
        draft.recipe.setdefault("actor.kl_ctl", draft.read("init_kl_coef", number, 0.2))
        draft.mapped("init_kl_coef", "actor.kl_ctl", draft.recipe["actor.kl_ctl"])
    if draft.get("add_token_level_kl") is True:
        draft.unsupported("add_token_level_kl", reasons.ONE_KL)
    for key in ("use_kl_loss", "kl_loss_coef", "add_token_level_kl", "init_kl_coef", "kl_penalty"):
        draft.implied(key, "this KL term is off")
    if draft.get("target_kl") is not None and draft.recipe.get("actor.kl_in") == "reward":
        draft.mapped("target_kl", "actor.kl_target", draft.read("target_kl", number))
        draft.mapped("kl_horizon", "actor.kl_horizon", draft.read("kl_horizon", whole, 10_000))
    for key in ("target_kl", "kl_horizon"):
        draft.implied(key, "only an adaptive weight of a KL term in the reward reads this")


def _clipping(draft: Draft) -> None:
    """Convert the clip range, which has one ratio or one for each side, and dual clipping."""
    both = draft.read("pg_clip", number, 0.2)
    if draft.get(TRAIN + "pg_variant") == "tis":
        draft.recipe |= {"actor.eps_clip": 1.0, "actor.eps_clip_higher": 0.0}
    if draft.get(TRAIN + "pg_variant") == "cispo":
        for key, target in (("cispo_epsilon_low", "actor.eps_clip"), ("cispo_epsilon_high", "actor.eps_clip_higher")):
            draft.sets(TRAIN + key, target, draft.read(TRAIN + key, number, 0.1))
    if draft.get(TRAIN + "pg_variant") in ("cispo", "tis"):
        for key in ("pg_clip", "use_pg_clip_range", "pg_clip_low", "pg_clip_high", "dual_clip_loss"):
            draft.implied(key, "the variant has its own clip range")
        return
    if draft.get("use_pg_clip_range") is True:
        for key, target in (("pg_clip_low", "actor.eps_clip"), ("pg_clip_high", "actor.eps_clip_higher")):
            draft.recipe.setdefault(target, draft.read(key, number, 0.2))
            draft.mapped(key, target, draft.recipe[target])
        draft.implied("pg_clip", "pg_clip_low and pg_clip_high override it")
    draft.mapped("pg_clip", "actor.eps_clip", both)
    for key in ("use_pg_clip_range", "pg_clip_low", "pg_clip_high"):
        draft.implied(key, "use_pg_clip_range says whether the range has one ratio or two")
    if draft.get("dual_clip_loss") is True:
        draft.mapped("dual_clip_loss", "actor.c_clip", 1 + 2 * both, "1 + 2 * pg_clip")


def _evaluation(draft: Draft) -> None:
    """Convert the sampling of held-out prompts; options that it does not have are as in training."""
    own = HELD_OUT
    if not draft.writes(own + "temperature"):
        return
    temperature = draft.read(own + "temperature", number)
    is_greedy = temperature == 0 or draft.get(own + "do_sample") is False
    draft.sets(own + "do_sample", "evaluator.greedy", is_greedy)
    if not is_greedy:
        note = "sampled: evaluator.greedy=false"
        draft.mapped(own + "temperature", "evaluator.temperature", temperature, note)
    draft.implied(own + "temperature", reasons.GREEDY)
    cut_of_held_out(draft, own, GENERATING, samples=not is_greedy)


DIALECT = Dialect(
    "ROLL",
    {REINFORCEMENT: Conversion(convert, RULES.defaults, count_updates), SFT: given.FINE_TUNING, PREFERENCES: given.DPO},
    SIGNS,
    merge=merge,
    read=files.read,
)
