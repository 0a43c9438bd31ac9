"""verl's generative reward model: a model that it serves, and a function of the user's own that asks it."""

from __future__ import annotations

from fivefold_import import reasons
from fivefold_import.draft import Degree, Draft, RolePlan
from fivefold_import.settings import rollout_engine
from fivefold_import.values import DTYPE, Convert, number, positive
from fivefold_import.verl.pools import ROLLOUTS, TRAINERS, one_cluster

MODEL = "reward.reward_model."
FUNCTIONS = ("reward.custom_reward_function.path", "custom_reward_function.path")
DEVICES = (f"{MODEL}nnodes", f"{MODEL}n_gpus_per_node")
KEYS: dict[str, tuple[str, Convert]] = {
    "model_path": ("reward.judge.path", str),
    "rollout.dtype": ("reward.judge.dtype", DTYPE),
    "rollout.max_num_seqs": ("reward.judge.max_batch_size", positive),
    "rollout.response_length": ("reward.kwargs.max_tokens", positive),
    "rollout.temperature": ("reward.kwargs.temperature", number),
}
"""The recipe's key and the conversion of each key that stands for one of the recipe's."""


def has_judge(draft: Draft) -> bool:
    """Return whether a model is served that a function of the user's own asks; without one, it has a score head."""
    is_on = draft.get(f"{MODEL}enable") is True and draft.writes(f"{MODEL}model_path")
    return is_on and any(map(draft.writes, FUNCTIONS))


def lay_out_judge(draft: Draft) -> None:
    """Read how the model is laid out: on other devices than the actor, or on its devices in turn."""
    if not has_judge(draft):
        return
    plan = draft.plans["judge"] = RolePlan("vllm", n_devices=draft.plans["actor"].n_devices)
    if draft.get(f"{MODEL}enable_resource_pool") is True:
        _own_devices(draft, plan)
    if draft.writes(f"{MODEL}rollout.name"):
        rollout_engine(draft, f"{MODEL}rollout.name", "judge")
    degrees: dict[str, Degree] = {"tensor": "tp", "pipeline": "pp"}
    for name, degree in degrees.items():
        if draft.writes(written := f"{MODEL}rollout.{name}_model_parallel_size"):
            draft.lay_out(written, "judge", degree)


def _own_devices(draft: Draft, plan: RolePlan) -> None:
    """Add the model's devices to the trainer's, if they are one cluster."""
    nodes, gpus, others, their_gpus = (draft.read(key, positive, 1) for key in (*TRAINERS, *DEVICES))
    cluster = None if any(map(draft.writes, ROLLOUTS)) else one_cluster((nodes, gpus), (others, their_gpus))
    if cluster is None:
        for key in (f"{MODEL}enable_resource_pool", *DEVICES):
            draft.unsupported(key, f"{others} x {their_gpus} GPUs do not make one cluster with the others: colocate it")
        return
    for key, to, value in zip(TRAINERS, ("cluster.n_nodes", "cluster.n_gpus_per_node"), cluster, strict=True):
        draft.sets(key, to, value, "with the devices of the model that judges")
    plan.has_processes, plan.n_devices = True, others * their_gpus
    plan.keys |= dict.fromkeys((f"{MODEL}enable_resource_pool", *DEVICES), "")


def judge_key(draft: Draft, source: str) -> None:
    """Convert a key of the model."""
    if draft.get(f"{MODEL}enable") is not True:
        return draft.implied(source, "only a reward model reads this")
    if not has_judge(draft):
        return draft.unsupported(source, reasons.NO_REWARD_MODEL)
    name, plan = source.removeprefix(MODEL), draft.plans.get("judge")
    if name == "enable":
        return draft.mapped(source, "reward.fn", "judge", "the score that reward.judge writes")
    if name in KEYS:
        to, convert = KEYS[name]
        return draft.mapped(source, to, convert(draft.get(source)))
    if name == "rollout.prompt_length":
        answer = draft.read(f"{MODEL}rollout.response_length", positive, 1)
        return draft.mapped(source, "reward.judge.max_length", positive(draft.get(source)) + answer, "with the answer")
    if name == "rollout.gpu_memory_utilization" and plan is not None and plan.has_processes:
        return draft.mapped(source, "reward.judge.memory_fraction", number(draft.get(source)))
    return draft.implied(source, reasons.JUDGE_HOSTED)
