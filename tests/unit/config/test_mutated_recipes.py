"""Recipes that are changed at random are refused with one clear error, or accepted and written back as the same recipe.

`python benchmarks/mutated_recipes.py` does the same with ten thousand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.mutated_recipes import Mutant, Tree, base_recipes, judge, mutant
from fivefold.config.yaml_reader import write_yaml

COUNT = 60


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tree]:
    return base_recipes(tmp_path_factory.mktemp("imported"))


def test_mutated_recipes_have_no_faults(tmp_path: Path, bases: dict[str, Tree]) -> None:
    outcomes = set()
    for number in range(COUNT):
        changed = mutant(number, bases)
        verdict = judge(changed, tmp_path)
        assert verdict.faults == [], (number, changed.base, changed.changes, changed.overrides, verdict.message)
        outcomes.add(verdict.outcome)
    assert outcomes == {"accepted", "refused"}


def test_recipes_that_are_not_changed_are_accepted(tmp_path: Path, bases: dict[str, Tree]) -> None:
    for name, tree in bases.items():
        verdict = judge(Mutant(name, (), write_yaml(tree), ()), tmp_path)
        assert (verdict.outcome, verdict.faults) == ("accepted", []), (name, verdict.message)
