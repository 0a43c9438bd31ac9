"""A rollout and models that have devices in turn.

rollout   ████████ awake                  asleep                              ████████
actor              onload ██ prepare ████        ████ update ████ offload
critic                               values ██████                              models.py: `working`
          send_weights └─> training ──────────────────────────────> send_weights
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fivefold.engine.contract import Offloadable
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.devices import Roles
from fivefold.roles.models import ModelHandle


@dataclass(frozen=True, kw_only=True)
class RolesInTurn(Roles):
    """The models of a run, and a rollout that has devices in turn with them."""

    @contextmanager
    def training(self, timers: PhaseTimers) -> Iterator[None]:
        """Give the models that are trained their devices inside the block, and the actor all of its state.

        The rollout stays asleep after the block: call `send_weights` next, which gives the devices back to it. A frozen
        model on the actor's devices does not work meanwhile.
        """
        with super().training(timers):
            with timers.phase("hand-over"):
                self.rollout.sleep()
                self.actor.onload(self.actor.away)
            yield

    @contextmanager
    def on_device(self, model: ModelHandle, timers: PhaseTimers, *needed: Offloadable) -> Iterator[None]:
        """Have `needed` of a model on its devices inside the block, which saves or loads it.

        If the rollout must make room for it, it gets its weights once more after the block.
        """
        if not set(needed).intersection(model.away):
            yield
            return
        version = self.rollout.version
        with self.training(timers), super().on_device(model, timers, *needed):
            yield
        if version is not None:
            self.send_weights(version, timers)

    def _send_weights(self, version: int, timers: PhaseTimers) -> None:
        """Send the actor's weights to the rollout, and with them the devices.

        Two copies of the weights are then on the devices, and nothing else that can wait: gradients and optimizer state
        leave before, and the rollout's cache, which takes what the others leave, comes once the actor has freed the
        rest. Where two copies do not fit, the weights that the actor does not train come from host memory. A server
        that has died while it slept is started again.
        """
        actor, room = self.actor, CacheRoom(self.rollout.device_share)
        if self.rollout.version is not None:
            # It is awake, and a server has none. There is no room for another copy of the weights next to the caches.
            with self.training(timers):
                pass
        with timers.phase("hand-over"):
            waiting = [kind for kind in actor.away if kind != "params" or actor.streams_frozen]
            actor.offload(waiting)
            actor.release()
            free = actor.free_memory()
            while not self.rollout.wake_weights():
                # A server that starts takes its whole share of its devices, before it sleeps.
                actor.offload(actor.away)
                actor.release()
                self.rollout.revive()
                free = actor.free_memory()
            room.weights_woke(free, actor.free_memory())
            actor.onload([kind for kind in actor.away if kind not in waiting])
        super()._send_weights(version, timers)
        with timers.phase("hand-over"):
            actor.release()
            if "params" not in actor.away and room.lacks(actor.free_memory()):
                actor.leave_with("params")
            actor.offload([kind for kind in actor.away if kind == "params"])
            self.rollout.wake()


@dataclass
class CacheRoom:
    """Compares the free memory of the fullest device with what the rollout's cache takes when it wakes.

    The rollout's share of a device is settled at its start, by what the plan says that the other roles keep. But CUDA's
    allocator keeps memory that the plan does not know: segments in which one small tensor is left, workspaces, buffers
    of NCCL.

    Args:
        share: bytes of a device that an awake engine takes; None: it takes what it needs at the time.
    """

    share: int | None
    _weights: int = 0
    """Bytes of the engine's weights, as they were measured when they woke."""

    def weights_woke(self, free_before: int | None, free_after: int | None) -> None:
        """Take the free bytes before and after the weights woke; None: there is no GPU."""
        if free_before is not None and free_after is not None:
            self._weights = max(0, free_before - free_after)

    def lacks(self, free: int | None) -> bool:
        """Return whether `free` bytes are too few for the cache; without a share or a GPU they never are."""
        return self.share is not None and free is not None and free < self.share - self._weights
