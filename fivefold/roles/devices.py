"""The roles of a run, by name, and their turns on devices. Those that share some with the rollout: hand_over.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fivefold.cluster.group import Remote
from fivefold.engine.contract import Offloadable
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.frozen import FrozenModel
from fivefold.roles.models import ModelHandle, TrainedModel, moved_metrics
from fivefold.roles.rollout import Rollout
from fivefold.roles.weight_sync import WeightSync

if TYPE_CHECKING:
    from fivefold.roles.judge import JudgeReplicas


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
    """The models of a run, and a rollout on its own devices."""

    rollout: Rollout
    sync: WeightSync
    """The way of the actor's weights to the rollout."""
    judge: JudgeReplicas | None = None
    """The model that judges; None: there is none."""

    @contextmanager
    def training(self, timers: PhaseTimers) -> Iterator[None]:
        """Give the models that are trained their devices inside the block; call `send_weights` after it.

        A frozen model on the actor's devices does not work meanwhile.
        """
        with self.actor.in_turn:
            yield

    def send_weights(self, version: int, timers: PhaseTimers) -> None:
        """Send the actor's weights to the rollout, as version `version`.

        A server that dies while it takes them is started again, and all get them once more.
        """
        with self.actor.in_turn:
            self._send_weights(version, timers)
            while not self.rollout.can_generate():
                self._send_weights(version, timers)

    def _send_weights(self, version: int, timers: PhaseTimers) -> None:
        with timers.phase("weight sync"):
            self.sync.send(version)
            self.rollout.version = version

    def copy_weights(self, timers: PhaseTimers) -> Iterator[Remote]:
        """Copy the actor's weights to host memory for `give_weights`; the actor may change them then.

        Frozen models on the actor's devices wait meanwhile.
        """
        with self.actor.in_turn, timers.phase("weight sync"):
            return self.sync.copy()

    def give_weights(self, copied: Iterator[Remote], version: int, timers: PhaseTimers) -> None:
        """Give the rollout what `copy_weights` has copied, as version `version`, in any thread."""
        self.sync.give(copied, version, timers)
        self.rollout.version = version
