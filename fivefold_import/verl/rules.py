"""verl's tables, and the rules of single keys that take more than a lookup; `tree` has the keys that need others."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import import megatron, reasons
from fivefold_import.agents import has_turns
from fivefold_import.algorithms import loss_by_name
from fivefold_import.critic import has_critic, of_critic
from fivefold_import.draft import Draft, Rule
from fivefold_import.rules import to
from fivefold_import.tables import Table, read_tables
from fivefold_import.values import LOSS_AGGREGATION, flag, number, one_of, text, whole
from fivefold_import.verl import adapters, agents, distillation, judge
from fivefold_import.verl.judge import has_judge

ACTOR = "actor_rollout_ref.actor."
REF = "actor_rollout_ref.ref."
MODEL = "actor_rollout_ref.model."
ROLLOUT = "actor_rollout_ref.rollout."
CRITIC = "critic."
OVERRIDE = "megatron.override_transformer_config."

AGGREGATION = "loss_agg_mode"
MODE = "policy_loss.loss_mode"
OVER_SEQUENCES = ("gspo", "geo_mean", "sapo")
"""Losses that are means over sequences whatever `loss_agg_mode` says."""
CHECKPOINTING, CHECKPOINT = "megatron.use_dist_checkpointing", "megatron.dist_checkpointing_path"
"""The switch for a Megatron-Core checkpoint in place of the model's folder, and its path."""
MODEL_FOLDER = "it is switched off: the weights are those of the model's folder"  # english: ok
SHARDS_MORE = (
    "use_megatron_fsdp: Megatron-FSDP shards weights and gradients too; here the distributed optimizer shards the "
    "optimizer's states only. A large model may need t, p or e (`fivefold plan RECIPE --search`), or backend fsdp"
)
SCORE_MODEL = "reward_model.model.path"
PROFILED = "global_profiler.steps"
FILTRATION = one_of(pow="power", max_min="max_min", max_random="max_random")


# Losses


def _is_over_sequences(draft: Draft, section: str) -> bool:
    return str(draft.get(section + MODE)).lower().replace("-", "_") in OVER_SEQUENCES


def _loss(draft: Draft, source: str) -> None:
    """Convert the key that chooses the loss, with the aggregation that some losses prescribe."""
    loss_by_name("vanilla", "bypass_mode")(draft, source)
    if _is_over_sequences(draft, source.removesuffix(MODE)):
        draft.recipe["actor.loss_aggregation"] = "sequence_mean"
        draft.revise("actor.loss", draft.recipe["actor.loss"], "with actor.loss_aggregation=sequence_mean, as there")


def _aggregation(draft: Draft, source: str) -> None:
    """Convert how the losses of tokens become one number."""
    section = source.removesuffix(AGGREGATION)
    if _is_over_sequences(draft, section):
        draft.implied(source, f"{section}{MODE}={draft.get(section + MODE)} is the mean over sequences in any case")
    else:
        to("actor.loss_aggregation", LOSS_AGGREGATION)(draft, source)


def _rounds(draft: Draft, source: str) -> None:
    """Convert the most batches that a step samples; 0 and negative numbers set no limit."""
    most = whole(draft.get(source))
    sampled, trained = draft.get("data.gen_batch_size"), draft.get("data.train_batch_size")
    if isinstance(sampled, int) and isinstance(trained, int) and trained > 0:
        most = -(-most * sampled // trained)  # a round has a batch of prompts here
    if draft.get(source.replace("max_num_gen_batches", "enable")) is True:
        draft.mapped(source, "actor.dynamic_sampling_max_rounds", most if 0 < most <= 1000 else 1000)
    draft.implied(source, "dynamic sampling is switched off")


def _sampled_at_once(draft: Draft, source: str) -> None:
    """Convert the prompts of a round of dynamic sampling; other runs sample what they train on."""
    if draft.get("algorithm.filter_groups.enable") is True:
        draft.implied(source, "a round of dynamic sampling reads a batch of prompts, and what is too many is dropped")
    if draft.get(source) == draft.get("data.train_batch_size"):
        draft.implied(source, reasons.FIXED_BATCH)
    draft.unsupported(source, reasons.FIXED_BATCH)


def _filtration(draft: Draft, source: str) -> None:
    """Convert PF-PPO, which verl has with GAE alone."""
    section, weights = "algorithm.pf_ppo.", "actor.sample_weights."
    if draft.get("algorithm.use_pf_ppo") is True and has_critic(draft):
        rule = draft.read(section + "reweight_method", FILTRATION, "pow")
        for key in ("algorithm.use_pf_ppo", section + "reweight_method"):
            draft.sets(key, weights + "reward", rule, "as often as samples would be drawn; the critic has all")
        if rule == "power":
            power = draft.read(section + "weight_pow", number, 2.0)
            draft.sets(section + "weight_pow", weights + "reward_power", power)
    draft.implied(source, "samples are not filtered, or not by this")


# Weights


def _forward_prefetch(draft: Draft, source: str) -> None:
    """Convert the switch with which FSDP gathers the next layer early."""
    if flag(draft.get(source)):
        draft.mapped(source, "actor.fsdp.forward_prefetch", 1)
    draft.implied(source, reasons.LAYER_UNITS)


def _shard_group(draft: Draft, source: str) -> None:
    """Report the number of replicas over which FSDP shards, which is all of them."""
    plan = draft.plans.get("actor")
    if draft.get(source) == -1 or (plan is not None and draft.get(source) == plan.n_devices):
        draft.implied(source, reasons.STATES_SHARDED)
    draft.unsupported(source, reasons.NO_SHARD_GROUPS)


def _sharded_weights(draft: Draft, source: str) -> None:
    """Report the switch of Megatron-FSDP, in whose place the distributed optimizer shards the optimizer's states."""
    if draft.get(source) is True and SHARDS_MORE not in draft.notes:
        draft.notes.append(SHARDS_MORE)
    draft.implied(source, "the notes say what is sharded" if draft.get(source) is True else "it is switched off")


def _bridge(draft: Draft, source: str) -> None:
    """Convert the switch between the two bridges: mbridge, or megatron-bridge if it is off."""
    if draft.get(source) is False and draft.get(source.replace("vanilla_mbridge", "use_mbridge")) is True:
        draft.mapped(source, "actor.megatron.bridge_type", "megatron-bridge", reasons.OTHER_BRIDGE)
    draft.implied(source, reasons.OWN_BRIDGE)


def _first_weights_switch(draft: Draft, source: str) -> None:
    if draft.get(source) is True:
        note = "a reference without a path starts from it too"
        draft.mapped(source, "actor.megatron.use_dist_checkpointing", True, note)
    draft.implied(source, MODEL_FOLDER)


def _first_weights_path(draft: Draft, source: str) -> None:
    if draft.get(source.replace(CHECKPOINT, CHECKPOINTING)) is True:
        draft.mapped(source, "actor.megatron.dist_checkpointing_path", text(draft.get(source)))
    draft.implied(source, MODEL_FOLDER)


def _same_checkpoint(draft: Draft, source: str) -> None:
    """Convert a reference's checkpoint, which has to be the actor's."""
    section = source.partition("megatron.")[0]
    sections = (section, section.replace(REF, ACTOR))
    used, actors = ((bool(draft.get(role + CHECKPOINTING)), draft.get(role + CHECKPOINT)) for role in sections)
    if not used[0]:
        draft.implied(source, MODEL_FOLDER)
    elif used == actors:
        draft.implied(source, "the reference starts from the actor's weights")
    draft.unsupported(
        source,
        "the reference starts from the actor's weights or from a Hugging Face folder: `fivefold convert` makes one of "
        "the checkpoint, for ref.path",
    )


# Rewards


def _truncation(draft: Draft, source: str) -> None:
    """Convert what becomes of prompts that are too long, unless they are dropped before."""
    side = draft.get(source)
    section = source.rpartition(".")[0]
    if side == "error" or draft.get(f"{section}.filter_overlong_prompts") is True:
        return draft.implied(source, reasons.TOO_LONG)
    if side not in ("left", "right"):
        return draft.unsupported(source, "prompts are cut on the left or on the right, or dropped")
    return draft.mapped(source, "train_dataset.truncation", side)


def _first_rows(to: str) -> Rule:
    """Convert the most rows of a data set; verl may draw others than the first ones."""

    def convert(draft: Draft, source: str) -> None:
        most = whole(draft.get(source))
        if most > 0:
            return draft.mapped(source, to, most, "the first rows")
        return draft.implied(source, "all rows are read")

    return convert


def _punished_from(draft: Draft, source: str) -> None:
    """Report the length from which DAPO's punishment counts back, which is the longest response."""
    if draft.get(source) == draft.get("data.max_response_length", 512):
        return draft.implied(source, "it is gconfig.max_new_tokens")
    return draft.unsupported(source, "the punishment ends at gconfig.max_new_tokens: set actor.overlong_tokens")


def _own_function(draft: Draft, source: str) -> None:
    """Convert the file of a user's own reward function, which is called as verl calls it."""
    path = draft.get(source)
    if path in (None, ""):
        return draft.implied(source, "it is switched off")
    if has_judge(draft):
        return draft.unsupported(source, f"it asks the model that judges: {reasons.OWN_QUESTION}")
    if not str(path).endswith(".py"):
        return draft.unsupported(source, "write it as reward.fn=module:function")
    function = draft.get(source.removesuffix("path") + "name", "compute_score")
    return draft.mapped(source, "reward.fn", f"{path}:{function}", "it is called with verl's argument names")


def _own_arguments(draft: Draft, source: str) -> None:
    section, _, name = source.partition("reward_kwargs.")
    if draft.writes(f"{section}path"):
        draft.mapped(source, f"reward.kwargs.{name}", draft.get(source))
    draft.implied(source, "only a function of the user's own reads this")  # english: ok


def _scored_by_model(draft: Draft, source: str) -> None:
    """Convert the switch of a reward model, whose score then replaces a function's."""
    if draft.get(source) is not True:
        draft.implied(source, "it is switched off")
    elif draft.writes(SCORE_MODEL):
        draft.mapped(source, "reward.fn", "model", "the reward is the model's score alone")
    draft.unsupported(source, f"set reward.fn=model and reward.model.path: {SCORE_MODEL} is not written")


# The run


def _all_samples(draft: Draft, source: str) -> None:
    """Convert a folder for all samples of each step, or of each evaluation, which are in the run's folder here."""
    section = "stats" if "rollout" in source else "evaluator"
    draft.mapped(source, f"{section}.n_logged_samples", "all", "in the run's folder")


def _outputs(draft: Draft, source: str) -> None:
    """Convert the folder of all results, which may be an argument of the script that is not given here."""
    if draft.get(source) in (None, ""):
        why = draft.caveat(source) or "it is empty"
        return draft.implied(source, f"{why}; results go to cluster.fileroot")
    return draft.mapped(source, "cluster.fileroot", text(draft.get(source)), reasons.OWN_OUTPUTS)


def _length(of: str, to_: str) -> Rule:
    """Make a length of the rollout implied if it is the data's, as by default; another one is unsupported."""

    def rule(draft: Draft, source: str) -> None:
        if draft.get(source) == draft.get(of):
            draft.implied(source, f"the length follows from {to_}")
        draft.unsupported(source, f"the length follows from {to_}, which {of} sets to {draft.get(of)}")

    return rule


def _resumed_path(draft: Draft, source: str) -> None:
    """Convert the checkpoint of verl that a run starts from, if `resume_mode` asks for it."""
    if draft.get("trainer.resume_mode") == "resume_path":
        draft.unsupported(source, reasons.OTHER_CHECKPOINTS)
    draft.implied(source, "only resume_mode=resume_path reads this")


def _profiled_steps(draft: Draft, source: str) -> None:
    """Convert the steps that are recorded, which verl counts from 1 as well."""
    chosen = draft.get(source)
    if not chosen:
        draft.implied(source, "no step is recorded, as by default")
    elif isinstance(chosen, list) and all(type(step) is int and step > 0 for step in chosen):
        draft.mapped(source, "profile.steps", chosen, "traces of torch's profiler and, on GPUs, snapshots of memory")
    draft.unsupported(source, f"{chosen!r} is not a list of steps: {reasons.RECORDED}")


def _profiled_ranks(draft: Draft, source: str) -> None:
    chosen = draft.get(source)
    if not chosen or not draft.get(PROFILED):
        draft.implied(source, "no step is recorded, or by rank 0 alone")
    else:
        draft.mapped(source, "profile.ranks", chosen)


def _after_each(frequency: str, epochs: str) -> Rule:
    """Map a number of steps, or the word for the end of each epoch, to one of two keys of the recipe."""

    def rule(draft: Draft, source: str) -> None:
        if draft.get(source) == "after_each_epoch":
            draft.mapped(source, epochs, 1)
        elif whole(draft.get(source)) > 0:
            draft.mapped(source, frequency, whole(draft.get(source)))
        draft.implied(source, "it is switched off")

    return rule


TABLES: Mapping[str, Table] = read_tables(
    "verl",
    {**globals(), **vars(distillation), **vars(agents), **vars(adapters), **vars(judge)},
    {"megatron": megatron.TABLES},
)

RULES = (
    TABLES["data"].under("data.")
    | TABLES["model"].under(MODEL)
    | (TABLES["actor"] | TABLES["losses"]).under(ACTOR)
    | TABLES["reference"].under(REF)
    | TABLES["rollout"].under(ROLLOUT)
    | TABLES["agents"].only_if(has_turns, reasons.ONE_COMPLETION).under(ROLLOUT)
    | TABLES["critic"].wrapped(of_critic).under(CRITIC)
    | TABLES["algorithm"].under("algorithm.")
    | TABLES["reward"]
    | TABLES["trainer"].under("trainer.")
    | TABLES["profiler"].under("global_profiler.", "profiler.")
    | TABLES["distillation"]
    | TABLES["top"]
)
OF_CRITICS = {
    **TABLES["optimizer"].under(CRITIC + "optim.").defaults,
    CRITIC + "optim.lr": 1e-5,
    CRITIC + "grad_clip": 1.0,
    CRITIC + "cliprange_value": 0.5,
}
"""The defaults of a critic; its other ones are those of the actor's keys."""  # english: ok
