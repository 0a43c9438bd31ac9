"""The share of a step in which each side has no work, where the sides work in turn."""

from __future__ import annotations

from collections.abc import Mapping


def idle_shares(rollout: Mapping[str, float], seconds: Mapping[str, float], whole: float) -> dict[str, float]:
    """Return `idle/trainer` and `idle/rollout` of a step in which the sides take turns.

    Args:
        rollout: metrics of the rollout; `replica_busy/mean` is the share of its time in which a replica works.
        seconds: seconds of each phase.
        whole: seconds of the step.
    """
    generating = seconds.get("rollout", 0.0)
    busy = generating * rollout.get("replica_busy/mean", 1.0)
    waiting = generating + seconds.get("rewards", 0.0)
    return {"idle/trainer": waiting / whole, "idle/rollout": 1.0 - busy / whole}
