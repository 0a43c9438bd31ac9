"""Starts the model that judges (`reward.judge`)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from uuid import uuid4

from fivefold.cluster.group import WorkerGroup
from fivefold.cluster.session import Session
from fivefold.config.schema.rewards import JudgeConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.contract import Offloadable
from fivefold.layout.backends import BACKENDS
from fivefold.layout.placement import Placement
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.judge import Judge, JudgeReplicas, JudgeTexts, judge_texts
from fivefold.roles.rollout import Rollout
from fivefold.roles.rollout_followers import launch_followers, rollout_role
from fivefold.roles.rollout_worker import RolloutWorker
from fivefold.rollout.engines import check_server
from fivefold.rollout.replica import ReplicaSpec


def judge_spec(recipe: TrainRecipe, placement: Placement, reserved: int = 0) -> ReplicaSpec:
    """Return the spec of the replicas of the model that judges.

    Args:
        recipe: the recipe, which has such a model.
        placement: the roles on their devices.
        reserved: bytes that other roles keep on each of its devices.
    """
    layout, config = placement["judge"].layout, recipe.reward.judge
    assert isinstance(config, JudgeConfig)
    return ReplicaSpec(
        backend=layout.backend,
        path=config.path,
        tokenizer_path=config.path,
        trust_remote_code=recipe.trust_remote_code,
        dtype=config.dtype,
        max_batch_size=config.max_batch_size,
        load_weights=True,
        run=uuid4().hex[:8],
        tp=layout.tp,
        pp=layout.pp,
        max_length=config.max_length,
        seed=recipe.seed,
        can_sleep=bool(placement.sharers("judge")) and not placement.is_cpu,
        reserved=reserved,
        memory_fraction=config.memory_fraction,
        python=config.server_python,
        arguments=tuple(map(str, config.server_args)),
        max_restarts=config.max_server_restarts,
        server_timeout_s=config.server_timeout_s,
        section="reward.judge",
        deterministic=recipe.actor.is_deterministic,
        needs_text=False,
    )


def check_judge(recipe: TrainRecipe, placement: Placement, began: datetime | None = None) -> JudgeTexts:
    """Check the server and the tokenizer of the model that judges; return what turns questions into its tokens.

    Args:
        recipe: the recipe, which has such a model.
        placement: the roles on their devices.
        began: time of the run's first start; None: now.

    Raises:
        ValueError: a server that is not installed, or a tokenizer with which the model cannot be asked.
    """
    check_server(judge_spec(recipe, placement))
    return judge_texts(recipe, began)


def judge_beside_rollout(
    session: Session,
    recipe: TrainRecipe,
    placement: Placement,
    rollout: Rollout,
    texts: JudgeTexts,
    timers: PhaseTimers,
    tell: Callable[[str], None],
) -> Judge:
    """Start the model that judges, next to a rollout that has loaded its weights itself, and without an actor."""
    sharers, reserved = placement.sharers("judge"), 0
    if "rollout" in sharers:
        rollout.sleep()
        reserved = BACKENDS[placement["rollout"].layout.backend].asleep_bytes
    groups = launch_judge(session, placement, judge_spec(recipe, placement, reserved))
    if "rollout" in sharers:
        rollout.wake()
    return Judge(judge_replicas(groups["judge"], placement, rollout), recipe, texts, timers, tell)


def launch_judge(session: Session, placement: Placement, spec: ReplicaSpec) -> dict[str, WorkerGroup]:
    """Start the replicas of the model that judges. On devices that it shares, they sleep until they are asked."""
    groups = session.launch(rollout_role(placement, spec, launch_followers(session, placement, spec, "judge"), "judge"))
    if placement.sharers("judge"):
        groups["judge"].call(RolloutWorker.sleep)
    return groups


def judge_replicas(
    group: WorkerGroup,
    placement: Placement,
    rollout: Rollout,
    actor: Actor | None = None,
    offloaded: tuple[Offloadable, ...] = (),
) -> JudgeReplicas:
    """Return the handle of the replicas that `launch_judge` has started.

    Args:
        group: their processes.
        placement: the roles on their devices.
        rollout: the rollout, which sleeps while they work on its devices.
        actor: the actor; None: there is none.
        offloaded: what the actor moves off devices that it shares with them.
    """
    sharers, is_server = placement.sharers("judge"), placement["judge"].layout.is_server
    return JudgeReplicas(
        Rollout(group, shares_devices=bool(sharers), is_server=is_server),
        rollout=rollout if "rollout" in sharers else None,
        actor=actor if "actor" in sharers else None,
        makes_room=offloaded,
    )
