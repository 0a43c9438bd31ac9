"""AReaL: YAML and dotted overrides. Its keys are Fivefold's own where they mean the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fivefold.config.keys import known_keys
from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold_import import megatron, reasons
from fivefold_import.adapters import convert_adapters
from fivefold_import.areal.agents import convert_agents, group_size
from fivefold_import.areal.layout import TRAINERS, backends, trainers_backend
from fivefold_import.areal.rules import CRITICS, GIVEN, RULES, TABLES
from fivefold_import.corrections import decoupled
from fivefold_import.critic import ADVANTAGE, NOT_NORMALISED, WHITENS, ForCritic, has_critic
from fivefold_import.defaults import own_default
from fivefold_import.dialect import Conversion, Dialect, merged
from fivefold_import.draft import Draft
from fivefold_import.layouts import engine_of
from fivefold_import.models import is_moe, reads_images
from fivefold_import.settings import MEAN_LEVEL, STD_LEVEL, ask_as_user, cut_of_held_out
from fivefold_import.source import Document
from fivefold_import.tasks import DISTILLATION, PREFERENCES, REINFORCEMENT, REWARD_MODEL, SFT, Sign
from fivefold_import.values import flag, number, whole

GSM8K = "openai/gsm8k"
COLUMNS = "AReaL chooses columns by the data set's name"
WITH_IMAGES = ("clevr_count_70k", "geometry3k")
"""Parts of the names of data sets whose rows have `images`, which AReaL scales before the model's processor does."""
SIGNS = (
    Sign("train_dataset.type", SFT, ("sft",)),
    Sign("train_dataset.type", PREFERENCES, ("dpo",)),
    Sign("train_dataset.type", REWARD_MODEL, ("rw",)),
    Sign("actor.is_critic", REWARD_MODEL),
    Sign("actor.self_distillation.*", DISTILLATION),
    Sign("teacher.rl_loss_weight", DISTILLATION, ("0", "0.0")),
)
"""Keys of AReaL's other trainers."""


def convert(draft: Draft) -> None:
    """Convert the keys that need other keys, then the rest by the rule table."""
    if draft.keys("critic.*"):
        _critic(draft)
    trainers = backends(draft)
    _adapters(draft, trainers)
    convert_agents(draft)
    _advantages(draft)
    _kl(draft)
    _unused(draft, trainers)
    _recompute(draft, trainers)
    _router(draft, trainers)
    _decoupled(draft)
    _repeated(draft)
    _engines(draft)
    _evaluation(draft)
    draft.apply(RULES.rules)
    if "train_dataset.path" in draft.recipe:
        ask_as_user(draft, "AReaL")
    _note_data(
        draft, "prompt_key and answer_key", "the data have the columns prompt and reward_model", longer="prompts"
    )


def convert_given(draft: Draft) -> None:
    """Convert sources that train on given answers, by the rules of reinforcement learning."""
    trainers = trainers_backend(draft)
    _adapters(draft, trainers)
    _unused(draft, trainers)
    _recompute(draft, trainers)
    _router(draft, trainers)
    _repeated(draft)
    if draft.writes("valid_dataset.path") and not draft.writes("valid_dataset.split"):
        draft.recipe["valid_dataset.split"] = "test"
    if draft.get("ref.path") is not None and draft.get("ref.path") == draft.get("actor.path"):
        draft.implied("ref.path", "the actor's initial weights")
    draft.apply(GIVEN.rules)
    is_sft = draft.schema is SFTRecipe
    keys = "prompt_key and response_key" if is_sft else "prompt_key, chosen_key and rejected_key"
    columns = "prompt and response" if is_sft else "prompt, chosen and rejected"
    _note_data(draft, keys, f"the data have the columns {columns}", longer="examples")


def _note_data(draft: Draft, keys: str, unless: str, *, longer: str) -> None:
    """Add notes on what AReaL does with weights and data where its keys do not say so."""
    if any(f"saver.{name}" in draft.recipe for name in ("freq_epochs", "freq_steps", "freq_secs")):
        draft.recipe["saver.max_to_keep"] = None
        draft.notes.append("AReaL keeps all the weights that it saves: saver.max_to_keep=null, each in its own folder")
    _names_images(draft)
    if "train_dataset.path" in draft.recipe and not _names_gsm8k(draft):
        draft.notes.append(f"{COLUMNS}; set {keys} of train_dataset and valid_dataset, unless {unless}")
    if not draft.writes("train_dataset.max_length"):
        most = own_default("train_dataset.max_length")
        draft.notes.append(
            f"AReaL trains on {longer} of any length; {longer} of more than {most} tokens are dropped here"
        )


def _names_images(draft: Draft) -> None:
    """Name the column of images of the data sets whose images AReaL's code reads, for a model that sees."""
    keys = [f"{section}.path" for section in ("train_dataset", "valid_dataset")]
    found = [key for key in keys if any(name in str(draft.recipe.get(key, "")) for name in WITH_IMAGES)]
    if not found or draft.schema is not TrainRecipe or not reads_images(str(draft.recipe.get("actor.path", ""))):
        return
    for key in found:
        draft.recipe[key.replace("path", "image_key")] = "images"
    draft.notes.append(
        "image_key=images, as AReaL's code has it, which also scales images first: bound their sizes with min_pixels "
        "and max_pixels of the data set"
    )


def _names_gsm8k(draft: Draft) -> bool:
    """Give data sets that are GSM8K of the hub their configuration and columns; return whether all of them are."""
    answers = {TrainRecipe: "answer_key", SFTRecipe: "response_key"}
    paths = [key for key in ("train_dataset.path", "valid_dataset.path") if key in draft.recipe]
    found = [key for key in paths if draft.recipe[key] == GSM8K and draft.schema in answers]
    for key in found:
        section = key.removesuffix("path")
        draft.revise(key, f"{GSM8K}:main", "with its configuration, as AReaL reads it")
        draft.recipe |= {f"{section}prompt_key": "question", f"{section}{answers[draft.schema]}": "answer"}
    if found and draft.schema is TrainRecipe:
        draft.notes.append(
            f"{GSM8K}: AReaL asks for the final answer in \\boxed{{}} after each question, which stands alone here; "
            "`fivefold data gsm8k` writes questions with an instruction"
        )
    return found == paths


# Algorithm


def _critic(draft: Draft) -> None:
    """Convert the signs of a critic, and its devices: its own, unless it is colocated."""
    draft.assume(CRITICS)
    draft.recipe[ADVANTAGE] = "gae"
    for name in ("discount", "gae_lambda"):
        if draft.get(f"actor.{name}") is not None:
            draft.mapped(f"actor.{name}", f"actor.{name}", draft.read(f"actor.{name}", number))
    if draft.get("allocation_mode"):
        for key in ("critic.backend", *draft.keys("critic.scheduling_strategy*")):
            draft.implied(key, "allocation_mode overrides it")
        return
    key, target = "critic.scheduling_strategy.type", "critic.scheduling_strategy.target"
    is_beside = draft.get(key) == "colocation" and draft.get(target) == "actor"
    draft.sets(key, "critic.colocate", is_beside)
    draft.implied(target, f"it follows from {key}")


def _advantages(draft: Draft) -> None:
    """Convert `reward_norm`, or `adv_norm` if there is no other.

    Without a critic, advantages are normalised rewards, so there is one normalisation besides that over all tokens.
    """
    rewards, own = "actor.reward_norm.", "actor.adv_norm."
    if has_critic(draft):
        _advantages_of_critic(draft, rewards, own)
        return
    is_white = _whitens(draft, own)
    section, other = (rewards, own) if is_white or draft.keys(rewards + "*") else (own, rewards)
    if draft.keys(section + "*"):
        draft.assume(TABLES["normalisation"].under(section).defaults)
    n_samples = group_size(draft)
    for name, target in (("mean_level", MEAN_LEVEL), ("std_level", STD_LEVEL)):
        level = draft.get(section + name)
        draft.recipe.setdefault(target, level if level in ("group", "batch") else "none")
        note = "" if section == rewards else "rewards are normalised"
        draft.mapped(section + name, target, draft.recipe[target], note)
    draft.all_unsupported(other + "*", f"rewards are normalised once, as {section}* says")
    if draft.recipe[STD_LEVEL] == "none":
        draft.implied(section + "eps", "no standard deviation divides")
    elif draft.get(section + "eps") is not None:
        draft.mapped(section + "eps", "actor.reward_norm.eps", draft.read(section + "eps", number))
    for key in (section + "group_size", "actor.group_size"):
        if draft.get(key) == n_samples:
            draft.implied(key, "a group is the gconfig.n_samples responses of a prompt")
        draft.unsupported(key, f"a group is the gconfig.n_samples={n_samples} responses of a prompt")
    _leave_one_out(draft, section + "mean_leave1out", n_samples)
    if draft.get(section + "std_unbiased", True) is True:
        draft.implied(section + "std_unbiased", "the standard deviation is divided by n - 1")
    draft.unsupported(section + "std_unbiased", "the standard deviation is divided by n - 1")


def _whitens(draft: Draft, section: str) -> bool:
    """Convert `adv_norm` over the batch, whose mean and standard deviation are over tokens; return whether it is so."""
    if not draft.keys(section + "*"):
        return False
    if any(draft.get(f"{section}{name}_level", "batch") != "batch" for name in ("mean", "std")):
        return False
    for name in ("mean_level", "std_level"):
        draft.mapped(f"{section}{name}", "actor.whiten_advantages", True)
    draft.recipe["actor.whiten_advantages"] = True
    draft.all_implied(section + "*", "advantages are whitened over all tokens of the step")
    return True


def _advantages_of_critic(draft: Draft, rewards: str, own: str) -> None:
    """Convert the normalisation of advantages that come from a critic."""
    if not _whitens(draft, own):
        draft.recipe[WHITENS] = False
    for key in (*draft.keys(rewards + "*"), *draft.keys(own + "*")):
        draft.unsupported(key, NOT_NORMALISED)
    draft.implied("actor.group_size", "without a normalisation, groups do not matter")


def _leave_one_out(draft: Draft, key: str, n_samples: Any) -> None:
    """Convert a mean that leaves the response itself out.

    r - mean of the others = n / (n - 1) * (r - mean of all), a factor that dividing by a standard deviation would undo.
    """
    exact = draft.recipe[MEAN_LEVEL] == "group" and draft.recipe[STD_LEVEL] == "none" and n_samples > 1
    if draft.get(key) is True and exact and not draft.writes("actor.reward_scaling"):
        draft.mapped(key, "actor.reward_scaling", n_samples / (n_samples - 1), "n / (n - 1)")
    elif draft.get(key) is True:
        reason = "the mean is over all responses, the same up to a factor only if no standard deviation divides"
        draft.unsupported(key, reason)
    draft.implied(key, "it is switched off")


def _kl(draft: Draft) -> None:
    """Convert the KL term: a penalty on each token's reward, if a reference is configured."""
    weight = draft.read("actor.kl_ctl", number, 0.1)
    has_reference = bool(draft.keys("ref.*"))
    if weight > 0 and has_reference:
        draft.recipe["actor.kl_in"] = "reward"
        draft.sets("actor.kl_ctl", "actor.kl_ctl", weight, "actor.kl_in=reward")
        draft.recipe["actor.kl_estimator"] = draft.get("actor.kl_estimator", "k1")
        if draft.get("ref.path") == draft.get("actor.path"):
            draft.implied("ref.path", "the actor's initial weights")
        return
    if weight > 0:
        draft.implied("actor.kl_ctl", "no reference is configured")
    draft.implied("actor.kl_estimator", "there is no KL term")
    draft.all_implied("ref.*", reasons.NO_REFERENCE)


def _unused(draft: Draft, trainers: set[str]) -> None:
    """Make the options of engines that the source does not train with implied."""
    for name in sorted(set(TRAINERS) - trainers):
        draft.all_implied(
            f"actor.{name}.*", f"only {name} reads this, and the source trains with {' and '.join(sorted(trainers))}"
        )


def _adapters(draft: Draft, trainers: set[str]) -> None:
    """Convert the adapters of actor and critic: PEFT's, or Megatron-Bridge's, whose experts share them."""
    for role, own in (("actor", draft), ("critic", ForCritic(draft))):
        if draft.get(f"{role}.use_lora") is not True or (role == "critic" and not has_critic(draft)):
            continue
        draft.assume(TABLES["lora"].under(f"{role}.").defaults)
        model, shares = str(draft.get(f"{role}.path", "")), "megatron" in trainers
        if shares and is_moe(model):
            draft.notes.append(reasons.experts_apart(role))
        convert_adapters(own, f"{role}.", "lora_rank", model, targets="target_modules", whole_rank=not shares)


def _recompute(draft: Draft, trainers: set[str]) -> None:
    """Convert gradient checkpointing, whose granularity for Megatron-Core is `full` unless written."""
    switch, key = "actor.gradient_checkpointing", "actor.megatron.recompute_granularity"
    is_on = draft.read(switch, flag, False)
    engine = engine_of(draft, "actor")
    if engine == "megatron" and "megatron" in trainers:
        granularity = draft.get(key, "full") if is_on else "none"
        written = key if draft.writes(key) and is_on else switch
        draft.mapped(written, "actor.megatron.recompute", granularity)
        draft.implied(switch, f"it follows from {key}")
        for name in draft.keys("actor.megatron.recompute_*"):
            if not is_on:
                draft.implied(name, f"{switch} is off")
        megatron.recompute_ways(draft, "actor.megatron.", granularity)
    megatron.checkpoint_layers(draft, switch, is_on, engine)
    draft.all_implied("ref.gradient_checkpointing", reasons.ONLY_TRAINING_RECOMPUTES)
    if draft.writes("critic.gradient_checkpointing"):
        is_on = draft.read("critic.gradient_checkpointing", flag)
        megatron.checkpoint_layers(ForCritic(draft), "critic.gradient_checkpointing", is_on, engine_of(draft, "critic"))


def _router(draft: Draft, trainers: set[str]) -> None:
    """Take the defaults of a router that is trained with Megatron-Core: the bridge sets its auxiliary loss."""
    if "megatron" in trainers:
        weight = 1e-3 if draft.get("actor.megatron.bridge_type") == "megatron-bridge" else 0.0
        known = {"moe_aux_loss_coeff": weight}
        megatron.router_defaults(draft, "actor.megatron.", str(draft.get("actor.path", "")), known)


def _decoupled(draft: Draft) -> None:
    """Convert the old log-probabilities of the decoupled objective, and the keys that only it reads."""
    key, recompute = "actor.use_decoupled_loss", "actor.recompute_logprob"
    if draft.get(key, False) is True:
        if draft.get(recompute) is not True or draft.get("actor.prox_logp_method") == "loglinear":
            draft.implied(recompute, f"{key} finds them anyway")
        decoupled(draft, key)
    else:
        names = (
            "behav_imp_weight_cap",
            "behave_imp_weight_*",
            "prox_logp_method",
            "rejection_sampling*",
            "m2_threshold",
        )
        for name in (f"actor.{name}" for name in names):
            draft.all_implied(name, f"{key} is off")


# Keys that repeat others, and evaluation


def _repeated(draft: Draft) -> None:
    """Make keys implied that repeat another: the run's name and folder in each section, sampling and data."""
    for name in ("experiment_name", "trial_name", "fileroot", "tokenizer_path"):
        for key in draft.keys(f"*.{name}"):
            if key != "cluster.fileroot":
                draft.implied(key, "all sections have one name, folder and tokenizer")
    same = {
        "actor.temperature": "gconfig.temperature",
        "actor.max_new_tokens": "gconfig.max_new_tokens",
        "rollout.consumer_batch_size": "train_dataset.batch_size",
        "tokenizer_path": "actor.path",
        "ref.dtype": "actor.dtype",
        "ref.temperature": "gconfig.temperature",
    }
    for key, other in same.items():
        if draft.get(key) is not None and draft.get(key) == draft.get(other):
            draft.implied(key, f"it has the value of {other}")


def _engines(draft: Draft) -> None:
    """Make the options of engines that do not generate implied."""
    backends = f"{draft.recipe.get('allocation_mode', '')} {draft.recipe.get('rollout.backend', '')}"
    for engine in ("sglang", "vllm"):
        if engine in backends:
            draft.assume(TABLES[engine].defaults)
        else:
            draft.all_implied(f"{engine}.*", f"the rollout does not run {engine}")


def _evaluation(draft: Draft) -> None:
    """Convert the sampling of held-out prompts; options that it does not have are as in training."""
    own, train = "eval_gconfig.", "gconfig."
    options = {"n_samples": whole, "greedy": flag, "temperature": number, "max_new_tokens": whole}
    for name, convert in options.items():
        if draft.writes(own + name):
            draft.mapped(own + name, f"evaluator.{name}", draft.read(own + name, convert))
    cut_of_held_out(draft, own, train, samples=draft.get(own + "greedy") is not True)
    for key in draft.keys(own + "*"):
        name = key.removeprefix(own)
        if draft.get(key) == draft.get(train + name):
            draft.implied(key, reasons.AS_IN_TRAINING)
        draft.unsupported(key, f"evaluation takes {name} from gconfig")
    if draft.keys(own + "*"):
        draft.recipe.setdefault("evaluator.greedy", False)
    elif draft.writes("valid_dataset.path"):
        _unwritten_evaluation(draft)
    if draft.writes("valid_dataset.path") and not draft.writes("valid_dataset.split"):
        draft.recipe["valid_dataset.split"] = "test"


def _unwritten_evaluation(draft: Draft) -> None:
    """Take the sampling of held-out prompts where the source does not say it: a group each, as AReaL's programs do."""
    n_samples = group_size(draft)
    draft.recipe |= {"evaluator.greedy": False, "evaluator.temperature": 0.6, "evaluator.n_samples": n_samples}
    draft.notes.append(
        f"evaluator.temperature=0.6 and evaluator.n_samples={n_samples}: AReaL's example programs set the temperature, "
        "and a group is as large as in training; a program without a temperature samples as in training"
    )


def merge(documents: Sequence[Document]) -> Document:
    """Merge the files; the model of the first releases' fine-tuning gets the name that it has in later ones.

    An `allocation_mode` overrides the layouts of roles in earlier files, as far as it has these roles.
    """
    whole = merged(())
    for document in documents:
        if document.values.get("allocation_mode"):
            overridden = [key for key in whole.values if _is_overridden(key, whole.values[key])]
            whole.values = {key: value for key, value in whole.values.items() if key not in overridden}
        whole.update(document)
    if "model.path" not in whole.values:
        return whole
    named = whole.renamed(_renamed)
    values = {key: _renamed_inside(value) for key, value in named.values.items()}
    if "train_dataset.type" in values:
        return replace(named, values=values)
    # Only fine-tuning had such a section.
    return replace(
        named,
        values={**values, "train_dataset.type": "sft"},
        written={**named.written, "train_dataset.type": "model.*"},
    )


def _is_overridden(key: str, value: Any) -> bool:
    """Return whether a key lays out a role that `allocation_mode` has, or another one that follows it."""
    roles = ("actor.backend", "rollout.backend")
    return key in roles or (key.endswith(".backend") and value in [f"${{{role}}}" for role in roles])


def _renamed(key: str) -> str:
    return f"actor.{key.removeprefix('model.')}" if key.startswith("model.") else key


def _renamed_inside(value: Any) -> Any:
    return value.replace("${model.", "${actor.") if isinstance(value, str) else value


def _of_given(schema: type[Recipe]) -> Conversion:
    """Return the conversion of sources whose recipes are of another kind, with the defaults of the keys that it has."""
    known = set(known_keys(schema))
    renamed = {"beta": "actor.beta", "loss_type": "actor.loss_type"}
    defaults = {key: value for key, value in GIVEN.defaults.items() if renamed.get(key, key) in known}
    return Conversion(convert_given, defaults)


DIALECT = Dialect(
    "AReaL",
    {
        REINFORCEMENT: Conversion(convert, RULES.defaults),
        SFT: _of_given(SFTRecipe),
        PREFERENCES: _of_given(DPORecipe),
        REWARD_MODEL: _of_given(RMRecipe),
    },
    SIGNS,
    merge=merge,
)
