"""How fast a step was: tokens per second, and FLOP/s beside what the devices can do (MFU and HFU).

seconds of a phase, the model that works in it, the step's sequences ──> model FLOPs / seconds / devices / peak
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fivefold.config.roles import roles_of
from fivefold.config.schema.engine import EngineConfig
from fivefold.config.schema.machines import ClusterConfig
from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.flops import BACKWARD_AND_FORWARD, ForwardFlops, PartFlops
from fivefold.families.recomputation import repeated_shares
from fivefold.families.shape import ModelShape
from fivefold.layout.gpus import peak_flops
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.placement import Placement
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.types import Columns

_FORWARD = {"old log-probs": "actor", "reference": "ref", "teacher": "teacher", "values": "critic"}
"""Phases of one forward pass over the step's sequences, and the role that makes it."""
_TRAINING = {"train": "actor", "critic train": "critic"}
"""Phases of forward and backward passes, `ppo_epochs` of each."""


@dataclass(frozen=True)
class _Model:
    """A model that works in a phase, and its processes."""

    forward: ForwardFlops
    repeated: PartFlops
    """What a forward and a backward pass repeat, over the forward pass."""
    n_devices: int
    epochs: int

    @staticmethod
    def of(shape: ModelShape, layout: ParallelLayout, section: EngineConfig, epochs: int) -> _Model:
        """Return a model as its role lays it out; `section` says what its backward pass recomputes."""
        repeated = repeated_shares(section, layout, shape)
        return _Model(ForwardFlops.of(shape), repeated, layout.world_size, epochs)


class StepSpeed:
    """Turns the seconds of a training step into metrics of speed."""

    def __init__(
        self,
        recipe: TrainRecipe,
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
            others: models that other roles have of their own, by role.
            peak: FLOP/s that a device can compute; None: not known, so that there is no MFU.
        """
        self._peak = peak
        self._models = {
            role: _model(recipe, placement, role, shape, others)
            for role in {"actor", "ref", "critic", "teacher"}
            if role in ("actor", "ref") or role in placement
        }

    def metrics(
        self,
        batch: RemoteBatch,
        given: Sequence[Columns],
        seconds: Mapping[str, float],
        step_seconds: float,
        *,
        trains_actor: bool = True,
    ) -> dict[str, float]:
        """Return the metrics of a step.

        Args:
            batch: the step's sequences.
            given: an expert's sequences, on which the actor's epochs train as well.
            seconds: seconds of each phase, `train` among them.
            step_seconds: seconds of the whole step.
            trains_actor: whether the actor is trained; else the phase `train` has no speed.
        """
        works = {
            phase: _Work.on(batch, self._models[role], trains=phase in _TRAINING)
            for phase, role in {**_FORWARD, **_TRAINING}.items()
            if phase in seconds
        }
        train = works.pop("train").besides(given)
        if trains_actor:
            works["train"] = train
        return {
            "tokens_per_second": train.n_tokens / step_seconds,
            **_metrics(works, seconds, self._peak),
            **{f"seconds/{phase}": value for phase, value in seconds.items()},
            "seconds/step": step_seconds,
        }


class SupervisedSpeed:
    """Turns the seconds of a step of supervised training into metrics of speed."""

    def __init__(
        self,
        recipe: SFTRecipe | DPORecipe | RMRecipe,
        placement: Placement,
        shape: ModelShape,
        others: Mapping[str, ModelShape],
        peak: float | None,
    ) -> None:
        """Take what the run knows before its first step; see `StepSpeed`."""
        self._peak = peak
        shape = shape.as_reward_model() if isinstance(recipe, RMRecipe) else shape
        beside = placement["ref" if "ref" in placement else "actor"].layout
        self._actor = _Model.of(shape, placement["actor"].layout, recipe.actor, epochs=1)
        self._reference = _Model.of(others.get("ref", shape), beside, recipe.actor, epochs=1)

    def metrics(self, trained: RemoteBatch, scored: RemoteBatch, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step.

        Args:
            trained: the sequences of the update.
            scored: those of the passes without gradient, in the phases `scores` and `reference`.
            seconds: seconds of each phase, `train` among them.
        """
        works = {
            "train": _Work.on(trained, self._actor, trains=True),
            "scores": _Work.on(scored, self._actor, trains=False),
            "reference": _Work.on(scored, self._reference, trains=False),
        }
        works = {phase: work for phase, work in works.items() if phase in seconds}
        return {"tokens_per_second": trained.n_tokens / seconds["train"], **_metrics(works, seconds, self._peak)}


@dataclass(frozen=True)
class _Work:
    """What a model does in a phase of a step."""

    model: _Model
    lengths: list[int]
    """Tokens of each sequence."""
    n_trained: int
    """Trained tokens of all sequences."""
    trains: bool
    """Whether the phase has backward passes, in each of the model's epochs."""

    @staticmethod
    def on(batch: RemoteBatch, model: _Model, *, trains: bool) -> _Work:
        """Return the work of a model on the sequences of a batch."""
        return _Work(model, batch.lengths_N.tolist(), int(batch.trained_N.sum()), trains)

    def besides(self, given: Sequence[Columns]) -> _Work:
        """Return the work with further sequences."""
        lengths = [length for columns in given for length in columns.lengths_N.tolist()]
        n_trained = sum(int(columns.values["mask"].sum()) for columns in given)
        return replace(self, lengths=self.lengths + lengths, n_trained=self.n_trained + n_trained)

    @property
    def n_tokens(self) -> int:
        """All tokens, prompts included."""
        return sum(self.lengths)

    @cached_property
    def forward(self) -> PartFlops:
        """FLOPs of one forward pass."""
        return self.model.forward.on(self.lengths, self.n_trained)

    @property
    def flops(self) -> float:
        """FLOPs of the model, without those that are repeated."""
        return self.forward.total * (self.model.epochs * BACKWARD_AND_FORWARD if self.trains else 1.0)

    @property
    def repeated(self) -> float:
        """FLOPs that the backward passes compute again."""
        return self.model.epochs * self.forward.weighted(self.model.repeated)


def _metrics(works: Mapping[str, _Work], seconds: Mapping[str, float], peak: float | None) -> dict[str, float]:
    """Return the speed of the phase `train`, and if `peak` is known the MFU of each phase and the HFU of training."""
    device_seconds = {phase: seconds[phase] * work.model.n_devices for phase, work in works.items()}
    found = {}
    if (train := works.get("train")) is not None:
        found = {
            "train/tokens_per_second_per_device": train.n_tokens * train.model.epochs / device_seconds["train"],
            "train/tflops_per_device": train.flops / device_seconds["train"] / 1e12,
        }
    if peak is None:
        return found
    for phase, work in works.items():
        possible = device_seconds[phase] * peak
        found[f"mfu/{phase}"] = work.flops / possible
        if work.trains:
            found[f"hfu/{phase}"] = (work.flops + work.repeated) / possible
    return found


def _model(
    recipe: TrainRecipe, placement: Placement, role: str, shape: ModelShape, others: Mapping[str, ModelShape]
) -> _Model:
    """Return the model of a role; a reference without a section of its own is in the actor's processes."""
    row = roles_of(recipe).get(role)
    section = None if row is None else row.section
    own = others.get(role, shape)
    return _Model.of(
        shape=own.as_critic() if role == "critic" else own,
        layout=placement[role if role in placement else "actor"].layout,
        section=section if isinstance(section, EngineConfig) else recipe.actor,
        epochs=recipe.critic.ppo_epochs if role == "critic" and recipe.critic is not None else recipe.actor.ppo_epochs,
    )


def known_peak(config: ClusterConfig, devices: Sequence[str | None], note: Callable[[str], None]) -> float | None:
    """Return `device_peak`; a GPU whose speed is not known is told to the user by `note`."""
    peak = device_peak(config, devices)
    if peak is None and devices[0] is not None:
        note(f"no MFU: the speed of {devices[0]} is not known; set cluster.device_peak_tflops")
    return peak


def device_peak(config: ClusterConfig, devices: Sequence[str | None]) -> float | None:
    """Return the FLOP/s that a device can compute, the mean of all devices; None if it is not known.

    Args:
        config: the recipe's section, which may say it.
        devices: names of the devices that the processes compute on; None for a CPU.
    """
    if config.device_peak_tflops is not None:
        return config.device_peak_tflops * 1e12
    peaks = [None if name is None else peak_flops(name) for name in devices]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) / len(known) if known and len(known) == len(peaks) else None
