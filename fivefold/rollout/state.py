"""The state of a rollout engine: which of its device memory it has, and which weights."""

from __future__ import annotations

from typing import Literal

Memory = Literal["none", "weights", "all"]
"""Device memory that an engine has: none while it sleeps, for its weights, or for weights and cache."""


class EngineState:
    """Tells which device memory an engine has, and the version of its weights, if it has any."""

    def __init__(self, weight_version: int | None) -> None:
        """`weight_version` is the version of the engine's first weights; None: it has none before the first update."""
        self._weight_version = weight_version
        self._memory: Memory = "all"

    @property
    def memory(self) -> Memory:
        """The device memory that the engine has."""
        return self._memory

    @property
    def has_weights(self) -> bool:
        """Whether the engine has a complete set of weights."""
        return self._weight_version is not None

    def require_weights(self) -> int:
        """Return the version of the weights, with which the engine may generate.

        Raises:
            RuntimeError: the engine is asleep or has no memory for its cache, or has no complete set of weights.
        """
        self._require_weight_memory()
        if self._memory == "weights":
            raise RuntimeError("the rollout engine has device memory for its weights alone: call wake() first")
        if self._weight_version is None:
            raise RuntimeError(
                "the rollout engine has no complete set of weights: none were loaded, the last update failed, or it "
                "has slept since. Call update_weights() first"
            )
        return self._weight_version

    def begin_update(self) -> None:
        """Forget the version until `end_update`, so that an engine whose update fails has no weights.

        Raises:
            RuntimeError: the engine is asleep.
        """
        self._require_weight_memory()
        self._weight_version = None

    def end_update(self, version: int) -> None:
        """Record that all weights have `version`."""
        self._weight_version = version

    def sleep(self, *, keeps_weights: bool = False) -> None:
        """Record that the engine sleeps, and has forgotten its weights unless it keeps them on the host."""
        if not keeps_weights:
            self._weight_version = None
        self._memory = "none"

    def wake_weights(self) -> None:
        """Record that an engine that slept has memory for its weights, and those that it kept; others come next."""
        self._memory = "weights"

    def wake(self) -> None:
        """Record that the engine has all of its memory; weights that it got before stay."""
        self._memory = "all"

    def _require_weight_memory(self) -> None:
        if self._memory == "none":
            raise RuntimeError("the rollout engine is asleep: call wake() and update_weights() first")
