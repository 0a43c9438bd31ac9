"""SkyRL: scripts with `uv run ... -m skyrl.train.entrypoints.main_base trainer.a=b ...`, or a YAML file of its keys."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold_import import megatron, reasons
from fivefold_import.adapters import convert_adapters
from fivefold_import.agents import has_turns, leave_open
from fivefold_import.algorithms import choose_loss
from fivefold_import.checkpoints import note_kept
from fivefold_import.corrections import correct_rollout
from fivefold_import.critic import INFER_BUDGET_KEY, REFERENCE_BUDGET_KEY, ForCritic, gae, has_critic
from fivefold_import.dialect import Conversion, Dialect, merged
from fivefold_import.draft import Draft, Role, RolePlan
from fivefold_import.models import is_moe
from fivefold_import.settings import ADVANTAGE, MEAN_LEVEL, TOKEN_BUDGET_KEY, rollout_engine, token_budget
from fivefold_import.skyrl.rules import (
    ALGORITHM,
    ASYNCHRONOUS,
    CRITIC,
    GENERATOR,
    POLICY,
    REF,
    RULES,
    TRAINER,
    server_arguments,
)
from fivefold_import.source import Document
from fivefold_import.tasks import REINFORCEMENT
from fivefold_import.values import KL_ESTIMATOR, Unfit, flag, number, one_of, positive, top_k

PROGRAMS = ("main_base", "main_dapo", "main_async", *ASYNCHRONOUS)
"""Programs whose keys are all in the configuration; others train by code."""
PLACEMENT, ENGINE = f"{TRAINER}placement.", f"{GENERATOR}inference_engine."
OLDER = {
    "num_engines": "num_inference_engines",
    "tensor_parallel_size": "inference_engine_tensor_parallel_size",
    "pipeline_parallel_size": "inference_engine_pipeline_parallel_size",
    "data_parallel_size": "inference_engine_data_parallel_size",
    "expert_parallel_size": "inference_engine_expert_parallel_size",
}
"""Keys of `generator.inference_engine`, with their names in older releases; others had the same, in `generator`."""
REDUCTION = one_of(token_mean="token_mean", sequence_mean="sequence_mean", seq_mean_token_sum_norm="sequence_sum_fixed")
SEVERAL_TURNS = ("multi_turn", "search", "text2sql", "mini_swe", "terminal", "web", "agent", "sokoban")
"""Parts of the names of environments whose episodes have several turns."""


def merge(documents: Sequence[Document]) -> Document:
    """Merge the files; a program that trains with its own code is a problem."""
    whole = merged(documents)
    program = whole.program.rpartition(".")[2] if whole.program.count("/") == 0 else whole.program
    if program in PROGRAMS:
        whole.values["program"] = program
        whole.program = ""
    elif program and "sft" not in program and "generate" not in program:
        whole.problems.append(f"{whole.program} trains by its own code, which is not read: write it for the recipe")
    return whole


def convert(draft: Draft) -> None:
    """Convert the keys that need other keys, then the rest by the rule table."""
    _estimator(draft)
    _lay_out(draft)
    _episodes(draft)
    _batches(draft)
    _kl(draft)
    _loss(draft)
    _correction(draft)
    _evaluation(draft)
    server_arguments(draft)
    if draft.get("program") == "main_async":
        draft.sets(
            "program", "rollout.max_head_offpolicyness", 1, "the next step's samples are made while a step trains"
        )
    draft.implied("program", "it trains what the keys say")
    draft.apply(RULES.rules)
    if "train_dataset.path" in draft.recipe:
        draft.notes.append(
            "SkyRL's rows have the ground truth in reward_spec.ground_truth: rename the column to reward_model, or "
            "name one in train_dataset.answer_key"
        )
    note_kept(draft, "SkyRL")


# Layout


def _engine(draft: Draft, name: str) -> str:
    """Return the key of an option of the engines; older releases have it in `generator`."""
    older = GENERATOR + OLDER.get(name, name)
    return older if draft.writes(older) and not draft.writes(ENGINE + name) else ENGINE + name


def _lay_out(draft: Draft) -> None:
    nodes_key, gpus_key = f"{PLACEMENT}policy_num_nodes", f"{PLACEMENT}policy_num_gpus_per_node"
    nodes, per_node = draft.read(nodes_key, positive, 1), draft.read(gpus_key, positive, 1)
    shared_key = f"{PLACEMENT}colocate_all"
    draft.is_shared = draft.read(shared_key, flag, True)
    plan = draft.plans["rollout"] = RolePlan("vllm")
    engines, tensor, pipeline, data, _ = (draft.read(_engine(draft, name), positive, 1) for name in OLDER)
    plan.n_devices = engines * tensor * pipeline * data
    plan.keys[_engine(draft, "num_engines")] = f"{engines} engines"
    draft.lay_out(_engine(draft, "tensor_parallel_size"), "rollout", "tp")
    draft.lay_out(_engine(draft, "pipeline_parallel_size"), "rollout", "pp")
    if draft.get(_engine(draft, "backend")) is not None:
        rollout_engine(draft, _engine(draft, "backend"))
    total = nodes * per_node if draft.is_shared else nodes * per_node + plan.n_devices
    if nodes == 1 and total <= 8:
        per_node = total
    draft.recipe |= {"cluster.n_gpus_per_node": per_node, "cluster.n_nodes": -(-total // per_node)}
    draft.mapped(nodes_key, "cluster.n_nodes", draft.recipe["cluster.n_nodes"])
    draft.mapped(gpus_key, "cluster.n_gpus_per_node", per_node)
    draft.mapped(shared_key, "rollout.colocate", draft.is_shared)
    draft.all_implied(f"{PLACEMENT}*", "the reference and the critic have the policy's devices")
    devices = draft.read(nodes_key, positive, 1) * draft.read(gpus_key, positive, 1)
    _trainer(draft, "actor", POLICY, devices)
    if draft.keys(f"{REF}*"):
        _trainer(draft, "ref", REF, devices)
    if has_critic(draft):
        _trainer(ForCritic(draft), "critic", CRITIC, devices)


def _trainer(own: Draft, role: Role, section: str, devices: int) -> None:
    """Read how a model is laid out, and what of it is recomputed."""
    megatrons = own.get(f"{TRAINER}strategy", "fsdp") == "megatron"
    plan = own.plans[role] = RolePlan("megatron" if megatrons else "fsdp", etp_follows_tp=True, n_devices=devices)
    strategy = f"{TRAINER}strategy"
    if role == "actor" and own.writes(strategy):
        if own.get(strategy) in ("megatron", "fsdp", "fsdp2"):
            plan.keys[strategy] = ""
        else:
            own.unsupported(strategy, f"{own.get(strategy)!r} is not offered; fsdp is laid out in its place")
    at, switch = f"{section}megatron_config.", f"{TRAINER}gradient_checkpointing"
    model = str(own.get(f"{section}model.path", own.get(f"{POLICY}model.path", "")))
    if not megatrons:
        own.all_implied(f"{at}*", "only Megatron-Core reads this, and the strategy is fsdp")
        own.lay_out(f"{section}sequence_parallel_size", role, "cp")
        if role != "ref":
            megatron.checkpoint_layers(own, switch, is_on=own.read(switch, flag, True))
    else:
        own.all_implied(f"{section}fsdp_config.*", "only FSDP reads this, and the strategy is megatron")
        own.implied(f"{section}sequence_parallel_size", "only FSDP reads this, and the strategy is megatron")
        megatron.degrees(own, role, at)
        if role != "ref":
            _recomputed(own, f"{at}transformer_config_kwargs.", switch)
        if not is_moe(model):
            own.all_implied(f"{at}moe_*", "a dense model has no experts")
    rank = f"{section}model.lora.rank"
    if role != "ref" and own.get(rank):
        layers = {"targets": "target_modules", "excluded": "exclude_modules"}
        convert_adapters(own, f"{section}model.lora.", "rank", model, whole_rank=not megatrons, **layers)


def _recomputed(own: Draft, at: str, switch: str) -> None:
    """Convert what is recomputed on Megatron-Core: whole layers unless the source says otherwise."""
    own.assume({f"{at}recompute_granularity": "full"})
    if own.get(f"{at}recompute_granularity") == "selective" and not own.writes(f"{at}recompute_modules"):
        own.recipe[own.target("actor.megatron.transformer.recompute_modules")] = ["core_attn"]
    megatron.recompute(own, at, switch, is_on=True)


# Batches


def _batches(draft: Draft) -> None:
    """Convert mini-batches, in prompts, and micro-batches, in sequences or tokens."""
    prompts = draft.read(f"{TRAINER}train_batch_size", positive, 1024)
    _updates(draft, f"{TRAINER}policy_mini_batch_size", prompts)
    prompt = f"{GENERATOR}max_input_length" if has_turns(draft) else f"{TRAINER}max_prompt_length"
    lengths = [draft.get(prompt, 512), draft.get(f"{GENERATOR}sampling_params.max_generate_length", 1024)]
    longest = sum(lengths) if all(isinstance(one, int) for one in lengths) else None
    tokens, sequences = f"{TRAINER}max_tokens_per_microbatch", f"{TRAINER}micro_train_batch_size_per_gpu"
    if isinstance(draft.get(tokens), int) and draft.get(tokens) > 0:
        draft.mapped(tokens, TOKEN_BUDGET_KEY, draft.get(tokens))
        draft.implied(sequences, f"{tokens} counts")
    elif draft.writes(sequences):
        token_budget(draft, sequences, draft.get(sequences), longest)
        infer = f"{TRAINER}micro_forward_batch_size_per_gpu"
        if draft.writes(infer):
            token_budget(draft, infer, draft.get(infer), longest, INFER_BUDGET_KEY)
            if draft.compares_with_reference and INFER_BUDGET_KEY in draft.recipe:
                draft.recipe[REFERENCE_BUDGET_KEY] = draft.recipe[INFER_BUDGET_KEY]
    if has_critic(draft):
        _updates(ForCritic(draft), f"{TRAINER}critic_mini_batch_size", prompts)


def _updates(own: Draft, key: str, prompts: int) -> None:
    if not own.writes(key):
        return
    size = own.read(key, positive)
    if prompts % size:
        own.unsupported(key, f"{prompts} prompts of a step do not divide into mini-batches of {size}")
    own.mapped(key, "actor.ppo_n_minibatches", max(1, prompts // size), f"{prompts} prompts in mini-batches of {size}")


# Algorithm


def _estimator(draft: Draft) -> None:
    key = f"{ALGORITHM}advantage_estimator"
    name = str(draft.get(key, "grpo"))
    if name == "grpo":
        draft.sets(key, MEAN_LEVEL, "group")
    elif name == "gae":
        gae(draft, key, {f"{ALGORITHM}gamma": "actor.discount", f"{ALGORITHM}lambd": "actor.gae_lambda"})
    elif name in ("rloo", "reinforce++"):
        draft.sets(key, ADVANTAGE, {"rloo": "rloo", "reinforce++": "reinforce_pp"}[name])
    else:
        draft.unsupported(key, f"the estimator {name!r} is not offered; the recipe trains with GRPO instead")
    if name != "gae":
        draft.all_implied(f"{CRITIC}*", f"{name} has no critic")


def _kl(draft: Draft) -> None:
    """Convert the KL term: in the loss, as by default, or in the reward."""
    weight = draft.read(f"{ALGORITHM}kl_loss_coef", number, 0.001)
    in_loss, in_reward = (
        draft.read(f"{ALGORITHM}{name}", flag, on) for name, on in (("use_kl_loss", True), ("use_kl_in_reward", False))
    )
    if weight == 0 or not (in_loss or in_reward):
        return
    draft.sets(f"{ALGORITHM}kl_loss_coef", "actor.kl_ctl", weight)
    kind = f"{ALGORITHM}kl_estimator_type"
    try:
        draft.sets(kind, "actor.kl_estimator", KL_ESTIMATOR(draft.get(kind, "k3")))
    except Unfit as error:
        draft.unsupported(kind, str(error))
    if in_reward:
        draft.sets(f"{ALGORITHM}use_kl_in_reward", "actor.kl_in", "reward")
        if draft.get(f"{ALGORITHM}kl_ctrl.type") == "adaptive":
            for name, to, default in (("kl_target", "actor.kl_target", 0.1), ("horizon", "actor.kl_horizon", 10_000)):
                own = f"{ALGORITHM}kl_ctrl.{name}"
                draft.sets(own, to, draft.read(own, number if name == "kl_target" else positive, default))
    draft.implied(f"{ALGORITHM}use_kl_loss", "kl_loss_coef is its weight, or the term is in the reward")


def _loss(draft: Draft) -> None:
    """Convert the policy loss, its clip range and how the losses of tokens become one number."""
    key = f"{ALGORITHM}policy_loss_type"
    name = str(draft.get(key, "regular"))
    clip = {"eps_clip_low": "actor.eps_clip", "eps_clip_high": "actor.eps_clip_higher"}
    if name == "cispo":
        clip = {"cispo.cispo_eps_clip_low": "actor.eps_clip", "cispo.cispo_eps_clip_high": "actor.eps_clip_higher"}
        for own, value in zip(clip, (1.0, 4.0), strict=True):
            draft.recipe[clip[own]] = draft.read(ALGORITHM + own, number, value)
        if draft.get(f"{ALGORITHM}cispo.cispo_anchor", "old") != "old":
            draft.unsupported(f"{ALGORITHM}cispo.cispo_anchor", "ratios compare with the old log-probs")
    if name == "dppo":
        kind = str(draft.get(f"{ALGORITHM}dppo.dppo_type", "binary_tv"))
        clip = {"dppo.delta_low": "actor.eps_clip", "dppo.delta_high": "actor.eps_clip_higher"}
        draft.implied(f"{ALGORITHM}dppo.dppo_type", f"{key} and this choose the loss")
        choose_loss(draft, key, "dppo_tv" if kind == "binary_tv" else "dppo_kl" if kind == "binary_kl" else kind)
    elif name not in ("regular", "dual_clip"):
        choose_loss(draft, key, "cispo" if name == "cispo" else name if name != "importance_sampling" else "another")
    for own, to in clip.items():
        if draft.get(ALGORITHM + own) is not None:
            draft.sets(ALGORITHM + own, to, draft.read(ALGORITHM + own, number))
    if name == "dual_clip":
        draft.sets(f"{ALGORITHM}clip_ratio_c", "actor.c_clip", draft.read(f"{ALGORITHM}clip_ratio_c", number, 3.0))
        draft.implied(key, "clip_ratio_c is its bound")
    reduction = f"{ALGORITHM}loss_reduction"
    try:
        draft.sets(reduction, "actor.loss_aggregation", REDUCTION(draft.get(reduction, "token_mean")))
    except Unfit as error:
        draft.unsupported(reduction, str(error))
    if draft.get(f"{ALGORITHM}use_entropy_loss") is True:
        own = f"{ALGORITHM}entropy_loss_coef"
        draft.sets(own, "actor.entropy_coeff", draft.read(own, number, 0.01))
        draft.implied(f"{ALGORITHM}use_entropy_loss", "entropy_loss_coef is its weight")


def _correction(draft: Draft) -> None:
    """Convert the weights and the one mask for the mismatch of rollout and trainer."""
    at = f"{ALGORITHM}off_policy_correction."
    level = draft.get(f"{at}tis_ratio_type")
    if level in ("token", "sequence"):
        cap = f"{at}{level}_tis_ratio_clip_high"
        keys = {"weight": level, "weight_cap": draft.read(cap, number, 2.0 if level == "token" else 5.0)}
        for key in (f"{at}tis_ratio_type", cap):
            correct_rollout(draft, key, keys)
    elif draft.get(f"{ALGORITHM}use_tis") is True:
        cap = f"{ALGORITHM}tis_imp_ratio_cap"
        for key in (f"{ALGORITHM}use_tis", cap):
            correct_rollout(draft, key, {"weight": "token", "weight_cap": draft.read(cap, number, 2.0)})
    metric = draft.get(f"{at}sequence_mask_metric")
    name, mask, low, high = {"product": ("product", "sequence", 0.5, 2.0)}.get(
        str(metric), ("geo", "geometric", 0.99, 1.01)
    )
    if metric in ("product", "geometric"):
        bounds = {
            "mask_above": draft.read(f"{at}{name}_mask_high", number, high),
            "mask_below": draft.read(f"{at}{name}_mask_low", number, low),
        }
        for key in (f"{at}sequence_mask_metric", f"{at}{name}_mask_high", f"{at}{name}_mask_low"):
            correct_rollout(draft, key, {"mask": mask, **bounds})
    veto = f"{at}outlier_token_is_threshold_low"
    if draft.get(veto) is not None:
        correct_rollout(draft, veto, {"veto_below": draft.read(veto, number)})
    for name in ("outlier_token_is_threshold_high", "token_mask_is_threshold_low", "token_mask_is_threshold_high"):
        if draft.get(f"{at}{name}") is not None:
            draft.unsupported(f"{at}{name}", "there is one mask: actor.rollout_correction.mask and its bounds")


# Rollout


def _episodes(draft: Draft) -> None:
    """Leave episodes of several turns to the user: SkyRL's environments are its own classes."""
    turns = draft.read(f"{GENERATOR}max_turns", positive, 1)
    name = str(draft.get("environment.env_class", ""))
    if turns > 1 or any(part in name for part in SEVERAL_TURNS):
        leave_open(draft, "game")


def _evaluation(draft: Draft) -> None:
    """Convert the sampling of held-out prompts, which is greedy unless the source says otherwise."""
    own = f"{GENERATOR}eval_sampling_params."
    temperature = draft.read(f"{own}temperature", number, 0.0)
    if temperature > 0 and draft.writes(f"{own}temperature"):
        draft.recipe["evaluator.greedy"] = False
        draft.sets(f"{own}temperature", "evaluator.temperature", temperature)
        for name, convert, default in (("top_p", number, 1.0), ("top_k", top_k, 0)):
            draft.sets(own + name, f"evaluator.{name}", draft.read(own + name, convert, default))
    draft.implied(f"{own}temperature", reasons.GREEDY)
    length = f"{own}max_generate_length"
    if draft.writes(length):
        draft.sets(length, "evaluator.max_new_tokens", draft.read(length, positive))
    if draft.get(f"{own}stop") is not None and draft.get(f"{own}stop") != draft.get(f"{GENERATOR}sampling_params.stop"):
        draft.unsupported(f"{own}stop", "evaluation stops as training does")
    draft.implied(f"{own}stop", reasons.AS_IN_TRAINING)


DIALECT = Dialect("SkyRL", {REINFORCEMENT: Conversion(convert, RULES.defaults)}, (), merge)
