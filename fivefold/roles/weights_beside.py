"""New weights for a rollout on devices of its own, while the actor trains on.

actor      all weights ──copy──> buckets in host memory        the actor trains its next step
replicas                            └──stage──> where the engine loads them from ──swap──> tokens of the new weights
                                    tokens of the old weights, until the swap
                                    └──NCCL, during the swap ──> tokens of the new weights
"""

from __future__ import annotations

from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.rollout import Rollout
from fivefold.weights.offer import WeightOffer
from fivefold.weights.transport import Transport


def copy_weights(actor: Actor, rollout: Rollout, version: int, timers: PhaseTimers) -> WeightOffer:
    """Return a copy of the actor's weights in host memory, as version `version`; the actor may change them then.

    The rollout is ready to take it. A frozen model on the actor's devices does not work meanwhile.
    """
    with actor.in_turn, timers.phase("weight sync"):
        copy = actor.copy_weights(version)
        # Last, because servers then stand still until the weights come.
        rollout.meet(actor)
        return copy


def give_weights(rollout: Rollout, copy: WeightOffer, timers: PhaseTimers, transport: Transport) -> None:
    """Give all replicas a copy of the weights; this may run in a thread of its own.

    They generate until all weights are on their side. By NCCL, weights have no place there but that of the old ones, so
    that the replicas stand still while they come.

    Raises:
        WorkerError: a replica refused the weights, or a worker died; all workers have been ended.
    """
    if not transport.carries_weights:
        with timers.phase("weight swap"):
            rollout.take_weights(copy)
        return
    with timers.phase("weight staging"):
        rollout.stage_weights(copy)
    with timers.phase("weight swap"):
        rollout.swap_weights(copy.version)
