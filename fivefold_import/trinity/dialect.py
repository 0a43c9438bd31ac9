"""Trinity-RFT: one YAML file for explorer and trainer, with verl's key tree below `trainer.trainer_config`.

The tree may also be in its own file (`trainer.trainer_config_path`): a file whose keys begin with
`actor_rollout_ref` is read as that. Keys of the first releases (`data.dataset_path`, `explorer.engine_num`) are read
by their later names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fivefold_import import reasons
from fivefold_import.algorithms import choose_loss
from fivefold_import.critic import gae
from fivefold_import.dialect import Conversion, Dialect, merged
from fivefold_import.draft import Draft, RolePlan
from fivefold_import.settings import (
    ADVANTAGE,
    COEFF,
    MEAN_LEVEL,
    NO_REWARD,
    STD_LEVEL,
    advantages,
    ask_as_user,
    cut_of_held_out,
    rollout_engine,
    train_on_teacher_alone,
)
from fivefold_import.source import INTERPOLATION, Document
from fivefold_import.tasks import DISTILLATION, EVALUATION, PREFERENCES, REINFORCEMENT, SFT, Sign
from fivefold_import.trinity import given
from fivefold_import.trinity.agents import convert_agents
from fivefold_import.trinity.replay import convert_replay
from fivefold_import.trinity.rules import (
    ADVANTAGE_FN,
    DISTILLING,
    ENGINE,
    JSD,
    LOSS_FN,
    OLD_NAMES,
    RULES,
    TASKS,
    TREE,
    TYPE,
    has_teacher,
)
from fivefold_import.trinity.sft_mixing import convert_mix, is_mixed
from fivefold_import.trinity.trainer import (
    critics_batches,
    finish,
    micro_batches,
    override_layout,
    path_of_data,
    sequence_length,
)
from fivefold_import.values import above_zero, number, positive, run_name, text, whole
from fivefold_import.verl import tree as verl_tree
from fivefold_import.verl.rules import ACTOR, OF_CRITICS

TREE_SECTIONS = ("actor_rollout_ref.", "critic.")

CLIPPED = ("ppo", "grpo", "grpo_verl", "multi_step_grpo", "dapo", "rloo", "reinforceplusplus", "remax")
"""Algorithms that differ in their advantages only, and have PPO's clipped loss unless another is written."""
GROUP_SIZES = {"ppo": 1, "multi_step_grpo": 8, "dapo": 16, "mix": 8, "mix_chord": 8}
"""The default of `repeat_times` for some algorithms; 2 for the others."""
ESTIMATORS = {
    **dict.fromkeys(("grpo_verl", "multi_step_grpo", "dapo", "gspo", "sapo", "cispo", "mix", "mix_chord"), "grpo"),
    "topr": "reinforce",
    "sppo": "opmd",
}
"""Advantages of algorithms that have not their own name."""
CLIPS = ("clipb", "clipv")
"""Advantages of GRPO that leave out tokens, which is the loss's part here."""
WITHOUT_KL = ("dapo", "rec", "sppo", "asymre", "raft", *DISTILLING)
"""Algorithms that have no KL term unless one is written."""
OWN_DEFAULTS: Mapping[str, Mapping[str, tuple[str, Any]]] = {
    "gspo": {
        "actor.eps_clip": ("clip_range*", 3e-4),
        "actor.eps_clip_higher": ("clip_range*", 4e-4),
        "actor.loss_aggregation": ("loss_agg_mode", "sequence_mean"),
    },
    "cispo": {
        "actor.eps_clip": ("clip_range_low", 1.0),
        "actor.eps_clip_higher": ("clip_range_high", 0.28),
    },
}
"""By loss, the recipe's keys with the value that they have where the source writes no option of a pattern."""
KL_ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3", "abs": "abs", "corrected_k3": "k3"}
"""Estimators of the KL divergence; the corrected one is weighted by p / p_old."""


SIGNS = (
    Sign("algorithm.algorithm_type", SFT, ("sft",)),
    Sign("algorithm.algorithm_type", PREFERENCES, ("dpo",)),
    Sign("algorithm.algorithm_type", DISTILLATION, ("sdpo",)),
    Sign("mode", EVALUATION, ("bench",)),
)
"""Algorithms and modes in which Trinity-RFT does other things than reinforcement learning."""


def merge(documents: Sequence[Document]) -> Document:
    """Merge the files: the trainer's own goes below `trainer.trainer_config`, old keys get their later names."""
    return merged([_renamed(document) for document in documents])


def _renamed(document: Document) -> Document:
    """Return a document with its keys where and as the latest release has them."""
    is_tree = any(key.startswith(TREE_SECTIONS) for key in document.values)

    def name(key: str) -> str:
        if is_tree:
            return TREE + key
        for old, new in OLD_NAMES.items():
            if key == old or key.startswith(f"{old}."):
                return new + key.removeprefix(old)
        return key

    named = document.renamed(name)
    return replace(named, values={key: _below_tree(value) for key, value in named.values.items()}) if is_tree else named


def _below_tree(value: Any) -> Any:
    """Return a value of the trainer's own file, its interpolations led to keys below `trainer.trainer_config`."""
    if not isinstance(value, str):
        return value
    return INTERPOLATION.sub(
        lambda match: match[0] if match[1].startswith(".") or ":" in match[1] else f"${{{TREE}{match[1]}}}", value
    )


def convert(draft: Draft) -> None:
    """Convert Trinity-RFT's own keys, which override verl's tree, then the rest by the rule table."""
    n_samples = _group_size(draft)
    algorithm = str(draft.get("algorithm.algorithm_type"))
    _advantages(draft, algorithm, n_samples)
    _kl(draft, algorithm)
    _clipping(draft)
    _lay_out(draft)
    convert_agents(draft)
    _batches(draft, n_samples)
    _tasks(draft)
    convert_replay(draft)
    finish(draft, RULES.rules)


# Algorithm


def _group_size(draft: Draft) -> int:
    """Convert the responses of a prompt, and return their number."""
    key = "algorithm.repeat_times"
    size: int = draft.read(key, positive, GROUP_SIZES.get(str(draft.get("algorithm.algorithm_type")), 2))
    draft.sets(key, "gconfig.n_samples", size)
    return size


def _advantages(draft: Draft, algorithm: str, n_samples: int) -> None:
    if has_teacher(draft):
        _distillation(draft)
        return
    if is_mixed(draft, algorithm):
        convert_mix(draft, algorithm, n_samples)
    elif algorithm not in CLIPPED and not draft.writes("algorithm.policy_loss_fn"):
        choose_loss(draft, "algorithm.algorithm_type", algorithm)
    key = "algorithm.advantage_fn"
    estimator = str(draft.get(key, ESTIMATORS.get(algorithm, algorithm))).replace("step_wise_grpo", "grpo")
    written = key if draft.writes(key) else "algorithm.algorithm_type"
    if estimator in ("gae", "ppo"):
        draft.assume({TREE + key: value for key, value in OF_CRITICS.items()})
        constants = {f"{key}_args.gamma": "actor.discount", f"{key}_args.lam": "actor.gae_lambda"}
        gae(draft, written, constants)
    elif estimator in CLIPS:
        choose_loss(draft, written, estimator)
        advantages(draft, written, "grpo", divides_by_std=True, n_samples=n_samples)
    elif estimator in ("opmd", "asymre", "rec", "reinforce"):
        _centred(draft, written, estimator)
    else:
        advantages(draft, written, estimator, divides_by_std=True, n_samples=n_samples)
    _scale_of_opmd(draft, algorithm, estimator)
    _unwritten_options(draft, algorithm)
    if algorithm in ("grpo", "grpo_verl", "multi_step_grpo", "dapo", "rloo", "reinforceplusplus", "ppo"):
        draft.implied("algorithm.algorithm_type", f"{key} overrides it")
    draft.unsupported("algorithm.algorithm_type", f"the algorithm {algorithm!r} is not offered")


def _centred(draft: Draft, key: str, estimator: str) -> None:
    """Convert an advantage that is the reward less some mean of the group's, and that no deviation divides."""
    baseline = str(draft.get(f"{ADVANTAGE_FN}_args.opmd_baseline", "mean"))
    divides = estimator == "rec" and draft.get(f"{ADVANTAGE_FN}_args.std_normalize") is True
    if estimator == "asymre" or (estimator == "opmd" and baseline == "logavgexp"):
        draft.recipe.setdefault(ADVANTAGE, estimator)
        draft.mapped(key, ADVANTAGE, estimator)
    else:
        level = "none" if estimator == "reinforce" else "group"
        draft.recipe.setdefault(STD_LEVEL, "group" if divides else "none")
        draft.recipe.setdefault(MEAN_LEVEL, level)
        draft.mapped(key, MEAN_LEVEL, level, f"with {STD_LEVEL}={draft.recipe[STD_LEVEL]}")
    draft.implied(f"{ADVANTAGE_FN}_args.opmd_baseline", f"it follows in {key}")
    draft.implied(f"{ADVANTAGE_FN}_args.std_normalize", f"it follows in {key}")


def _scale_of_opmd(draft: Draft, algorithm: str, estimator: str) -> None:
    """Convert the factor 1 / (1 + tau) of OPMD's loss to one of the rewards, and so of their baselines."""
    loss = draft.get(LOSS_FN, "opmd" if algorithm in ("opmd", "asymre") else "")
    tau = draft.read(f"{LOSS_FN}_args.tau", number, 1.0)
    scale = 1.0 / (1.0 + tau) if loss == "opmd" else 1.0
    shift, temperature = f"{ADVANTAGE_FN}_args.baseline_shift", f"{ADVANTAGE_FN}_args.tau"
    if loss == "opmd":
        draft.sets(f"{LOSS_FN}_args.tau", "actor.reward_scaling", scale, "1 / (1 + tau)")
    if estimator == "asymre":
        draft.recipe["actor.advantage_kwargs.baseline_shift"] = scale * draft.read(shift, number, -0.1)
        draft.mapped(
            shift, "actor.advantage_kwargs.baseline_shift", draft.recipe["actor.advantage_kwargs.baseline_shift"]
        )
    if draft.recipe.get(ADVANTAGE) == "opmd":
        draft.sets(temperature, "actor.advantage_kwargs.tau", scale * draft.read(temperature, number, 1.0))
    draft.implied(temperature, "only the baseline logavgexp reads this")


def _unwritten_options(draft: Draft, algorithm: str) -> None:
    """Take Trinity-RFT's defaults of options that Fivefold's loss has others for."""
    loss = draft.get(LOSS_FN, algorithm)
    if loss == "rec" and not draft.writes(f"{LOSS_FN}_args.clip_mode"):
        draft.recipe["actor.loss_kwargs.region"] = "none"
    if loss == "sppo" and not draft.writes(f"{LOSS_FN}_args.epsilon"):
        draft.recipe |= {"actor.eps_clip": 0.3 / 1.3, "actor.eps_clip_higher": 0.3}
    if loss == "cispo":
        draft.notes.append(
            "actor.loss=cispo keeps the gradient of every token, as in the paper; Trinity-RFT's leaves out those that "
            "are beyond the clip range on the side to which their advantage pushes them"
        )
    own = {
        to: value
        for to, (option, value) in OWN_DEFAULTS.get(loss, {}).items()
        if not draft.keys(f"{LOSS_FN}_args.{option}") and not draft.writes(f"algorithm.{option}")
    }
    if own:
        draft.recipe |= own
        shown = ", ".join(f"{to}={value}" for to, value in own.items())
        draft.notes.append(f"{shown}: Trinity-RFT's defaults for the loss {loss}")


def _distillation(draft: Draft) -> None:
    """Convert on-policy distillation, whose advantage is kl_coef (log q - log p) of teacher and student, or minus
    kl_coef times the term of the Jensen-Shannon divergence at the sampled token."""
    named = [key for key in (TYPE, ADVANTAGE_FN) if draft.get(key) in DISTILLING]
    weight = f"{ADVANTAGE_FN}_args.kl_coef"
    train_on_teacher_alone(draft, named[0], draft.read(weight, above_zero, 1.0))
    for key in (TYPE, ADVANTAGE_FN):
        draft.implied(key, NO_REWARD)
    draft.mapped(weight, COEFF, draft.recipe[COEFF])
    if draft.get(named[0]) == JSD:
        _jensen_shannon(draft)
    if draft.get("algorithm.policy_loss_fn", "importance_sampling") == "importance_sampling":
        draft.sets("algorithm.policy_loss_fn", "actor.loss", "reinforce", "the same gradient at the first update")


def _jensen_shannon(draft: Draft) -> None:
    """Convert the divergence between teacher and student, which is a KL divergence at the ends of its range."""
    share = f"{ADVANTAGE_FN}_args.lambda_coef"
    beta = draft.read(share, number, 0.5)
    draft.recipe["actor.distill.over"] = "top_k"
    direction = {0: "reverse", 1: "forward"}.get(beta, "jsd")
    draft.sets(share, "actor.distill.direction", direction)
    if direction == "jsd":
        draft.recipe["actor.distill.teacher_share"] = beta
    draft.implied(f"{ADVANTAGE_FN}_args.chunk_size", "log-probs are computed in chunks")
    draft.notes.append(
        "actor.distill.over=top_k: the gradient of the divergence itself, where Trinity-RFT takes its term at the "
        "sampled token for a reward"
    )


def _kl(draft: Draft, algorithm: str) -> None:
    """Convert the KL loss (k2 unless written; none for DAPO) or the KL penalty (none unless written).

    In the first releases, the KL term was in verl's key tree.
    """
    if draft.writes(TREE + ACTOR + "use_kl_loss") and not draft.keys("algorithm.kl_*"):
        verl_tree.kl(draft, TREE)
        draft.implied("algorithm.kl_loss_fn_args.kl_coef", "the trainer's own file says so")
        return
    loss, penalty = "algorithm.kl_loss_fn", "algorithm.kl_penalty_fn"
    term = draft.get(loss, "none" if algorithm in WITHOUT_KL else "k2")
    place = "loss" if term != "none" else "reward"
    key = loss if place == "loss" else penalty
    kind, weight = draft.get(key, term), f"{key}_args.kl_coef"
    if kind != "none":
        estimator = KL_ESTIMATORS.get(str(kind).lower())
        if kind == "corrected_k3" and place == "loss":
            draft.recipe["actor.kl_unbiased"] = True
        draft.recipe["actor.kl_in"] = place
        draft.sets(weight, "actor.kl_ctl", draft.read(weight, number, 0.001))
        if not (draft.writes(key) and draft.writes(weight)):
            draft.notes.append(f"{key}={kind} with weight {draft.recipe['actor.kl_ctl']:g}, the default of {algorithm}")
        if estimator is not None:
            draft.sets(key, "actor.kl_estimator", estimator)
        draft.unsupported(key, f"the estimator {kind!r} is not offered; there are {', '.join(KL_ESTIMATORS)}")
    if draft.get(penalty, "none") != "none" and place == "loss":
        draft.unsupported(penalty, reasons.ONE_KL)
    for name in (loss, penalty):
        draft.implied(name, "it is switched off")
        draft.implied(f"{name}_args.kl_coef", f"{name} is off")


def _clipping(draft: Draft) -> None:
    """Convert the clip range: Trinity-RFT's own keys, or the tree's if there are none."""
    own = "algorithm.policy_loss_fn_args."
    if draft.writes(own + "clip_range_low") or draft.writes(own + "clip_range_high"):
        draft.implied(own + "clip_range", "clip_range_low and clip_range_high override it")
    for name, target in (
        ("clip_range", "actor.eps_clip"),
        ("clip_range_low", "actor.eps_clip"),
        ("clip_range_high", "actor.eps_clip_higher"),
    ):
        if draft.get(own + name) is not None:
            draft.mapped(own + name, target, draft.read(own + name, number))
    if not draft.keys(own + "clip_range*"):
        verl_tree.clipping(draft, TREE)


# Layout


def _lay_out(draft: Draft) -> None:
    """Read how explorer and trainer are laid out: the trainer gets the devices that the engines leave."""
    rollout = draft.plans["rollout"] = RolePlan("vllm")
    if draft.writes(ENGINE + "engine_type"):
        rollout_engine(draft, ENGINE + "engine_type")
    draft.lay_out(ENGINE + "tensor_parallel_size", "rollout", "tp")
    if draft.writes(ENGINE + "pipeline_parallel_size"):
        draft.lay_out(ENGINE + "pipeline_parallel_size", "rollout", "pp")
    rollout.n_devices = draft.read(ENGINE + "engine_num", positive) * rollout.get("tp") * rollout.get("pp")
    if draft.is_open(ENGINE + "engine_num"):
        rollout.keys[ENGINE + "engine_num"] = ""
    verl_tree.lay_out_trainers(draft, verl_tree.Tree(etp_follows_tp=True, prefix=TREE))
    override_layout(draft)
    verl_tree.lay_out_critic(draft, verl_tree.Tree(etp_follows_tp=True, prefix=TREE))
    verl_tree.recompute(draft, TREE)
    verl_tree.router(draft, TREE, "model.model_path")
    nodes, per_node = draft.get("cluster.node_num"), draft.get("cluster.gpu_per_node")
    is_one = draft.get("mode") == "colocate" or (nodes, per_node) == (1, 1)
    draft.is_shared = is_one
    is_known = isinstance(nodes, int) and isinstance(per_node, int)
    for role, plan in draft.plans.items():
        if role != "rollout":
            plan.n_devices = nodes * per_node - (0 if is_one else rollout.n_devices) if is_known else None


# Batches and data


def _batches(draft: Draft, n_samples: int) -> None:
    """Convert the batches: a step explores `batch_size` tasks, an update trains `train_batch_size` experiences."""
    key, tasks = "buffer.train_batch_size", draft.read("buffer.batch_size", positive)
    update, step = draft.get(key), tasks * n_samples
    if isinstance(update, int) and update > 0:
        if step % update or tasks % (step // update):
            draft.unsupported(key, f"{tasks} tasks of {n_samples} responses do not divide into updates of {update}")
        else:
            draft.mapped(key, "actor.ppo_n_minibatches", step // update, f"{tasks}*{n_samples} experiences a step")
    micro_batches(draft)
    critics_batches(draft)
    verl_tree.passes_without_gradients(draft, TREE, sequence_length(draft))


def _tasks(draft: Draft) -> None:
    """Convert the task set, its lengths, and the held-out task sets."""
    response, longest = draft.get("model.max_response_tokens"), draft.get("model.max_model_len")
    if not draft.writes("model.max_prompt_tokens") and isinstance(response, int) and isinstance(longest, int):
        note = f"{longest} less {response} for the response"
        draft.mapped("model.max_model_len", "train_dataset.max_length", longest - response, note)
    path_of_data(draft, TASKS, "train_dataset")
    if "train_dataset.path" in draft.recipe:
        ask_as_user(draft, "Trinity-RFT")
        _system_prompt(draft)
    evaluations = sorted({key.split(".")[3] for key in draft.keys("buffer.explorer_input.eval_tasksets.*")})
    for number_ in evaluations:
        held_out = f"buffer.explorer_input.eval_tasksets.{number_}."
        if len(evaluations) == 1:
            path_of_data(draft, held_out, "valid_dataset")
        else:
            _one_of_several(draft, held_out, f"valid_datasets.{run_name(draft.get(held_out + 'name') or number_)}")
        temperature = held_out + "rollout_args.temperature"
        samples = draft.read(temperature, number, 0) > 0
        if samples:
            draft.recipe["evaluator.greedy"] = False
            draft.mapped(temperature, "evaluator.temperature", draft.get(temperature), "evaluator.greedy=false")
        draft.implied(temperature, reasons.GREEDY)
        cut_of_held_out(draft, held_out + "rollout_args.", TASKS + "rollout_args.", samples=samples)


def _one_of_several(draft: Draft, section: str, target: str) -> None:
    """Convert one of several held-out task sets, which have one number of responses and one length of them."""
    path_of_data(draft, section, target)
    for key, to, convert in (
        ("split", f"{target}.split", text),
        ("format.prompt_key", f"{target}.prompt_key", text),
        ("format.response_key", f"{target}.answer_key", text),
        ("format.system_prompt", f"{target}.system_prompt", text),
        ("repeat_times", "evaluator.n_samples", whole),
        ("rollout_args.max_tokens", "evaluator.max_new_tokens", whole),
    ):
        if draft.writes(section + key):
            draft.mapped(section + key, to, draft.read(section + key, convert))
    draft.implied(section + "name", "it is the name of the set")
    if draft.get(section + "storage_type") == "file":
        draft.implied(section + "storage_type", "data are files, folders or hub names")
    for name in ("rollout_args.n", "rollout_args.logprobs"):
        draft.implied(section + name, "repeat_times is the number of responses")
    draft.all_unsupported(section + "workflow_args*", "all sets are judged by the recipe's reward")


def _system_prompt(draft: Draft) -> None:
    """Note the system prompt that the workflow `math_workflow` adds, unless the source has one or another reward."""
    workflow, reward = (draft.get(f"buffer.explorer_input.default_{name}_type") for name in ("workflow", "reward_fn"))
    is_added = workflow == "math_workflow" and reward in (None, "math_reward")
    if is_added and not draft.writes(TASKS + "format.system_prompt"):
        draft.notes.append(
            "math_workflow asks for <think> and <answer> in a system prompt, which is not carried over: write it into "
            "the prompts' chat messages"
        )


DIALECT = Dialect(
    "Trinity-RFT",
    {REINFORCEMENT: Conversion(convert, RULES.defaults), SFT: given.CONVERSION, PREFERENCES: given.CONVERSION},
    SIGNS,
    merge=merge,
)
