"""slime: launch scripts of flags, some of Megatron-LM's and some its own."""

from __future__ import annotations

from fivefold_import import megatron, reasons
from fivefold_import.adapters import convert_adapters
from fivefold_import.agents import leave_open
from fivefold_import.algorithms import choose_loss
from fivefold_import.corrections import correct_rollout
from fivefold_import.critic import INFER_BUDGET_KEY, REFERENCE_BUDGET_KEY, gae
from fivefold_import.dialect import Conversion, Dialect
from fivefold_import.draft import Draft, RolePlan
from fivefold_import.models import is_moe
from fivefold_import.settings import ADVANTAGE, COEFF, MEAN_LEVEL, STD_LEVEL, TOKEN_BUDGET_KEY, token_budget
from fivefold_import.slime import files
from fivefold_import.slime.rules import RULES, TABLES, held_out, server_arguments
from fivefold_import.tables import Table
from fivefold_import.tasks import REINFORCEMENT, SFT, Sign
from fivefold_import.values import KL_ESTIMATOR, Unfit, flag, number, positive

SIGNS = (Sign("loss_type", SFT, ("sft_loss",)),)
ASYNCHRONOUS = "train_async.py"
PER_NODE = 8
"""slime's GPUs of a node, unless they are written."""


def convert(draft: Draft, rules: Table = RULES) -> None:
    """Convert the flags that need other flags, then the rest by the rule table."""
    lay_out(draft)
    convert_model(draft)
    _estimator(draft)
    _kl(draft)
    _correction(draft)
    _batches(draft)
    _generation(draft)
    _teacher(draft)
    if draft.writes("num_rollout"):
        draft.implied("num_epoch", "num_rollout ends the run")
    held_out(draft)
    server_arguments(draft, rules.rules)
    draft.apply(rules.rules)


def convert_given(draft: Draft, rules: Table = RULES) -> None:
    """Convert supervised fine-tuning: rows of conversations, with the flags of reinforcement learning."""
    draft.is_shared = None
    plan = draft.plans["actor"] = RolePlan(etp_follows_tp=True, n_devices=_actor_devices(draft))
    _sizes(draft, _actor_devices(draft))
    megatron.degrees(draft, "actor", "")
    _virtual_stages(draft, plan)
    convert_model(draft)
    _micro_batches(draft)
    draft.sets("input_key", "train_dataset.messages_key", draft.get("input_key", "messages"))
    draft.implied("apply_chat_template", "conversations are rendered by the template")
    draft.implied("label_key", "a conversation has its answers")
    rows = "global_batch_size"
    if draft.writes(rows):
        draft.sets(rows, "train_dataset.batch_size", draft.read(rows, positive))
        draft.implied("rollout_batch_size", f"an update trains on {rows} rows")
    draft.implied("program", "the loss says what it trains")
    draft.apply((rules | TABLES["given"]).rules)


# Layout


def _actor_devices(draft: Draft) -> int:
    return draft.read("actor_num_nodes", positive, 1) * draft.read("actor_num_gpus_per_node", positive, PER_NODE)


def _sizes(draft: Draft, devices: int) -> None:
    """Write the numbers of nodes and of their GPUs."""
    per_node = draft.read("num_gpus_per_node", positive, draft.read("actor_num_gpus_per_node", positive, PER_NODE))
    per_node = min(per_node, devices)
    draft.recipe |= {"cluster.n_gpus_per_node": per_node, "cluster.n_nodes": -(-devices // per_node)}
    draft.mapped("actor_num_nodes", "cluster.n_nodes", draft.recipe["cluster.n_nodes"])
    draft.mapped("actor_num_gpus_per_node", "cluster.n_gpus_per_node", per_node)


def lay_out(draft: Draft) -> None:
    """Read the devices of the actor and of the rollout, and their degrees."""
    trainers = _actor_devices(draft)
    draft.is_shared = draft.get("colocate") is True
    written = draft.get("rollout_num_gpus")
    rollout = trainers if draft.is_shared or written is None else draft.read("rollout_num_gpus", positive)
    _sizes(draft, trainers if draft.is_shared else trainers + rollout)
    actor = draft.plans["actor"] = RolePlan(etp_follows_tp=True, n_devices=trainers)
    megatron.degrees(draft, "actor", "")
    _virtual_stages(draft, actor)
    plan = draft.plans["rollout"] = RolePlan("sglang", n_devices=rollout)
    if draft.writes("rollout_num_gpus"):
        plan.keys["rollout_num_gpus"] = "" if not draft.is_shared else "colocated: the actor's devices"
    draft.lay_out("rollout_num_gpus_per_engine", "rollout", "tp")


def _virtual_stages(draft: Draft, plan: RolePlan) -> None:
    key = "num_layers_per_virtual_pipeline_stage"
    if draft.writes(key):
        layers, each = draft.get("num_layers"), draft.read(key, positive) * plan.get("pp")
        if isinstance(layers, int) and layers % each == 0:
            plan.degrees["vpp"] = layers // each
            plan.keys[key] = f"{layers} layers"
        draft.unsupported(key, "the layers do not divide into such stages: write v in actor.backend")


def convert_model(draft: Draft) -> None:
    """Convert what is recomputed, the router and adapters."""
    model = str(draft.get("hf_checkpoint", ""))
    granularity = draft.get("recompute_granularity")
    if granularity == "selective" and not draft.writes("recompute_modules"):
        draft.recipe["actor.megatron.transformer.recompute_modules"] = ["core_attn"]
    megatron.recompute(draft, "", "recompute_activations", is_on=True)
    if not is_moe(model) and draft.get("num_experts") is None:
        for key in draft.keys("moe_*"):
            draft.implied(key, "a dense model has no experts")
    elif not draft.writes("moe_aux_loss_coeff"):
        draft.implied("moe_router_load_balancing_type", "without moe_aux_loss_coeff, there is no auxiliary loss")
    if draft.get("moe_enable_deepep") is True:
        draft.mapped("moe_enable_deepep", "actor.megatron.token_dispatcher", "flex")
    if draft.get("lora_rank"):
        if is_moe(model):
            draft.notes.append(reasons.experts_apart("actor"))
        convert_adapters(
            draft, "", "lora_rank", model, targets="target_modules", excluded="exclude_modules", whole_rank=False
        )


# Batches


def _batches(draft: Draft) -> None:
    """Convert the samples of an update: a number of them, or a number of updates in a step."""
    prompts, n_samples = draft.get("rollout_batch_size"), draft.read("n_samples_per_prompt", positive, 1)
    size, steps = "global_batch_size", "num_steps_per_rollout"
    if draft.writes(steps):
        draft.sets(steps, "actor.ppo_n_minibatches", draft.read(steps, positive))
        draft.implied(size, f"{steps} says it")
    elif draft.writes(size) and isinstance(prompts, int):
        updates, rest = divmod(prompts * n_samples, draft.read(size, positive))
        if rest or not updates or prompts % updates:
            draft.unsupported(size, f"{prompts} prompts of {n_samples} responses do not divide into such updates")
        draft.mapped(size, "actor.ppo_n_minibatches", updates, f"{prompts * n_samples} samples of a step")
    _micro_batches(draft)


def _micro_batches(draft: Draft) -> None:
    """Convert the size of micro-batches: the tokens of a context shard, or a number of sequences."""
    shards = draft.plans["actor"].get("cp")
    tokens, infer, sequences = "max_tokens_per_gpu", "log_probs_max_tokens_per_gpu", "micro_batch_size"
    if draft.get("use_dynamic_batch_size") is True and draft.writes(tokens):
        note = f"times {shards} context parallel shards" if shards > 1 else ""
        draft.mapped(tokens, TOKEN_BUDGET_KEY, draft.read(tokens, positive) * shards, note)
        draft.implied(sequences, f"{tokens} counts")
        if draft.writes(infer):
            budget = draft.read(infer, positive) * shards
            draft.sets(infer, INFER_BUDGET_KEY, budget, note)
            if draft.compares_with_reference:
                draft.recipe[REFERENCE_BUDGET_KEY] = budget
    elif draft.writes(sequences):
        lengths = [draft.get("rollout_max_prompt_len"), draft.get("rollout_max_response_len")]
        longest = sum(lengths) if all(isinstance(one, int) for one in lengths) else None
        token_budget(draft, sequences, draft.get(sequences), longest)
    draft.implied(tokens, "use_dynamic_batch_size is off")


# Algorithm


def _estimator(draft: Draft) -> None:
    """Convert the estimator, which chooses the loss too, and how the losses of tokens become one number."""
    key, name = "advantage_estimator", str(draft.get("advantage_estimator", "grpo"))
    normalises = draft.get("disable_rewards_normalization") is not True
    divides = draft.get("disable_grpo_std_normalization") is not True
    for own, level in (("disable_rewards_normalization", MEAN_LEVEL), ("disable_grpo_std_normalization", STD_LEVEL)):
        if draft.get(own) is True and name in ("grpo", "gspo", "cispo"):
            draft.mapped(own, level, "none")
    if name in ("grpo", "gspo", "cispo"):
        draft.recipe |= {
            MEAN_LEVEL: "group" if normalises else "none",
            STD_LEVEL: "group" if normalises and divides else "none",
        }
        if name != "grpo":
            choose_loss(draft, key, name)
        draft.mapped(key, MEAN_LEVEL, draft.recipe[MEAN_LEVEL])
    elif name == "ppo":
        gae(draft, key, {"gamma": "actor.discount", "lambd": "actor.gae_lambda"})
        draft.recipe.setdefault("actor.whiten_advantages", draft.get("normalize_advantages") is True)
    elif name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        to = "reinforce_pp" if name == "reinforce_plus_plus" else "reinforce_pp_baseline"
        draft.sets(key, ADVANTAGE, to)
    else:
        draft.unsupported(key, f"the estimator {name!r} is not offered; the recipe trains with GRPO instead")
    by_token = draft.get("calculate_per_token_loss") is True
    draft.recipe["actor.loss_aggregation"] = "token_mean" if by_token else "sequence_mean"
    draft.mapped("calculate_per_token_loss", "actor.loss_aggregation", "token_mean")


def _kl(draft: Draft) -> None:
    """Convert the KL term: in the loss, or in the reward."""
    weight, in_reward = draft.read("kl_loss_coef", number, 0.0), draft.read("kl_coef", number, 0.0)
    if draft.get("use_kl_loss") is not True or not weight:
        if in_reward:
            draft.recipe |= {"actor.kl_in": "reward"}
            draft.sets("kl_coef", "actor.kl_ctl", in_reward, "actor.kl_in=reward")
            _kl_kind(draft)
        return
    draft.sets("kl_loss_coef", "actor.kl_ctl", weight)
    draft.implied("use_kl_loss", "kl_loss_coef is its weight")
    _kl_kind(draft)
    if draft.get("use_unbiased_kl") is True:
        draft.sets("use_unbiased_kl", "actor.kl_unbiased", True)
    if in_reward:
        draft.unsupported("kl_coef", reasons.ONE_KL)


def _kl_kind(draft: Draft) -> None:
    try:
        draft.sets("kl_loss_type", "actor.kl_estimator", KL_ESTIMATOR(draft.get("kl_loss_type", "k1")))
    except Unfit as error:
        draft.unsupported("kl_loss_type", str(error))


def _correction(draft: Draft) -> None:
    """Convert truncated importance sampling, the masks of sequences and the replay of experts."""
    if draft.get("use_tis") is True and draft.get("custom_tis_function_path") is None:
        cap, floor = draft.read("tis_clip", number, 2.0), draft.read("tis_clip_low", number, 0.0)
        keys = {"weight": "token", "weight_cap": cap} | ({"weight_floor": floor} if floor > 0 else {})
        for key in ("use_tis", "tis_clip", "tis_clip_low"):
            correct_rollout(draft, key, keys)
    draft.implied("use_tis", "custom_tis_function_path is in its place, or it is off")
    if draft.get("use_opsm") is True:
        draft.sets("opsm_delta", "actor.opsm_delta", draft.read("opsm_delta", number, 1e-4))
    draft.implied("opsm_delta", "only use_opsm reads this")
    for key, routes in (("use_rollout_routing_replay", "rollout"), ("use_routing_replay", "old_logprobs")):
        if draft.read(key, flag, False):
            draft.mapped(key, "actor.router_replay", routes)
        draft.implied(key, "it is switched off, or the rollout's routes are replayed")


def _teacher(draft: Draft) -> None:
    """Convert distillation from a teacher's log-probs of the student's samples, which are an advantage."""
    key = "use_opd"
    if draft.get(key) is not True:
        draft.implied(key, "it is switched off")
        draft.all_implied("opd_*", "only use_opd reads this")
        return
    draft.sets(key, COEFF, draft.read("opd_kl_coef", number, 1.0))
    draft.mapped("opd_kl_coef", COEFF, draft.recipe[COEFF])
    for name in ("opd_type", "opd_teacher_load", "opd_teacher_urls"):
        draft.unsupported(name, "name the teacher's Hugging Face folder in teacher.path: Fivefold loads it")


def _generation(draft: Draft) -> None:
    """Convert what generates: an agent of the user's, or the asynchronous program."""
    if draft.get("custom_generate_function_path") is not None:
        leave_open(draft, "agent")
    if draft.get("program") == ASYNCHRONOUS:
        steps = draft.read("update_weights_interval", positive, 1)
        note = "the next step's samples are made while a step trains"
        draft.sets("program", "rollout.max_head_offpolicyness", steps, note)
    draft.implied("program", "it trains on samples of the newest weights")


DIALECT = Dialect(
    "slime",
    {REINFORCEMENT: Conversion(convert, RULES.defaults), SFT: Conversion(convert_given, {})},
    SIGNS,
    files.merge,
    files.read,
)
