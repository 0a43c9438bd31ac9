"""Trinity-RFT's tables, and the rules of single keys that take more than a lookup."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import import reasons
from fivefold_import.agents import has_turns
from fivefold_import.checkpoints import save_weights
from fivefold_import.critic import of_critic
from fivefold_import.draft import Draft
from fivefold_import.settings import ONE_TEACHER, TEACHER_PATH
from fivefold_import.tables import read_tables
from fivefold_import.trinity import agents
from fivefold_import.values import number, positive, text, whole
from fivefold_import.verl import rules as verl

TREE = "trainer.trainer_config."
"""The section that holds verl's key tree."""
ENGINE = "explorer.rollout_model."
TASKS = agents.TASKS
TYPE, LOSS_FN, ADVANTAGE_FN = "algorithm.algorithm_type", "algorithm.policy_loss_fn", "algorithm.advantage_fn"
LOSS_ARGS = "algorithm.policy_loss_fn_args."
AGE = "rollout.max_head_offpolicyness"
SYNC = "synchronizer."
OFFSET = f"{SYNC}sync_offset"
ON_POLICY = "on_policy_distill"
"""Trinity-RFT's name of on-policy distillation, as an algorithm and as an advantage."""
JSD = "jsd"
"""Trinity-RFT's name of distillation by the Jensen-Shannon divergence, as an algorithm and as an advantage."""
DISTILLING = (ON_POLICY, JSD)
TEACHER = "explorer.auxiliary_models.0.model_path"
"""The first auxiliary model, which on-policy distillation takes for the teacher."""

OLD_NAMES: Mapping[str, str] = {
    "monitor.project": "project",
    "monitor.name": "name",
    "monitor.cache_root_dir": "monitor.cache_dir",
    "model.checkpoint_path": "checkpoint_root_dir",
    "model.max_token_len": "model.max_model_len",
    "trainer.algorithm_type": TYPE,
    "trainer.eval_interval": "explorer.eval_interval",
    "data.total_epochs": "buffer.total_epochs",
    "data.batch_size": "buffer.batch_size",
    "data.dataset_path": TASKS + "path",
    "data.subset_name": TASKS + "subset_name",
    "data.train_split": TASKS + "split",
    "data.format": TASKS + "format",
    "data.default_workflow_type": "buffer.explorer_input.default_workflow_type",
    "data.default_reward_fn_type": "buffer.explorer_input.default_reward_fn_type",
    "buffer.eval_tasksets": "buffer.explorer_input.eval_tasksets",
    "explorer.repeat_times": "algorithm.repeat_times",
    "explorer.temperature": TASKS + "rollout_args.temperature",
    "explorer.logprobs": TASKS + "rollout_args.logprobs",
    **{
        f"explorer.{name}": ENGINE + name
        for name in (
            *("engine_type", "engine_num", "tensor_parallel_size", "enable_prefix_caching", "enforce_eager"),
            *("enable_chunked_prefill", "gpu_memory_utilization", "dtype", "seed"),
        )
    },
}
"""Keys of the first releases, each with the name that later releases give it."""


def has_teacher(draft: Draft) -> bool:
    """Return whether the source distils from a teacher on the student's own samples."""
    return any(draft.get(key) in DISTILLING for key in (TYPE, ADVANTAGE_FN))


def _is_adaptive(draft: Draft, key: str) -> bool:
    """Return whether the weight of the KL term that `key` is an option of is adapted."""
    return draft.get(key.rpartition(".")[0] + ".adaptive") is True and bool(draft.recipe.get("actor.kl_ctl"))


def _interval(draft: Draft, source: str) -> None:
    """Convert the number of steps between updates of the explorer's weights, which are up to so many steps older."""
    every = positive(draft.get(source))
    if every == 1:
        return draft.implied(source, "weights are updated after every step")
    draft.recipe[AGE] = every - 1 + draft.read(OFFSET, whole, 0)
    return draft.mapped(source, "rollout.sync_freq_steps", every, f"with {AGE}={draft.recipe[AGE]}")


def _offset(draft: Draft, source: str) -> None:
    """Convert how many steps the explorer is ahead; weights that are updated every few steps add to the age."""
    if age := age_of_weights(draft):
        draft.mapped(source, AGE, age)
    draft.implied(source, reasons.SYNCHRONOUS)


def age_of_weights(draft: Draft) -> int:
    """Return the most steps by which the weights that sample are older than those that are trained."""
    every = max(draft.read(f"{SYNC}{name}", positive, 1) for name in ("sync_interval", "sync_iteration_interval"))
    return every - 1 + int(draft.read(OFFSET, whole, 0))


def _sequence_masking(draft: Draft, key: str) -> None:
    """Convert off-policy sequence masking, whose bound is 0.1 unless it is written."""
    if draft.get(LOSS_ARGS + "enable_sequence_masking") is True:
        draft.mapped(key, "actor.opsm_delta", draft.read(LOSS_ARGS + "delta_sequence_masking", number, 0.1))
    draft.implied(key, "sequence masking is switched off")


def _is_loss(draft: Draft, name: str) -> bool:
    return bool(draft.get(LOSS_FN, draft.get(TYPE)) == name)


def _range_of_sppo(draft: Draft, key: str) -> None:
    """Convert sPPO's range of ratios, from 1 / (1 + epsilon) to 1 + epsilon."""
    if _is_loss(draft, "sppo"):
        epsilon = number(draft.get(key))
        draft.recipe["actor.eps_clip"] = epsilon / (1.0 + epsilon)
        draft.mapped(key, "actor.eps_clip_higher", epsilon, "actor.eps_clip=epsilon / (1 + epsilon)")
    draft.implied(key, "only the loss sppo reads this")


def _option_of_clip(draft: Draft, key: str) -> None:
    """Convert an option of the advantages that leave out tokens by the change of the entropy."""
    if draft.recipe.get("actor.loss") not in ("clip_b", "clip_v"):
        draft.unsupported(key, "only the advantages clipb and clipv read this")
    name = "mu" if key.endswith(".mu") else "max_share"
    draft.mapped(key, f"actor.loss_kwargs.{name}", number(draft.get(key)))


def _selector(draft: Draft, key: str) -> None:
    """Convert the order of tasks, as far as rewards have no influence on it."""
    if draft.get(key) in ("sequential", "shuffle"):
        draft.mapped(key, "train_dataset.shuffle", draft.get(key) == "shuffle")
    draft.unsupported(key, reasons.SAMPLER)


def _auxiliary_model(draft: Draft, source: str) -> None:
    """Convert a key of an auxiliary model: the teacher, or one that writes judgements."""
    if not has_teacher(draft):
        draft.unsupported(source, reasons.NO_REWARD_MODEL)
    elif source == TEACHER:
        draft.mapped(source, TEACHER_PATH, text(draft.get(source)))
    elif source.startswith(TEACHER.rpartition(".")[0]):
        draft.implied(source, reasons.TEACHER_LAID_OUT)
    draft.unsupported(source, ONE_TEACHER)


def _shortest_response(draft: Draft, source: str) -> None:
    """Convert the fewest tokens of a response; one, Trinity-RFT's default, is no limit where its end is a token."""
    if (fewest := whole(draft.get(source))) > 1:
        draft.mapped(source, "gconfig.min_new_tokens", fewest)
    draft.implied(source, "a response has at least one token, which may be its end")


def _saved_weights(draft: Draft, source: str) -> None:
    """Convert when checkpoints hold the weights in the Hugging Face format too: always, at the last step, or never."""
    match draft.get(source):
        case "always":
            save_weights(draft, source, "trainer.save_interval", "trainer.max_checkpoints_to_keep")
        case "last":
            draft.implied(source, reasons.LAST_WEIGHTS)
    draft.unsupported(source, reasons.LAST_WEIGHTS)


TABLES = read_tables("trinity", {**globals(), **vars(agents)}, {"verl": verl.TABLES})
RULES = (
    TABLES["top"]
    | TABLES["agents"].only_if(has_turns, reasons.ONE_COMPLETION).under(ENGINE)
    | TABLES["rec"].only_if(lambda draft, _: _is_loss(draft, "rec"), "only the loss rec reads this").under(LOSS_ARGS)
    | TABLES["adaptive"]
    .only_if(_is_adaptive, "only an adaptive weight reads this")
    .under("algorithm.kl_loss_fn_args.", "algorithm.kl_penalty_fn_args.")
    | (
        (verl.TABLES["model"].bare() | TABLES["tree_model"]).under(verl.MODEL)
        | (verl.TABLES["actor"].bare() | TABLES["tree_actor"]).under(verl.ACTOR)
        | verl.TABLES["reference"].bare().under(verl.REF)
        | (verl.TABLES["critic"].wrapped(of_critic) | TABLES["tree_critic"]).under(verl.CRITIC)
        | TABLES["tree"]
    ).under(TREE)
)
