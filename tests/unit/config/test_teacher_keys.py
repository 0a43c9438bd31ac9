"""Keys of a teacher and of what is learnt from it."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.config.schema.train import TrainRecipe


@pytest.mark.parametrize(
    ("actor", "teacher", "fault"),
    [
        ({"distill": {"coeff": 0.5}}, None, r"actor\.distill\.coeff=0\.5 needs a teacher"),
        ({}, {"path": "t"}, "the section teacher has no effect with actor.distill.coeff=0"),
        ({"distill": {"over": "top_k"}}, None, "over=top_k has no effect with coeff=0: raise coeff"),
        ({"advantage": "none"}, None, "trains on no reward, and there is no teacher"),
        ({"distill": {"coeff": 1.0, "direction": "forward"}}, {"path": "t"}, "more than the sampled token"),
        ({"distill": {"coeff": 1.0, "over": "full", "top_k": 4}}, {"path": "t"}, "has no effect with over=full"),
    ],
)
def test_a_teacher_and_what_is_learnt_from_it_belong_together(
    actor: dict[str, Any], teacher: dict[str, Any] | None, fault: str
) -> None:
    values = {"experiment_name": "e", "actor": {"path": "m", **actor}, "train_dataset": {"path": "d"}}
    with pytest.raises(ValueError, match=fault):
        TrainRecipe.model_validate({**values, "teacher": teacher})
