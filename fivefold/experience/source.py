"""Where the samples of a step come from: the step itself, or a stream that is ahead of it by a bounded age."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fivefold.checkpoints.writer import StateOwner
from fivefold.data.sampler import SamplerState
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.types import Sample


@dataclass(frozen=True, eq=False)
class Experience:
    """The samples that a step trains on."""

    samples: list[Sample]
    """Samples with their rewards, those of one prompt side by side."""
    batch: RemoteBatch
    """The same sequences, in the same order."""
    metrics: dict[str, float]
    """Metrics of the rollout."""
    greedy: Sequence[Sample] = ()
    """The greedy sample of each prompt, with its reward, if the advantage compares with it; they are not trained on."""

    @property
    def groups(self) -> list[int]:
        """Index of each sample's prompt: samples with the same one are a group."""
        return [sample.prompt.index for sample in self.samples]


class Source(Protocol):
    """Gives each step its samples, those of the prompts that the sampler gives out, in their order."""

    def take(self, step: int) -> Experience:
        """Return the experience of training step `step`, counted from 1; steps are taken in order.

        None of its tokens was sampled by weights older than `rollout.max_head_offpolicyness` allows.
        """

    def weights_sent(self, version: int) -> None:
        """Take note that the rollout has weights of version `version`, which is the number of steps behind them."""

    def weights_follow(self, version: int, give: Callable[[], None]) -> None:
        """Call `give`, which gives the rollout weights of version `version`, beside the next step if that may be."""

    def settle(self) -> None:
        """Wait until the rollout has the weights that were last given to it; raise what has failed beside training."""

    def take_news(self) -> str | None:
        """Return what the user should know of the rollout since the last call."""

    @property
    def owners(self) -> Mapping[str, StateOwner]:
        """What a checkpoint has of the source besides its position in the data, by folder."""

    @property
    def sampler_state(self) -> SamplerState:
        """Position in the training data behind the prompts that were taken."""
