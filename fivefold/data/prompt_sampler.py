"""Samplers that choose the prompts of a step by what earlier prompts earned: curricula, replay, or a user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fivefold.data.sampler import Outcome


class PromptSampler(Protocol):
    """Chooses the prompts of each step.

    `train_dataset.sampler` names its class, which is made as `Class(prompts, **options)`: `prompts` are the
    data set's, in its order. A parameter that is called like a key of `train_dataset`, such as `batch_size`, gets the
    key's value, `seed` gets the recipe's, and `train_dataset.sampler_kwargs` has the others.

    Whatever it chooses must follow from its options, its calls and its state, so that a run that continues from a
    checkpoint chooses what the run that was interrupted would have chosen.
    """

    def next_batch(self) -> Sequence[int]:
        """Return the places in the data set of the next `batch_size` prompts, none of them twice."""

    def told(self, outcomes: Sequence[Outcome]) -> None:
        """Take note of what the prompts of a batch earned; called once for each batch, in the order of the batches.

        With `rollout.max_head_offpolicyness` above 0, batches are drawn that much ahead of the reported rewards. With
        `actor.dynamic_sampling`, prompts that the step has tried before are missing.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """Return all that changes with the calls, as values that JSON has: keys are texts, tuples become lists."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the sampler of `state` was: one of the same prompts and options, but for `batch_size`."""
