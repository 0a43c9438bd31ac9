"""AReaL's tables, and the rules of single keys that take more than a lookup."""

from __future__ import annotations

from fivefold_import import megatron, reasons
from fivefold_import.areal import agents
from fivefold_import.critic import of_critic
from fivefold_import.draft import Draft
from fivefold_import.tables import read_tables


def _proximal(draft: Draft, key: str) -> None:
    """Convert how the decoupled objective finds old log-probabilities."""
    match draft.get(key):
        case "loglinear":
            draft.mapped(key, "actor.prox_logp_method", "loglinear", "the actor counts as one version newer")
        case "recompute" | "metrics":
            draft.implied(key, "old log-probabilities are computed by the trainer")
        case _:
            draft.unsupported(key, "old log-probabilities are computed by the trainer, or interpolated (loglinear)")


def _scheduler(draft: Draft, key: str) -> None:
    """Convert the scheduler's type, which is `local`, `ray`, or a batch system that jobs are submitted to."""
    value = draft.get(key)
    if value in ("local", "ray"):
        draft.mapped(key, key, value)
    draft.unsupported(key, f"jobs are not submitted to {value}: start Ray there, and join it with scheduler.type=ray")


def _recovery(draft: Draft, key: str) -> None:
    """Convert whether a run resumes from its newest checkpoint; older releases have `fault` and `resume`."""
    match draft.get(key):
        case True | "on" | "auto":
            draft.mapped(key, key, "auto")
        case False | "off" | "disabled":
            draft.mapped(key, key, "disabled")
        case "fault":
            draft.mapped(key, key, "auto", "the same command resumes, whether or not an error has ended the run")
        case "resume":
            draft.mapped(key, key, "auto", "without a checkpoint, the run starts from its beginning")
        case other:
            draft.unsupported(key, f"{other!r} is not offered; there are auto and disabled")


def _optimizer(draft: Draft, key: str) -> None:
    """Convert the optimizer's name; `adam_bf16` is FSDP's, with moments in bfloat16."""
    match draft.get(key):
        case "adam":
            draft.implied(key, reasons.ADAMW)
        case "adam_bf16":
            draft.recipe.setdefault(draft.target("actor.fsdp.optimizer.exp_avg_sq_dtype"), "bfloat16")
            draft.mapped(key, "actor.fsdp.optimizer.exp_avg_dtype", "bfloat16", "and exp_avg_sq_dtype")
        case _:
            draft.unsupported(key, reasons.ADAMW)


def _preferences_loss(draft: Draft, key: str) -> None:
    """Convert the loss of DPO; IPO's log-ratios are divided by the answers' lengths, DPO's are sums."""
    match draft.get(key):
        case "sigmoid":
            draft.mapped(key, "actor.loss_type", "sigmoid")
        case "ipo":
            draft.recipe["actor.average_log_prob"] = True
            draft.mapped(key, "actor.loss_type", "ipo", "and average_log_prob, as AReaL's IPO is by the token")
        case other:
            draft.unsupported(key, f"{other!r} is not offered; there are sigmoid and ipo")


def _bridge(draft: Draft, key: str) -> None:
    """Convert what loads the weights: megatron-bridge if it is asked for; AReaL's default is mbridge."""
    if draft.get(key) == "megatron-bridge":
        draft.mapped(key, "actor.megatron.bridge_type", "megatron-bridge", reasons.OTHER_BRIDGE)
    draft.implied(key, reasons.OWN_BRIDGE)


TABLES = read_tables("areal", {**globals(), **vars(agents)}, {"megatron": megatron.TABLES})
RULES = TABLES["top"] | TABLES["critic"].wrapped(of_critic).under("critic.")
GIVEN = RULES | TABLES["given"]
"""The rules of sources that train on given answers: fine-tuning, DPO and reward models."""
CRITICS = {
    **TABLES["optimizer"].under("critic.").defaults,
    "critic.ppo_n_minibatches": 4,
    "critic.eps_clip": 0.5,
}
"""The defaults of a section `critic` that the source has."""
