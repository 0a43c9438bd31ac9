"""How fast a step was: tokens per second, and FLOP/s compared with what the devices can do (MFU and HFU).

seconds of a phase, the model that works in it, the step's sequences ──> model FLOPs / seconds / devices / peak
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from fivefold.config.roles import roles_of
from fivefold.config.schema.engine import EngineConfig
from fivefold.config.schema.recipe import Recipe
from fivefold.families.backward import over_forward
from fivefold.families.flops import ForwardFlops, PartFlops
from fivefold.families.recomputation import repeated_shares
from fivefold.families.shape import ModelShape
from fivefold.layout.gpus import device_peak
from fivefold.layout.placement import Placement
from fivefold.roles.devices import Models
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.run.setup import Groundwork

_FORWARD = {"old log-probs": "actor", "scores": "actor", "reference": "ref", "teacher": "teacher", "values": "critic"}
"""Phases of one forward pass over the step's sequences, and the role that makes it."""
_TRAINING = {"train": "actor", "critic train": "critic"}
"""Phases of forward and backward passes, as many of each as the role has epochs."""


@dataclass(frozen=True)
class Worked:
    """What a step's models worked on."""

    trained: RemoteBatch
    """The sequences that were trained on."""
    scored: RemoteBatch
    """The sequences of passes without gradient."""
    given: Sequence[RemoteBatch] = ()
    """An expert's sequences, on which the actor's epochs trained as well."""
    trains_actor: bool = True

    @property
    def n_tokens(self) -> int:
        """Tokens that the actor trained on, prompts included."""
        return self.trained.n_tokens + sum(batch.n_tokens for batch in self.given)


@dataclass(frozen=True)
class _Model:
    """A model that works in a phase, and its processes."""

    forward: ForwardFlops
    trained: PartFlops
    """FLOPs of a forward and a backward pass, over the forward pass."""
    repeated: PartFlops
    """What a forward and a backward pass repeat, over the forward pass."""
    n_devices: int
    epochs: int


class StepSpeed:
    """Turns the seconds of a training step into metrics of speed."""

    def __init__(
        self,
        recipe: Recipe,
        placement: Placement,
        shape: ModelShape,
        others: Mapping[str, ModelShape],
        peak: float | None,
    ) -> None:
        """Take what the run knows before its first step.

        Args:
            recipe: the recipe.
            placement: the roles on their devices.
            shape: the actor's model.
            others: separate models of other roles, by role.
            peak: FLOP/s that a device can compute; None: not known, so that there is no MFU.
        """
        self._peak = peak
        self._models = {}
        for name, role in roles_of(recipe).items():
            if not role.spec.generates:
                section = role.section if isinstance(role.section, EngineConfig) else recipe.actor
                own = others.get(name, shape).with_head(role.section.head).trained_by(role.trained)
                layout = placement[name if name in placement else "actor"].layout
                epochs = 1 if role.trained is None else role.trained.epochs
                repeated = repeated_shares(section, layout, own)
                self._models[name] = _Model(
                    ForwardFlops.of(own), over_forward(own), repeated, layout.world_size, epochs
                )

    @classmethod
    def of(cls, recipe: Recipe, ground: Groundwork, models: Models, note: Callable[[str], None]) -> Self:
        """Return what measures the speed of a run; `note` tells the user of a GPU whose speed is not known."""
        devices = models.actor.device_names()
        peak = device_peak(recipe.cluster, devices)
        if peak is None and devices[0] is not None:
            note(f"no MFU: the speed of {devices[0]} is not known; set cluster.device_peak_tflops")
        return cls(recipe, ground.placement, ground.shape, ground.others, peak)

    def metrics(self, worked: Worked, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the speed of training, and if the peak is known the MFU of each phase and the HFU of training.

        Args:
            worked: what the models worked on.
            seconds: seconds of each phase, `train` among them.
        """
        found: dict[str, float] = {}
        for phase, role in {**_FORWARD, **_TRAINING}.items():
            if phase in seconds and (phase != "train" or worked.trains_actor):
                found |= self._of_phase(phase, self._models[role], worked, seconds[phase])
        return found

    def _of_phase(self, phase: str, model: _Model, worked: Worked, seconds: float) -> dict[str, float]:
        trains, batch = phase in _TRAINING, worked.trained if phase in _TRAINING else worked.scored
        given = worked.given if phase == "train" else ()
        lengths = [length for each in (batch, *given) for length in each.sequence_lengths]
        n_trained = sum(int(each.trained_N.sum()) for each in (batch, *given))
        forward = model.forward.on(lengths, n_trained)
        flops = model.epochs * forward.weighted(model.trained) if trains else forward.total
        device_seconds = seconds * model.n_devices
        found: dict[str, float] = {}
        if phase == "train":
            found["train/tokens_per_second_per_device"] = sum(lengths) * model.epochs / device_seconds
            found["train/tflops_per_device"] = flops / device_seconds / 1e12
        if self._peak is not None:
            possible = device_seconds * self._peak
            found[f"mfu/{phase}"] = flops / possible
            if trains:
                repeated = model.epochs * forward.weighted(model.repeated)
                found[f"hfu/{phase}"] = (flops + repeated) / possible
        return found
