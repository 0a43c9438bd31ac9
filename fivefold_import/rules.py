"""Rules: what becomes of a key that no other key decides about. `tables` says how a framework's table names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fivefold_import import reasons
from fivefold_import.draft import Draft, Rule
from fivefold_import.values import Convert, flag, rounded_up, whole

SWITCHED_OFF: tuple[Any, ...] = (False, 0, -1, "", [], {}, "none", "None", "disabled")
"""Values that switch a key off."""


@dataclass(frozen=True)
class Mapped:
    """Maps the source's key to the recipe's `key`. The framework's default of the source's key is in its table."""

    key: str
    convert: Convert
    note: str = ""

    def __call__(self, draft: Draft, source: str) -> None:
        draft.mapped(source, self.key, self.convert(draft.get(source)), self.note)


@dataclass(frozen=True)
class MappedSteps(Mapped):
    """Maps a number of steps, where 0 and negative numbers mean never; that is implied, because `never` holds."""

    never: str = "it is switched off, as by default"

    def __call__(self, draft: Draft, source: str) -> None:
        if self.convert(draft.get(source)) > 0:
            super().__call__(draft, source)
        else:
            draft.implied(source, self.never)


@dataclass(frozen=True)
class MappedSwitch(Mapped):
    """Maps a switch that is on; one that is off leaves the recipe's default, because `off` holds."""

    off: str = ""

    def __call__(self, draft: Draft, source: str) -> None:
        if self.convert(draft.get(source)):
            super().__call__(draft, source)
        else:
            draft.implied(source, self.off)


def image_column(draft: Draft, source: str) -> None:
    """Leave a column of images open: what becomes of it depends on the model, which is known once all keys are read."""


def to(key: str, convert: Convert, note: str = "") -> Rule:
    """Map the source's key to the recipe's `key`, its value converted."""
    return Mapped(key, convert, note)


def every_steps(key: str) -> Rule:
    """Map a number of steps to the recipe's `key`; 0 and negative numbers mean never."""
    return MappedSteps(key, whole)


def checkpoint_every_steps() -> Rule:
    """Map the number of steps between checkpoints; without one, Fivefold's own frequency holds."""
    return MappedSteps("recover.freq_steps", whole, never=reasons.OWN_FREQUENCY)


def staleness() -> Rule:
    """Map how many steps the rollout may be ahead of the trainer, where a part of a step counts as a whole one."""
    return MappedSteps("rollout.max_head_offpolicyness", rounded_up, never=reasons.SYNCHRONOUS)


def concurrent_rollouts(age: str) -> Rule:
    """Map the most prompts that are answered at one time, which has an effect if the source's key `age` is above 0."""

    def rule(draft: Draft, source: str) -> None:
        if draft.get(age, 0):
            draft.mapped(source, "rollout.max_concurrent_rollouts", whole(draft.get(source)))
        draft.implied(source, "a replica decodes up to rollout.max_batch_size sequences at one time")

    return rule


def offload_all(draft: Draft, source: str) -> None:
    """Map a switch that moves all of the actor's state away while responses are generated."""
    if flag(draft.get(source)):
        for kind in ("grads", "optimizer"):
            draft.recipe.setdefault(f"actor.offload.{kind}", True)
        draft.mapped(source, "actor.offload.params", True, reasons.ALL_LEAVES)
    draft.implied(source, reasons.PLAN_OFFLOADS)


def moments_on_host(draft: Draft, source: str) -> None:
    """Map a switch that keeps all of FSDP's shards in host memory: here only the optimizer's moments can stay there."""
    if flag(draft.get(source)):
        draft.mapped(source, "actor.fsdp.optimizer.state_on", "host", reasons.MOMENTS_ON_HOST)
    draft.implied(source, "it is switched off")


def if_on(key: str, off: str) -> Rule:
    """Map a switch that is on to the recipe's `key`; one that is off is implied, because `off`."""
    return MappedSwitch(key, flag, off=off)


def value_if_on(key: str, value: Any, off: str) -> Rule:
    """Map a switch that is on to a value of the recipe's `key`; one that is off is implied, because `off`."""
    return MappedSwitch(key, lambda written: value if written is True else None, off=off)


def implied(reason: str) -> Rule:
    """Say that the key has no effect or holds in Fivefold anyway, whatever its value."""
    return lambda draft, source: draft.implied(source, reason)


def unsupported(reason: str) -> Rule:
    """Say that Fivefold does not do what the key asks for, whatever its value."""
    return lambda draft, source: draft.unsupported(source, reason)


def is_among(value: Any, accepted: Sequence[Any]) -> bool:
    """Return whether a value is one of some: True == 1 in Python, but not in a configuration."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted)


def only(*accepted: Any, holds: str, otherwise: str | None = None) -> Rule:
    """Make the accepted values implied, because `holds`, and all others unsupported.

    Args:
        accepted: values that ask for what Fivefold does anyway.
        holds: what Fivefold does.
        otherwise: why other values are unsupported; None if `holds` says that too.
    """

    def rule(draft: Draft, source: str) -> None:
        if is_among(draft.get(source), accepted):
            draft.implied(source, holds)
        else:
            draft.unsupported(source, otherwise or holds)

    return rule


def off(reason: str) -> Rule:
    """Make the key implied if it is switched off, empty or 0, and otherwise unsupported, because of `reason`."""
    return only(*SWITCHED_OFF, holds="it is switched off", otherwise=reason)


def unknown(owner: str) -> Rule:
    """Make every option of `owner` that no other pattern covers unsupported."""
    return unsupported(f"this option of {owner} is not among those that are converted")
