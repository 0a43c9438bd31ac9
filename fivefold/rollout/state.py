"""Whether a rollout engine can generate, and with which weights."""

from __future__ import annotations


class EngineState:
    """Awake or asleep, and the version of the weights, if there are any."""

    def __init__(self, weight_version: int | None) -> None:
        """`weight_version`: of the weights that the engine begins with; None: it waits for the first update."""
        self._weight_version = weight_version
        self._is_awake = True

    @property
    def is_awake(self) -> bool:
        return self._is_awake

    def require_awake(self) -> None:
        """Raises RuntimeError while asleep."""
        if not self._is_awake:
            raise RuntimeError("the rollout engine is asleep: call wake() and update_weights() first")

    def require_weights(self) -> int:
        """The version of the weights. Raises RuntimeError while asleep or without a complete set of them."""
        self.require_awake()
        if self._weight_version is None:
            raise RuntimeError(
                "the rollout engine has no complete set of weights: none were loaded, the last update failed, or it "
                "has slept since. Call update_weights() first"
            )
        return self._weight_version

    def begin_update(self) -> None:
        """From here to `end_update` there are no weights, which a failed update leaves as it is."""
        self.require_awake()
        self._weight_version = None

    def end_update(self, version: int) -> None:
        """All weights are those of `version`."""
        self._weight_version = version

    def sleep(self) -> None:
        """Weights are forgotten."""
        self._weight_version = None
        self._is_awake = False

    def wake(self) -> None:
        """The weights come with the next update."""
        self._is_awake = True
