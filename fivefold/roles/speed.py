"""How fast a step was: tokens per second, and FLOP/s beside what the devices can do (MFU and HFU).

seconds of a phase, the model that works in it, the step's sequences ──> model FLOPs / seconds / devices / peak
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fivefold.config.role_sections import role_section
from fivefold.config.schema.engine import EngineConfig
from fivefold.config.schema.machines import ClusterConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.flops import BACKWARD_AND_FORWARD, forward_of, training_flops
from fivefold.families.recomputation import repeated_flops
from fivefold.families.shape import ModelShape
from fivefold.layout.gpus import peak_flops
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.placement import Placement
from fivefold.roles.remote_batch import RemoteBatch

_FORWARD = {"old log-probs": "actor", "reference": "ref", "teacher": "teacher", "values": "critic"}
"""Phases of one forward pass over the step's sequences, and the role that makes it."""
_TRAINING = {"train": "actor", "critic train": "critic"}
"""Phases of forward and backward passes, `ppo_epochs` of each."""


@dataclass(frozen=True)
class _Model:
    """A model that works in a phase, and its processes."""

    shape: ModelShape
    layout: ParallelLayout
    section: EngineConfig
    """The section that says what its backward pass computes again."""
    epochs: int


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

    def metrics(self, batch: RemoteBatch, seconds: Mapping[str, float], step_seconds: float) -> dict[str, float]:
        """Return the metrics of a step.

        Args:
            batch: the step's sequences.
            seconds: seconds of each phase, `train` among them.
            step_seconds: seconds of the whole step.
        """
        actor = self._models["actor"]
        ranks = actor.layout.world_size
        lengths, n_trained = batch.lengths_N.tolist(), int(batch.trained_N.sum())
        flops = training_flops(actor.shape, lengths, n_trained) * actor.epochs
        return {
            "tokens_per_second": batch.n_tokens / step_seconds,
            "train/tokens_per_second_per_device": batch.n_tokens * actor.epochs / seconds["train"] / ranks,
            "train/tflops_per_device": flops / seconds["train"] / ranks / 1e12,
            **({} if self._peak is None else self._utilization(lengths, n_trained, seconds, self._peak)),
            **{f"seconds/{phase}": value for phase, value in seconds.items()},
            "seconds/step": step_seconds,
        }

    def _utilization(
        self, lengths: Sequence[int], n_trained: int, seconds: Mapping[str, float], peak: float
    ) -> dict[str, float]:
        """Return the MFU of each phase in which a model worked, and the HFU of those that train."""
        used = {}
        for phase, role in {**_FORWARD, **_TRAINING}.items():
            if phase not in seconds:
                continue
            model = self._models[role]
            possible = seconds[phase] * model.layout.world_size * peak
            forward = forward_of(model.shape, lengths, n_trained)
            if phase not in _TRAINING:
                used[f"mfu/{phase}"] = forward.total / possible
                continue
            flops = BACKWARD_AND_FORWARD * forward.total
            repeated = repeated_flops(forward, model.section, model.layout, model.shape)
            used[f"mfu/{phase}"] = model.epochs * flops / possible
            used[f"hfu/{phase}"] = model.epochs * (flops + repeated) / possible
        return used


def _model(
    recipe: TrainRecipe, placement: Placement, role: str, shape: ModelShape, others: Mapping[str, ModelShape]
) -> _Model:
    """Return the model of a role; a reference without a section of its own is in the actor's processes."""
    section = role_section(recipe, role)
    own = others.get(role, shape)
    return _Model(
        shape=own.as_critic() if role == "critic" else own,
        layout=placement[role if role in placement else "actor"].layout,
        section=section if isinstance(section, EngineConfig) else recipe.actor,
        epochs=recipe.critic.ppo_epochs if role == "critic" and recipe.critic is not None else recipe.actor.ppo_epochs,
    )


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
