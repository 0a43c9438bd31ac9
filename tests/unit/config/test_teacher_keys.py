"""Keys of a teacher and of what is learnt from it."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.config.roles import roles_of, with_paths
from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.recipe import recipe_allocation


@pytest.mark.parametrize(
    ("actor", "teacher", "fault"),
    [
        ({"distill": {"coeff": 0.5}}, None, r"actor\.distill\.coeff=0\.5 needs a teacher"),
        ({}, {"path": "t"}, "the section teacher has no effect with actor.distill.coeff=0"),
        ({"distill": {"over": "top_k"}}, None, "over=top_k has no effect with coeff=0: raise coeff"),
        ({"advantage": "none"}, None, "trains on no reward, and there is no teacher"),
        ({"distill": {"coeff": 1.0, "direction": "forward"}}, {"path": "t"}, "more than the sampled token"),
        ({"distill": {"coeff": 1.0, "over": "full", "top_k": 4}}, {"path": "t"}, "has no effect with over=full"),
        ({"distill": {"coeff": 1.0, "direction": "jsd"}}, {"path": "t"}, "more than the sampled token"),
        (
            {"distill": {"coeff": 1.0, "over": "full", "teacher_share": 0.1}},
            {"path": "t"},
            "teacher_share=0.1 has no effect with dir",
        ),
        (
            {"distill": {"coeff": 1.0, "over": "full", "direction": "jsd", "teacher_share": 1.0}},
            {"path": "t"},
            "less than 1",
        ),
    ],
)
def test_a_teacher_and_what_is_learnt_from_it_belong_together(
    actor: dict[str, Any], teacher: dict[str, Any] | None, fault: str
) -> None:
    values = {"experiment_name": "e", "actor": {"path": "m", **actor}, "train_dataset": {"path": "d"}}
    with pytest.raises(ValueError, match=fault):
        TrainRecipe.model_validate({**values, "teacher": teacher})


@pytest.mark.parametrize(
    ("coeff", "values", "fault"),
    [
        (0.0, {"teachers": {"a": {"path": "t"}}}, r"teachers=\['a'\] have no effect with actor\.distill\.coeff=0"),
        (1.0, {"teachers": {"a": {"path": "t"}}, "teacher": {"path": "t"}}, "exclude each other"),
        (1.0, {"teachers": {"a": {"path": "t", "weight": 2.0}}}, r"teachers\.a\.weight=2 has no effect"),
        (1.0, {"teachers": {"a": {"path": "t", "data_sources": []}}}, "leaves the teacher no prompt"),
        (1.0, {"teachers": {"a.b": {"path": "t"}}}, "a.b"),
        (1.0, {"teachers": {"a": {}}}, "path"),
    ],
)
def test_several_teachers_exclude_what_has_no_effect(coeff: float, values: dict[str, Any], fault: str) -> None:
    actor = {"path": "m", "distill": {"coeff": coeff}}
    with pytest.raises(ValueError, match=fault):
        TrainRecipe.model_validate({"experiment_name": "e", "actor": actor, "train_dataset": {"path": "d"}, **values})


@pytest.mark.parametrize(
    ("distill", "teacher", "fault"),
    [
        ({"coeff": 1.0}, {"teacher": {"path": "t"}}, "set actor.distill.over to top_k or full"),
        (
            {"coeff": 1.0, "over": "full"},
            {"teachers": {"a": {"path": "t", "data_sources": ["x"]}}},
            "needs a teacher of all prompts",
        ),
    ],
)
def test_examples_are_taught_by_distributions_of_teachers_of_all_rows(
    distill: dict[str, Any], teacher: dict[str, Any], fault: str
) -> None:
    values = {"experiment_name": "e", "actor": {"path": "m", "distill": distill}, "train_dataset": {"path": "d"}}
    expert = {"path": "d", "signal": "teacher"}
    with pytest.raises(ValueError, match=fault):
        TrainRecipe.model_validate({**values, **teacher, "expert_dataset": expert})


def test_each_of_several_teachers_is_a_role_with_its_own_layout_and_path() -> None:
    values = {
        "experiment_name": "e", "actor": {"path": "m", "distill": {"coeff": 1.0}}, "train_dataset": {"path": "d"},
        "teachers": {"a": {"path": "x", "backend": "megatron:t2", "colocate": False}, "b": {"path": "y"}},
    }  # fmt: skip
    recipe = TrainRecipe.model_validate(values)
    roles = {name: (role.spec.key, role.path) for name, role in roles_of(recipe).items()}
    assert roles["teacher-a"] == ("teachers.a", "x")
    assert roles["teacher-b"] == ("teachers.b", "y")
    assert "teacher" not in roles
    moved = with_paths(recipe, {"teacher-b": "z"})
    assert [own.path for own in moved.teachers.values()] == ["x", "z"]
    degrees = {role.role: role.tp for role in recipe_allocation(recipe).roles}
    assert (degrees["teacher-a"], degrees["teacher-b"]) == (2, 1)
