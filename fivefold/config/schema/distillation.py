"""Distillation: how the actor is drawn towards teachers, and the models that teach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from fivefold.config.schema.engine import FrozenModelConfig
from fivefold.config.schema.fields import NonNegativeFloat, PositiveFloat, Section
from fivefold.config.schema.rules import above_0, equals, needs, reads_if, rule

_DISTILLS = reads_if(above_0("coeff"))
_OVER_SEVERAL = equals("over", "top_k", "full")
_NEEDS_MORE = "needs the teacher's probabilities of more than the sampled token"


class DistillConfig(Section):
    """How the actor is drawn towards the models of `teacher` or `teachers`, on its own samples
    (docs/distillation.md)."""

    coeff: NonNegativeFloat = 0.0
    """Weight of the divergence from the teacher; at 0, no teacher is loaded."""
    over: Annotated[Literal["sampled", "top_k", "full"], _DISTILLS] = "sampled"
    """Tokens over which the divergence is taken at each place: the sampled one, as an advantage; the teacher's `top_k`
    and all others as one; or the whole vocabulary."""
    direction: Annotated[
        Literal["reverse", "forward", "mixed", "jsd"],
        _DISTILLS,
        needs("forward", _OVER_SEVERAL, _NEEDS_MORE),
        needs("mixed", _OVER_SEVERAL, _NEEDS_MORE),
        needs("jsd", _OVER_SEVERAL, _NEEDS_MORE),
    ] = "reverse"
    """`reverse`: KL(actor || teacher), the only one for `over: sampled`. `forward`: KL(teacher || actor). `mixed`: b
    times the forward one and 1 - b times the reverse one, with b = `teacher_share`. `jsd`: the generalized
    Jensen-Shannon divergence (GKD), b KL(teacher || m) + (1 - b) KL(actor || m) with m = b teacher + (1 - b) actor."""
    teacher_share: Annotated[
        Annotated[float, Field(gt=0, lt=1)], _DISTILLS, reads_if(equals("direction", "mixed", "jsd"))
    ] = 0.5
    """Share of the teacher in `mixed` and `jsd`, which GKD calls beta."""
    top_k: Annotated[Annotated[int, Field(ge=1, le=4096)] | None, _DISTILLS, reads_if(equals("over", "top_k"))] = None
    """Number of tokens for `over: top_k`; null: 64."""
    max_divergence: Annotated[PositiveFloat | None, _DISTILLS] = None
    """Largest size of a token's divergence from a teacher, in nats: a larger one counts as this much, and has no
    gradient; null: any."""
    min_logprob: Annotated[Annotated[float, Field(lt=0)] | None, _DISTILLS, reads_if(_OVER_SEVERAL)] = None
    """Log-prob, of actor and teacher, as which a smaller one counts in a divergence over several tokens; null: any."""


class TeacherConfig(FrozenModelConfig):
    """The model that `actor.distill` draws the actor towards; it must have the actor's tokens."""


class NamedTeacherConfig(TeacherConfig):
    """One of several models that `actor.distill` draws the actor towards; each must have the actor's tokens."""

    data_sources: list[str] | None = None
    """Values of the column `data_source` whose prompts it teaches; null: all prompts. Each prompt needs a teacher."""
    weight: PositiveFloat = 1.0
    """Weight of its divergence among the teachers of a prompt, over the sum of theirs."""

    def teaches(self, data_source: str) -> bool:
        """Return whether it teaches the prompts of a source."""
        return self.data_sources is None or data_source in self.data_sources

    def shares_prompts(self, other: NamedTeacherConfig) -> bool:
        """Return whether a prompt may have both teachers."""
        return any(other.teaches(source) for source in self.data_sources or other.data_sources or [""])

    @rule
    def _sources(self) -> Iterator[str]:
        if self.data_sources == []:
            yield "data_sources=[] leaves the teacher no prompt: name data sources, or set null"


def teacher_problems(
    coeff: float, teacher: TeacherConfig | None, teachers: Mapping[str, NamedTeacherConfig]
) -> Iterator[str]:
    """Yield a line for each contradiction between `actor.distill.coeff`, `teacher` and `teachers`."""
    if coeff > 0 and teacher is None and not teachers:
        yield (
            f"actor.distill.coeff={coeff:g} needs a teacher, and there is none: name its model, teacher.path, or those "
            "of several in teachers"
        )
    if teachers and coeff == 0:
        yield (
            f"teachers={sorted(teachers)} have no effect with actor.distill.coeff=0: set algorithm=distill, or raise "
            "actor.distill.coeff, or drop teachers"
        )
    if teachers and teacher is not None:
        yield f"teacher and teachers={sorted(teachers)} exclude each other: make the first one of the others"
    for name, own in teachers.items():
        if own.weight != 1 and not any(own.shares_prompts(other) for other in teachers.values() if other is not own):
            yield (
                f"teachers.{name}.weight={own.weight:g} has no effect, because no other teacher has its prompts: drop "
                "it, or widen data_sources"
            )


def taught_example_problems(distill: DistillConfig, teachers: Mapping[str, NamedTeacherConfig]) -> Iterator[str]:
    """Yield a line for each reason why an expert's responses cannot be learned from teachers."""
    if distill.coeff == 0 or distill.over == "sampled":
        yield (
            "expert_dataset.signal=teacher needs the teacher's distributions: set actor.distill.over to top_k or full, "
            "with actor.distill.coeff above 0"
        )
    if teachers and all(own.data_sources is not None for own in teachers.values()):
        yield (
            "expert_dataset.signal=teacher needs a teacher of all prompts, because examples of an expert have no "
            f"data_source, and teachers={sorted(teachers)} all name data_sources: set them to null for one"
        )
