"""New weights for a rollout on separate devices, in parallel with the actor's next step.

actor      all weights ──copy──> host memory        the actor trains its next step
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
    """Copy the actor's weights to host memory, as version `version`; the actor may change them then.

    The rollout is ready to take the copy. Frozen models on the actor's devices wait meanwhile.
    """
    with actor.in_turn, timers.phase("weight sync"):
        copy = actor.copy_weights(version)
        # Last, because servers then pause until the weights come.
        rollout.meet(actor)
        return copy


def give_weights(rollout: Rollout, copy: WeightOffer, timers: PhaseTimers, transport: Transport) -> None:
    """Give all replicas a copy of the weights, in any thread.

    They generate until all weights are on their side. By NCCL, new weights overwrite the old ones as they come, so the
    replicas pause.

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
