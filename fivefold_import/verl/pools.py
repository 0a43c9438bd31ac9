"""verl's pools of devices: each has its nodes, and so many GPUs on each of them."""

from __future__ import annotations

TRAINERS = ("trainer.nnodes", "trainer.n_gpus_per_node")
ROLLOUTS = ("rollout.nnodes", "rollout.n_gpus_per_node")
MOST_ON_A_NODE = 8
"""GPUs of a node that two of verl's pools may share, each with some of them."""


def one_cluster(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
    """Return the nodes, and the GPUs of each, of two pools together; None if they are no one cluster."""
    (nodes, gpus), (others, their_gpus) = one, other
    if nodes == others and gpus + their_gpus <= MOST_ON_A_NODE:
        return nodes, gpus + their_gpus
    return (nodes + others, gpus) if gpus == their_gpus else None
