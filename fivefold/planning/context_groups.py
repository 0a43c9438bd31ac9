"""What context-parallel groups by length would save: each sequence on as few of the cp ranks as hold it.

Today every sequence is split over all ranks of cp. A group of g ranks that holds g shares of a micro-batch exchanges
(g - 1) / (cp - 1) of the keys and values that cp ranks exchange for as many tokens each, and nothing if g is 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fivefold.planning.estimates import ModelEstimate
from fivefold.planning.inputs import Inputs
from fivefold.planning.simulation.lengths import Lengths


@dataclass(frozen=True)
class ContextGroups:
    """An upper bound on what groups by length save: it leaves out that sequences divide less evenly."""

    shares: Mapping[int, float]
    """Share of all tokens that need so many ranks, ascending."""
    exchanging: float
    """Seconds that an optimizer step spends on the exchange of keys and values, over all ranks of cp."""
    left: float
    """Seconds that groups by length would spend on it."""
    step: float
    """Seconds of the optimizer step."""

    @property
    def gain(self) -> float:
        """Seconds of the step over its seconds with groups by length."""
        return self.step / (self.step - self.exchanging + self.left)


def context_groups(inputs: Inputs, actor: ModelEstimate, lengths: Lengths, given: float) -> ContextGroups:
    """Return what groups by length would save an actor with context parallelism.

    Args:
        inputs: the inputs of the plan.
        actor: its estimate.
        lengths: lengths of responses, in tokens.
        given: tokens of a sequence that are not sampled: its prompt, and what an environment writes.
    """
    layout, time = actor.placed.layout, actor.time
    assert time is not None, "an actor is trained"
    room = inputs.actor.work.tokens_per_micro_batch / layout.cp
    sizes = [size for size in range(1, layout.cp + 1) if layout.cp % size == 0]
    tokens: Counter[int] = Counter()
    for length in lengths.values:
        whole = round(length + given)
        tokens[next((size for size in sizes if whole <= size * room), layout.cp)] += whole
    shares = {size: tokens[size] / tokens.total() for size in sizes if tokens[size]}
    sent = next(item for item in time.traffic if item.dimension == "cp")
    # A pipeline fills and drains with the same micro-batches.
    stages = (time.in_pipeline + time.bubble) / time.in_pipeline

    def seconds(size: int) -> float:
        moved = sent.bytes * (size - 1) / (layout.cp - 1)
        group = replace(sent, size=size, ranks_per_node=min(size, sent.ranks_per_node), bytes=moved)
        return group.seconds(inputs.gpu) * stages

    left = sum(share * seconds(size) for size, share in shares.items())
    return ContextGroups(shares, seconds(layout.cp), left, time.total)
