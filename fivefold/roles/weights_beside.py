"""New weights for a rollout on devices of its own, while the actor trains on.

actor      all weights ──copy──> buckets in host memory        the actor trains its next step
replicas                            └──stage──> where the engine loads them from ──swap──> tokens of the new weights
                                    tokens of the old weights, until the swap
"""

from __future__ import annotations

from collections import deque

from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.rollout import Rollout
from fivefold.sync.offer import WeightOffer


def copy_weights(actor: Actor, version: int, timers: PhaseTimers) -> WeightOffer:
    """Return a copy of the actor's weights in host memory, as version `version`; the actor may change them then."""
    with timers.phase("weight sync"):
        buckets = deque(actor.offer_weights(version).buckets)
    # Each bucket is forgotten when it is taken, and its memory is then free.
    return WeightOffer(version, (buckets.popleft() for _ in range(len(buckets))))


def give_weights(rollout: Rollout, copy: WeightOffer, timers: PhaseTimers) -> None:
    """Give all replicas a copy of the weights, while they generate; this may run in a thread of its own.

    Raises:
        WorkerError: a replica refused the weights, or a worker died; all workers have been ended.
    """
    with timers.phase("weight staging"):
        rollout.stage_weights(copy)
    with timers.phase("weight swap"):
        rollout.swap_weights(copy.version)
