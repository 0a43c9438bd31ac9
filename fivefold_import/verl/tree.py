"""verl's key tree, as far as a key needs other keys to be converted; `keys.yaml` and `rules` have the rest.

siiRL and Trinity-RFT took the tree over (data, actor_rollout_ref, critic, algorithm, trainer), so their dialects call
these functions too. `at` is the section that holds the tree: empty, or Trinity-RFT's `trainer.trainer_config.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from fivefold_import import megatron, reasons
from fivefold_import.critic import ForCritic, gae, has_critic, infer_budgets
from fivefold_import.draft import Degree, Draft, Role, RolePlan
from fivefold_import.serving import copies_of_attention
from fivefold_import.settings import (
    STD_LEVEL,
    advantages,
    cut_of_held_out,
    min_lr,
    rollout_engine,
    token_budget,
    warmup,
)
from fivefold_import.values import KL_ESTIMATOR, LOSS_AGGREGATION, Unfit, flag, number, positive, whole
from fivefold_import.verl.adapters import convert_adapters
from fivefold_import.verl.agents import convert_agents
from fivefold_import.verl.asynchronous import lay_out_apart, prompts_of_step, steps_of_step
from fivefold_import.verl.judge import lay_out_judge
from fivefold_import.verl.rules import ACTOR, AGGREGATION, CRITIC, MODEL, OF_CRITICS, OVERRIDE, REF, ROLLOUT

VEOMNI: Mapping[str, Degree] = {"veomni.ulysses_parallel_size": "cp", "veomni.expert_parallel_size": "ep"}
"""The degrees of VeOmni, which shards with FSDP2."""


@dataclass(frozen=True)
class Tree:
    """Where the tree is in a framework's configuration, and how the framework reads it."""

    etp_follows_tp: bool
    """Whether an expert tensor degree that the source does not write is the tensor degree; if not, it is 1."""
    prefix: str = ""
    """The section that holds the tree, with a dot at the end; empty for the top level."""


def convert_tree(draft: Draft, tree: Tree) -> None:
    """Convert every key of the tree that needs other keys."""
    at = tree.prefix
    _advantages(draft, at)
    lay_out_trainers(draft, tree)
    lay_out_critic(draft, tree)
    _lay_out_reward_model(draft, tree)
    if not tree.prefix:
        lay_out_judge(draft)
    convert_adapters(draft, at + MODEL, at + MODEL + "path", at + CRITIC + "model.")
    recompute(draft, at)
    router(draft, at, at + MODEL + "path")
    _lay_out_rollout(draft, at)
    batch = draft.get(at + "data.train_batch_size") if at else prompts_of_step(draft)
    _mini_batches_of(draft, at + ACTOR, batch)
    micro_batches(draft, at, sequence_length(draft, at))
    critics_batches(draft, at, sequence_length(draft, at), batch)
    _critics_aggregation(draft, at)
    kl(draft, at)
    passes_without_gradients(draft, at, sequence_length(draft, at))
    clipping(draft, at, unwritten=0.2)
    _evaluation(draft, at)
    convert_agents(draft, sequence_length(draft, at))


# Batches


def sequence_length(draft: Draft, at: str) -> int | None:
    """Return the tokens of the longest prompt and response together; None if the source does not say."""
    lengths = [draft.get(at + key) for key in ("data.max_prompt_length", "data.max_response_length")]
    return sum(lengths) if all(isinstance(length, int) for length in lengths) else None


def _mini_batches_of(draft: Draft, section: str, batch: object) -> None:
    """Convert the prompts of an update, of the `batch` prompts of a step."""
    key = section + "ppo_mini_batch_size"
    mini = draft.get(key)
    if mini is None or not isinstance(batch, int):
        return
    if not isinstance(mini, int) or mini < 1 or batch % mini:
        draft.unsupported(key, f"{batch} prompts of a step do not divide into mini-batches of {mini}")
    else:
        draft.mapped(key, "actor.ppo_n_minibatches", batch // mini, f"{batch} prompts in mini-batches of {mini}")


def critics_batches(draft: Draft, at: str, length: int | None, batch: object) -> None:
    """Convert the critic's mini-batches and micro-batches; `batch` is the prompts of a step, `length` as below."""
    if has_critic(draft):
        _mini_batches_of(ForCritic(draft), at + CRITIC, batch)
        _micro_batches_of(ForCritic(draft), at + CRITIC, draft.plans["critic"].get("cp"), length)


def _critics_aggregation(draft: Draft, at: str) -> None:
    """Give the critic the actor's aggregation, which it has where its own is not written."""
    of_actor = at + ACTOR + AGGREGATION
    if not has_critic(draft) or draft.writes(at + CRITIC + AGGREGATION) or not draft.writes(of_actor):
        return
    with suppress(Unfit):  # The actor's key reports it.
        value = LOSS_AGGREGATION(draft.get(of_actor))
        if value == "sequence_sum_fixed":
            draft.notes.append(f"{of_actor} is the critic's too, whose errors have no such aggregation here")
        else:
            draft.recipe["critic.loss_aggregation"] = value


def micro_batches(draft: Draft, at: str, length: int | None) -> None:
    """Convert the size of the actor's micro-batches; `length` is the tokens of the longest sequence, if known."""
    _micro_batches_of(draft, at + ACTOR, draft.plans["actor"].get("cp"), length)


def _micro_batches_of(draft: Draft, section: str, shards: int, length: int | None) -> None:
    """Convert the size of a micro-batch: a token budget if the batch size is dynamic, else a number of sequences."""
    # The framework's budget is one context parallel shard's, the recipe's is a whole micro-batch's.
    dynamic, tokens = section + "use_dynamic_bsz", section + "ppo_max_token_len_per_gpu"
    sequences = section + "ppo_micro_batch_size_per_gpu"
    if draft.get(dynamic) is True and draft.get(tokens) is not None:
        note = f"times {shards} context parallel shards" if shards > 1 else ""
        draft.mapped(tokens, "actor.mb_spec.max_tokens_per_mb", draft.read(tokens, whole) * shards, note)
        draft.implied(sequences, f"{dynamic} is on, so {tokens} counts")
    elif draft.get(sequences) is not None:
        token_budget(draft, sequences, draft.get(sequences), length)
        draft.implied(tokens, f"{dynamic} is off, so {sequences} counts")
    draft.implied(dynamic, reasons.TOKEN_BUDGET)


def passes_without_gradients(draft: Draft, at: str, length: int | None) -> None:
    """Convert the micro-batches of log-probs and values of the actor, a reference and a critic."""
    starts = {"actor": ROLLOUT + "log_prob_", "ref": REF + "log_prob_", "critic": CRITIC + "forward_"}
    actors = draft.get(at + ACTOR + "use_dynamic_bsz")
    for role, to, own in infer_budgets(draft):
        switch, tokens, sequences = (
            at + starts[role] + name
            for name in ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu")
        )
        if draft.get(switch, actors) is True and draft.get(tokens) is not None:
            shards = draft.plans[role].get("cp")
            note = f"times {shards} context parallel shards" if shards > 1 else ""
            own.mapped(tokens, to, draft.read(tokens, whole) * shards, note)
            draft.implied(sequences, f"{tokens} counts")
        elif draft.get(sequences) is not None:
            token_budget(own, sequences, draft.get(sequences), length, to)
            draft.implied(tokens, f"{sequences} counts")


# Layout


def lay_out_trainers(draft: Draft, tree: Tree) -> None:
    """Read how the actor and the reference are laid out."""
    at = tree.prefix
    actor = draft.plans["actor"] = RolePlan(etp_follows_tp=tree.etp_follows_tp)
    if not _trains_on_megatron(draft, at):
        actor.backend = "fsdp"
    elif _engine(draft, at) == "veomni":
        draft.notes.append(f"{at}{ACTOR}veomni: {reasons.EXPERTS_APART}")
    actor.n_devices = _n_devices(draft, at)
    _degrees(draft, "actor", at + ACTOR)
    # The reference takes the actor's degree where its own is not written.
    draft.plans["ref"] = replace(actor, degrees=dict(actor.degrees), keys={}, degree_keys={})
    _degrees(draft, "ref", at + REF)


def lay_out_critic(draft: Draft, tree: Tree) -> None:
    """Read how the critic is laid out, on the actor's devices, and what it recomputes."""
    if not has_critic(draft):
        return
    at, actor = tree.prefix, draft.plans["actor"]
    plan = draft.plans["critic"] = RolePlan(
        actor.backend, etp_follows_tp=tree.etp_follows_tp, n_devices=actor.n_devices
    )
    _degrees(draft, "critic", at + CRITIC)
    if draft.writes(at + CRITIC + "strategy"):
        plan.keys[at + CRITIC + "strategy"] = ""
    switch = at + CRITIC + "model.enable_gradient_checkpointing"
    if plan.shards_weights:
        megatron.checkpoint_layers(ForCritic(draft), switch, is_on=draft.read(switch, flag, True))
        megatron.ignore(draft, at + CRITIC + "megatron.")
    else:
        megatron.recompute(ForCritic(draft), at + CRITIC + OVERRIDE, switch, is_on=True)


def _lay_out_reward_model(draft: Draft, tree: Tree) -> None:
    """Read how a reward model on Megatron-Core is laid out, on the actor's devices."""
    section = tree.prefix + "reward_model."
    if draft.get(section + "enable") is not True or draft.get(section + "strategy") != "megatron":
        return
    plan = draft.plans["reward"] = RolePlan(
        etp_follows_tp=tree.etp_follows_tp, n_devices=draft.plans["actor"].n_devices
    )
    plan.keys[section + "strategy"] = ""
    megatron.degrees(draft, "reward", section + "megatron.")


def recompute(draft: Draft, at: str) -> None:
    """Convert the recomputation of activations, from the keys of the engine that the source trains with."""
    switch = at + MODEL + "enable_gradient_checkpointing"
    if draft.plans["actor"].shards_weights:
        megatron.checkpoint_layers(draft, switch, is_on=draft.read(switch, flag, True))
        megatron.ignore(draft, at + ACTOR + "megatron.")
    else:
        megatron.recompute(draft, at + ACTOR + OVERRIDE, switch, is_on=True)


def router(draft: Draft, at: str, model_key: str) -> None:
    """Take the defaults of a router that is trained with Megatron-Core."""
    if _engine(draft, at) != "veomni" and not draft.plans["actor"].shards_weights:
        megatron.router_defaults(draft, at + ACTOR + OVERRIDE, str(draft.get(model_key, "")), {})


def _degrees(draft: Draft, role: Role, section: str) -> None:
    for name, degree in VEOMNI.items():
        if draft.writes(section + name):
            draft.lay_out(section + name, role, degree)
    if not draft.plans["actor"].shards_weights:
        megatron.degrees(draft, role, section + "megatron.")
        return
    for key in (section + "ulysses_sequence_parallel_size", section + "fsdp_config.ulysses_sequence_parallel_size"):
        if draft.writes(key):
            draft.lay_out(key, role, "cp")


def _trains_on_megatron(draft: Draft, at: str) -> bool:
    """Return whether the source trains with Megatron-Core.

    The strategy says so; if it is not written, the name of the trainer's configuration or the keys in use do.
    """
    key = at + ACTOR + "strategy"
    strategy = _engine(draft, at)
    hints = [str(draft.get(flag_, "")) for flag_ in ("--config-name", "--config-path")]
    if strategy is None:
        return any("megatron" in hint for hint in hints) or bool(draft.keys(at + ACTOR + "megatron.*"))
    for written in (key, at + "model_engine"):
        if not draft.writes(written):
            continue
        if strategy in ("megatron", "fsdp", "fsdp2", "veomni"):
            draft.plans["actor"].keys[written] = ""
        else:
            draft.unsupported(written, f"{strategy!r} is not offered; megatron is laid out in its place")
    if strategy == "veomni":
        return draft.get(at + ACTOR + "veomni.expert_parallel_size", 1) != 1
    return strategy not in ("fsdp", "fsdp2")


def _engine(draft: Draft, at: str) -> object:
    """Return the engine that trains; None if the source does not name it."""
    return draft.get(at + ACTOR + "strategy", draft.get(at + "model_engine"))


def _n_devices(draft: Draft, at: str) -> int | None:
    nodes, gpus = draft.get(at + "trainer.nnodes"), draft.get(at + "trainer.n_gpus_per_node")
    return nodes * gpus if isinstance(nodes, int) and isinstance(gpus, int) else None


def _lay_out_rollout(draft: Draft, at: str) -> None:
    plan = draft.plans["rollout"] = RolePlan("vllm", n_devices=draft.plans["actor"].n_devices)
    draft.is_shared = True
    if not at and (n_devices := lay_out_apart(draft)) is not None:
        plan.n_devices = n_devices
    if draft.get(at + ROLLOUT + "name") is not None:
        rollout_engine(draft, at + ROLLOUT + "name")
    tensor, pipeline = at + ROLLOUT + "tensor_model_parallel_size", at + ROLLOUT + "pipeline_model_parallel_size"
    if plan.backend == "transformers":
        draft.implied(tensor, "each replica of the embedded engine is one process")
        draft.implied(at + ROLLOUT + "max_num_seqs", "only vLLM and SGLang read this")
        return
    draft.lay_out(tensor, "rollout", "tp")
    draft.lay_out(pipeline, "rollout", "pp")
    per_node = draft.read(at + "trainer.n_gpus_per_node", positive, 8)
    copies_of_attention(draft, at + ROLLOUT + "data_parallel_size", str(draft.get(at + MODEL + "path", "")), per_node)


# Algorithm


def _advantages(draft: Draft, at: str) -> None:
    key, std = at + "algorithm.adv_estimator", at + "algorithm.norm_adv_by_std_in_grpo"
    estimator, n_samples = str(draft.get(key, "gae")), draft.read(at + ROLLOUT + "n", positive, 1)
    divides = draft.get(std, True) is True
    if estimator in ("gae", "ppo"):
        draft.assume({at + key: value for key, value in OF_CRITICS.items()})
        gae(draft, key, {at + "algorithm.gamma": "actor.discount", at + "algorithm.lam": "actor.gae_lambda"})
        draft.implied(std, f"only grpo reads this, and {key} is {estimator}")
        return
    if estimator == "cpgd":
        _of_cpgd(draft, at, n_samples)
        return
    advantages(draft, key, estimator, divides_by_std=divides, n_samples=n_samples)
    if estimator in ("grpo", "grpo_vectorized"):
        draft.mapped(std, STD_LEVEL, "group" if divides else "none")
    if estimator == "grpo_passk":
        draft.sets(std, "actor.advantage_kwargs.divide_by_std", divides)
    draft.implied(std, f"only grpo reads this, and {key} is {estimator}")
    draft.all_implied(at + "critic.*", f"{estimator} has no critic")


def _of_cpgd(draft: Draft, at: str, n_samples: int) -> None:
    """Convert siiRL's estimator of CPGD, GRPO's with or without the deviation of the group."""
    key, weight = f"{at}algorithm.adv_estimator", f"{at}algorithm.weight_factor_in_cpgd"
    how = draft.get(weight, "STD_weight")
    if how not in ("STD_weight", "naive"):
        draft.unsupported(weight, f"weights {how!r} of groups are not offered: there are STD_weight and naive")
    divides = how != "naive"
    draft.sets(key, STD_LEVEL, "group" if divides else "none", "the advantages of grpo")
    draft.mapped(weight, STD_LEVEL, "group" if divides else "none")
    advantages(draft, key, "grpo", divides_by_std=divides, n_samples=n_samples)
    draft.implied(f"{at}algorithm.norm_adv_by_std_in_grpo", f"{weight} is in its place")


def kl(draft: Draft, at: str) -> None:
    """Convert the KL term to the reference, which is in the loss or in the reward."""
    in_loss, in_reward = at + ACTOR + "use_kl_loss", at + "algorithm.use_kl_in_reward"
    loss_keys = (at + ACTOR + "kl_loss_coef", at + ACTOR + "kl_loss_type")
    reward_keys = (at + "algorithm.kl_ctrl.kl_coef", at + "algorithm.kl_penalty")
    if draft.get(in_loss) is True:
        _kl_term(draft, in_loss, "loss", *loss_keys, default="low_var_kl")
    if draft.get(in_reward) is True:
        _kl_term(draft, in_reward, "reward", *reward_keys, default="kl")
        _adaptive_weight(draft, at + "algorithm.kl_ctrl.")
    for switch, keys in ((in_loss, loss_keys), (in_reward, reward_keys)):
        draft.implied(switch, "it is off, as by default")
        for key in keys:
            draft.implied(key, f"{switch} is off")
    draft.all_implied(at + "algorithm.kl_ctrl.*", "the weight of the KL term is fixed")


def _adaptive_weight(draft: Draft, section: str) -> None:
    """Convert a weight that follows the divergence towards a target."""
    if draft.get(section + "type", "fixed") != "adaptive" or draft.recipe.get("actor.kl_in") != "reward":
        return
    target = draft.read(section + "target_kl", number, 0.1)
    draft.sets(section + "target_kl", "actor.kl_target", target)
    draft.mapped(section + "type", "actor.kl_target", target, "the weight is adapted")
    draft.mapped(section + "horizon", "actor.kl_horizon", draft.read(section + "horizon", whole, 10_000))


def _kl_term(draft: Draft, switch: str, place: str, weight: str, estimator: str, *, default: str) -> None:
    draft.mapped(switch, "actor.kl_in", place)
    if draft.recipe.get("actor.kl_in") != place:
        for key in (weight, estimator):
            draft.unsupported(key, f"there is one KL term, and it is in the {draft.recipe.get('actor.kl_in')}")
        return
    value = draft.read(weight, number, 0.001)
    draft.sets(weight, "actor.kl_ctl", value)
    try:
        kind = KL_ESTIMATOR(draft.get(estimator, default))
    except Unfit as error:
        draft.unsupported(estimator, str(error))
        return
    draft.sets(estimator, "actor.kl_estimator", kind)


def clipping(draft: Draft, at: str, unwritten: float | None = None) -> None:
    """Convert PPO's clip range: one ratio for both sides, or one for each.

    Args:
        draft: receives the recipe's values and the entries.
        at: the section that holds the tree.
        unwritten: the ratio of a side that is not written; None if `clip_ratio` holds for that side.
    """
    both, low, high = (at + ACTOR + name for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"))
    if draft.writes(low) or draft.writes(high):
        for key, target in ((low, "actor.eps_clip"), (high, "actor.eps_clip_higher")):
            value = draft.read(key, number, draft.read(both, number, 0.2) if unwritten is None else unwritten)
            draft.sets(key, target, value)
        draft.implied(both, f"{low} and {high} override it")
    elif unwritten is not None and draft.get(both, unwritten) != unwritten:
        reason = f"clip_ratio_low and clip_ratio_high override it, and are {unwritten} unless written"
        draft.unsupported(both, f"{reason}; if your release has neither, set actor.eps_clip")
    elif draft.writes(both):
        draft.mapped(both, "actor.eps_clip", draft.read(both, number))


def _evaluation(draft: Draft, at: str) -> None:
    """Convert the sampling of held-out prompts, which has its own defaults; other options are as in training."""
    own = at + ROLLOUT + "val_kwargs."
    if not draft.keys(own + "*"):
        return
    temperature = draft.read(own + "temperature", number, 0)
    # Servers sample by the temperature alone; `do_sample` is false by default, and only Transformers reads that.
    samples = draft.get(own + "do_sample", True) is True and temperature > 0
    if draft.writes(own + "do_sample"):
        draft.mapped(own + "do_sample", "evaluator.greedy", not samples)
    elif samples:
        draft.recipe["evaluator.greedy"] = False
    if samples and draft.writes(own + "temperature"):
        draft.mapped(own + "temperature", "evaluator.temperature", temperature)
    draft.implied(own + "temperature", reasons.GREEDY)
    cut_of_held_out(draft, own, at + ROLLOUT, samples=samples, unwritten={"top_p": 1.0, "top_k": 0})


def training_steps(draft: Draft, at: str) -> int | None:
    """Return the number of training steps; None if the source does not say."""
    total = draft.get(at + "trainer.total_training_steps")
    return total if isinstance(total, int) and total > 0 else None


def warmup_and_rates(draft: Draft, section: str, total_steps: int | None, *, mini_batches: bool = True) -> None:
    """Convert the optimizer's keys below `section` that need others; `lr_warmup_steps` overrides the ratio.

    The critic's keys follow in the same call. With `mini_batches`, a step of the source trains on all of them.
    """
    _warmup_and_rates(draft, section, total_steps, "actor" if mini_batches else None)
    if has_critic(draft):
        role = "critic" if mini_batches else None
        _warmup_and_rates(ForCritic(draft), section.replace(ACTOR, CRITIC), total_steps, role)


def _warmup_and_rates(draft: Draft, section: str, total_steps: int | None, role: str | None) -> None:
    """Convert the keys of one optimizer; `role` has the mini-batches of a step, None: a step is one of them."""
    steps = section + "lr_warmup_steps"
    if draft.writes(steps):
        passes = draft.get(section.removesuffix("optim.") + "ppo_epochs", 1)
        updates = draft.recipe.get(f"{role}.ppo_n_minibatches", 1) * (passes if isinstance(passes, int) else 1)
        updates = max(1, updates // steps_of_step(draft))
        warmup(draft, steps, total_steps, updates=updates)
        if draft.read(steps, whole) > 0:
            draft.implied(section + "lr_warmup_steps_ratio", f"{steps} overrides it")
    if draft.writes(section + "min_lr"):
        min_lr(draft, section + "min_lr", section + "lr")
