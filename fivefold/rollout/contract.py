"""The contract of rollout engines: what they answer, and how they get weights.

GenerationRequest ... ──engine.submit ... engine.collect──> Completion ...
                                ^
actor ──(Hugging Face file name, tensor) ...──engine.update_weights(weights, version)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from fivefold.rollout.protocol import GenerationRequest, SamplingParams, ServerCounts
from fivefold.types import Completion


class RolloutEngine(Protocol):
    """One replica: a model that answers requests, and whose weights the actor replaces between steps."""

    def submit(self, number: int, request: GenerationRequest, sampling: SamplingParams) -> None:
        """Begin to answer request `number`, in parallel with those in progress.

        It continues while weights change: each token carries the version that sampled it.
        """

    def collect(self, seconds: float) -> list[tuple[int, Completion]]:
        """Work on submitted requests until some are answered, or about `seconds` have passed.

        Returns:
            The completion of each request that is answered, with the request's number.
        """

    @property
    def n_running(self) -> int:
        """Number of requests that were submitted and that `collect` has not returned."""

    def unfinished(self) -> dict[int, GenerationRequest]:
        """Return the requests that are not answered, by number, with their tokens up to the last update.

        Lost requests that `take_lost` has not returned are included; requests that would start over are not.
        """

    def take_lost(self) -> dict[int, GenerationRequest]:
        """Return the requests that were lost since the last call, because what answered them has died, by number.

        They have what is known of their completions, so that another engine can continue from there. The engine that
        lost them has started again. If it then has no weights, it needs an update before it gets further requests.
        """

    def take_restarts(self) -> list[str]:
        """Return why a server was started again since the last call, once for each time."""

    def take_counts(self) -> ServerCounts:
        """Return what a server has counted since the last call."""

    @property
    def has_weights(self) -> bool:
        """Whether the engine has a complete set of weights."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights in place; completions carry `version` from here on.

        Args:
            weights: every tensor exactly once, under its name in Hugging Face files.
            version: version of the weights.

        Raises:
            ValueError: a tensor that is missing, unknown, sent twice or of the wrong shape. The engine then refuses to
                generate until an update succeeds.
            RuntimeError: the engine is asleep.
        """

    def stage_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take weights for the next `swap_weights`; a separate thread may call this during `collect`.

        Args:
            weights: as in `update_weights`, in host memory that stays as it is.
            version: version of the weights.

        Raises:
            ValueError: as `update_weights`; the engine then keeps the weights that it has.
        """

    def swap_weights(self) -> None:
        """Replace all weights in place by the weights of the last `stage_weights`, which are then forgotten.

        Raises:
            RuntimeError: the engine is asleep.
        """

    def receive(self, items: Iterator[Any], version: int) -> None:
        """Do what `update_weights` does, with the items of the run's transport, each done before the next is taken.

        Raises:
            ValueError: as `update_weights`.
            RuntimeError: the engine is asleep, or what arrived is not what was sent.
        """

    def sleep(self) -> None:
        """Forget the weights, and give the device memory of weights and cache back.

        An engine that has loaded its weights itself keeps them in host memory.
        """

    def wake_weights(self) -> bool:
        """Take the device memory of the weights again, so that an update can bring them, and not yet the cache's.

        The engine cannot generate before `wake`. An engine that has the memory already stays as it is.

        Returns False if it has not, because its server has died while it slept.
        """

    def wake(self) -> None:
        """Take all device memory again. Weights that came since `wake_weights` stay; else an update has to bring them.

        An engine that is awake stays as it is.
        """


def complete(
    engine: RolloutEngine, requests: Sequence[GenerationRequest], sampling: SamplingParams
) -> list[Completion]:
    """Return one completion for each request, in their order, of an engine that has no other requests.

    Raises:
        RuntimeError: what answered them has died. Further errors: see the engine's `submit` and `collect`.
    """
    for number, request in enumerate(requests):
        engine.submit(number, request, sampling)
    done: dict[int, Completion] = {}
    while engine.n_running:
        done |= dict(engine.collect(seconds=10.0))
    if len(done) < len(requests):
        raise RuntimeError("the engine has lost its requests")
    return [done[number] for number in range(len(requests))]
