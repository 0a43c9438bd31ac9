"""The roles of a run, and which of them has the devices that they share.

rollout   ████████ awake                  asleep                              ████████
actor              onload ██ prepare ████        ████ update ████ offload
critic                               values ██████                              models.py: `working`
          send_weights └─> training ──────────────────────────────> send_weights
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from fivefold.engine.contract import Offloadable
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.frozen import FrozenModel
from fivefold.roles.models import ModelHandle, TrainedModel, moved_metrics
from fivefold.roles.rollout import Rollout


@dataclass(frozen=True)
class Models:
    """The models of a run, by role; a role that the recipe lacks is in none of the mappings."""

    actor: Actor
    further: Mapping[str, TrainedModel] = field(default_factory=dict)
    """The models that are trained, except the actor."""
    frozen: Mapping[str, FrozenModel] = field(default_factory=dict)
    """The models that are not trained."""

    @property
    def trained(self) -> dict[str, TrainedModel]:
        """The models that are trained."""
        return {"actor": self.actor, **self.further}

    @contextmanager
    def on_device(self, model: ModelHandle, timers: PhaseTimers, *needed: Offloadable) -> Iterator[None]:
        """Have `needed` of a model on its devices inside the block, which saves or loads it; `timers` time the move."""
        with nullcontext() if model is self.actor else model.working(*needed):
            yield

    def take_moved(self) -> dict[str, float]:
        """Return the metrics of what all models have moved off their devices and back since the last call."""
        return moved_metrics(model.moved.take() for model in (*self.trained.values(), *self.frozen.values()))


@dataclass(frozen=True, kw_only=True)
class Roles(Models):
    """The models of a run, and the rollout, which may have their devices in turn with them."""

    rollout: Rollout

    @contextmanager
    def training(self, timers: PhaseTimers) -> Iterator[None]:
        """Give the actor, inside the block, the devices that the rollout shares with it, and all of its state.

        After the block the rollout sleeps on: call `send_weights` next, which gives the devices back to it. A frozen
        model on devices that are trained on does not work meanwhile.
        """
        with self.actor.in_turn:
            if self.rollout.shares_devices:
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
        if version is not None and self.rollout.shares_devices:
            self.send_weights(version, timers)

    def send_weights(self, version: int, timers: PhaseTimers) -> None:
        """Send the actor's weights to the rollout, as version `version`; with them, the devices that they share.

        Two copies of the weights are then on the devices, and nothing else that can wait: gradients and optimizer state
        leave before, and the rollout's cache, which takes what the others leave, comes once the actor has freed the
        rest.

        A server that dies while it takes them is started again, and all get them once more; so is one that has died
        while it slept.
        """
        with self.actor.in_turn:
            self._send_weights(version, timers)
            while not self.rollout.can_generate():
                self._send_weights(version, timers)

    def _send_weights(self, version: int, timers: PhaseTimers) -> None:
        actor, shares, room = self.actor, self.rollout.shares_devices, CacheRoom(self.rollout.device_share)
        if shares and self.rollout.version is not None:
            # It is awake, and a server has none. There is no room for another copy of the weights next to the caches.
            with self.training(timers):
                pass
        if shares:
            with timers.phase("hand-over"):
                actor.offload([kind for kind in actor.away if kind != "params"])
                actor.release()
                free = actor.free_memory()
                while not self.rollout.wake_weights():
                    # A server that starts takes its whole share of its devices, before it sleeps.
                    actor.offload(actor.away)
                    actor.release()
                    self.rollout.revive()
                    free = actor.free_memory()
                room.weights_woke(free, actor.free_memory())
                actor.onload([kind for kind in actor.away if kind == "params"])
        with timers.phase("weight sync"):
            self.rollout.meet(actor)
            self.rollout.take_weights(actor.offer_weights(version))
        if shares:
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
