"""The roles of a run, and which of them has the devices that they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from fivefold.engine.contract import Offloadable
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.cache_room import CacheRoom
from fivefold.roles.critic import Critic
from fivefold.roles.frozen import FrozenModel
from fivefold.roles.moved_bytes import moved_metrics
from fivefold.roles.reference import Reference
from fivefold.roles.rollout import Rollout
from fivefold.roles.trained import TrainedRole


@dataclass
class Roles:
    """All roles of a run. There is a reference only if the recipe has a KL term, and a critic only if it has one."""

    actor: Actor
    rollout: Rollout
    reference: Reference | None
    offloaded: tuple[Offloadable, ...] = ()
    """What the actor moves off its devices while the rollout that shares them is awake. The weights are added if the
    rollout's cache does not fit beside them."""
    critic: Critic | None = None
    frozen: Mapping[str, FrozenModel] = field(default_factory=dict)
    """Models that are not trained, by role; the reference is not among them."""

    @property
    def trained(self) -> dict[str, TrainedRole]:
        """The roles that are trained, by name."""
        return {"actor": self.actor, **({} if self.critic is None else {"critic": self.critic})}

    def take_moved(self) -> dict[str, float]:
        """Return the metrics of what all roles have moved off their devices and back since the last call."""
        counts = [self.actor.moved, *(model.moved for model in self.frozen.values())]
        counts += [] if self.critic is None else [self.critic.moved]
        return moved_metrics(count.take() for count in counts)

    @contextmanager
    def training(self, timers: PhaseTimers) -> Iterator[None]:
        """Give the actor, inside the block, the devices that the rollout shares with it, and all of its state.

        Behind the block the rollout sleeps on: call `send_weights` next, which gives the devices back to it. A frozen
        model on devices that are trained on does not work meanwhile.
        """
        with self.actor.in_turn:
            if self.rollout.shares_devices:
                with timers.phase("hand-over"):
                    self.rollout.sleep()
                    self.actor.onload(self.offloaded)
            yield

    @contextmanager
    def on_device(self, timers: PhaseTimers, *needed: Offloadable) -> Iterator[None]:
        """Have `needed` of the actor on its devices inside the block, which saves or loads it.

        If the rollout must make room for it, it gets its weights once more behind the block.
        """
        if not set(needed).intersection(self.offloaded):
            yield
            return
        version = self.rollout.version
        with self.training(timers):
            yield
        if version is not None:
            self.send_weights(version, timers)

    @contextmanager
    def critic_on_device(self, timers: PhaseTimers, *needed: Offloadable) -> Iterator[None]:
        """Have `needed` of the critic on its devices inside the block, which saves or loads it.

        If the rollout must make room for it, it gets its weights once more behind the block.
        """
        assert self.critic is not None
        if not set(needed).intersection(self.critic.offloaded):
            yield
            return
        version = self.rollout.version
        with self.training(timers), self.critic.working(*needed):
            yield
        if version is not None and self.rollout.shares_devices:
            self.send_weights(version, timers)

    def send_weights(self, version: int, timers: PhaseTimers) -> None:
        """Send the actor's weights to the rollout, as version `version`; with them, the devices that they share.

        Two copies of the weights are then on the devices, and nothing else that can wait: gradients and optimizer state
        go before, and the rollout's cache, which takes what the others leave, comes when the actor has freed the rest.

        A server that dies while it takes them is started again, and all get them once more; so is one that has died
        while it slept.
        """
        with self.actor.in_turn:
            self._send_weights(version, timers)
            while not self.rollout.can_generate():
                self._send_weights(version, timers)

    def _send_weights(self, version: int, timers: PhaseTimers) -> None:
        shares, room = self.rollout.shares_devices, CacheRoom(self.rollout.device_share)
        if shares and self.rollout.version is not None:
            # It is awake, and a server has none. There is no room for another copy of the weights beside the caches.
            with self.training(timers):
                pass
        if shares:
            with timers.phase("hand-over"):
                self.actor.offload([kind for kind in self.offloaded if kind != "params"])
                self.actor.release()
                free = self.actor.free_memory()
                while not self.rollout.wake_weights():
                    # A server that starts takes its whole share of its devices, before it sleeps.
                    self.actor.offload(self.offloaded)
                    self.actor.release()
                    self.rollout.revive()
                    free = self.actor.free_memory()
                room.weights_woke(free, self.actor.free_memory())
                self.actor.onload([kind for kind in self.offloaded if kind == "params"])
        with timers.phase("weight sync"):
            self.rollout.meet(self.actor)
            self.rollout.take_weights(self.actor.offer_weights(version))
        if shares:
            with timers.phase("hand-over"):
                self.actor.release()
                if "params" not in self.offloaded and room.lacks(self.actor.free_memory()):
                    self.offloaded = (*self.offloaded, "params")
                self.actor.offload([kind for kind in self.offloaded if kind == "params"])
                self.rollout.wake()
