"""On-policy distillation in several frameworks: the teacher and its divergence become `teacher` and `actor.distill`."""

from __future__ import annotations

from fivefold_import.draft import Draft

COEFF = "actor.distill.coeff"
TEACHER_PATH = "teacher.path"
ONE_TEACHER = "there is one teacher: the first is taken"
NO_REWARD = "no reward is trained on: the teacher is the only signal"


def train_on_teacher_alone(draft: Draft, source: str, weight: float = 1.0) -> None:
    """Convert a key that asks for distillation without rewards: the teacher's log-probs are the advantage."""
    draft.recipe[COEFF] = weight
    draft.mapped(source, "actor.advantage", "none", f"{NO_REWARD}; {COEFF}={weight:g}")
