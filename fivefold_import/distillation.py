"""On-policy distillation in several frameworks: the teacher and its divergence become `teacher` and `actor.distill`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fivefold_import.draft import Draft, Rule

COEFF = "actor.distill.coeff"
TEACHER_PATH = "teacher.path"
ONE_TEACHER = "there is one teacher: the first is taken"
LAID_OUT = "the teacher is laid out as the actor, on its devices, by Fivefold's trainer: change teacher.backend"
NOT_CLIPPED = "the divergence from the teacher is not clipped"
NO_REWARD = "no reward is trained on: the teacher is the only signal"
OFF = "distillation is switched off"


def only_with_teacher(is_on: Callable[[Draft], bool], rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return rules that apply to sources with a teacher; without one, the keys are implied."""

    def guarded(rule: Rule) -> Rule:
        def of(draft: Draft, source: str) -> None:
            if is_on(draft):
                rule(draft, source)
            draft.implied(source, OFF)

        return of

    return {pattern: guarded(rule) for pattern, rule in rules.items()}


def train_on_teacher_alone(draft: Draft, source: str, weight: float = 1.0) -> None:
    """Convert a key that asks for distillation without rewards: the teacher's log-probs are the advantage."""
    draft.recipe[COEFF] = weight
    draft.mapped(source, "actor.advantage", "none", f"{NO_REWARD}; {COEFF}={weight:g}")
