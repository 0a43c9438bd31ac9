"""The state of a rollout engine: whether it is awake, and which weights it has."""

from __future__ import annotations


class EngineState:
    """Tells whether an engine is awake, and the version of its weights, if it has any."""

    def __init__(self, weight_version: int | None) -> None:
        """`weight_version` is that of the engine's first weights; None: it has none before the first update."""
        self._weight_version = weight_version
        self._is_awake = True

    @property
    def is_awake(self) -> bool:
        """Whether the engine has its device memory."""
        return self._is_awake

    def require_awake(self) -> None:
        """Raise RuntimeError if the engine is asleep."""
        if not self._is_awake:
            raise RuntimeError("the rollout engine is asleep: call wake() and update_weights() first")

    def require_weights(self) -> int:
        """Return the version of the weights.

        Raises:
            RuntimeError: the engine is asleep, or has no complete set of weights.
        """
        self.require_awake()
        if self._weight_version is None:
            raise RuntimeError(
                "the rollout engine has no complete set of weights: none were loaded, the last update failed, or it "
                "has slept since. Call update_weights() first"
            )
        return self._weight_version

    def begin_update(self) -> None:
        """Forget the version until `end_update`, so that an engine whose update fails has no weights."""
        self.require_awake()
        self._weight_version = None

    def end_update(self, version: int) -> None:
        """Record that all weights are those of `version`."""
        self._weight_version = version

    def sleep(self) -> None:
        """Record that the engine sleeps and has forgotten its weights."""
        self._weight_version = None
        self._is_awake = False

    def wake(self) -> None:
        """Record that the engine is awake; its weights come with the next update."""
        self._is_awake = True
