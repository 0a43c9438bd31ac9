"""The processes of every role that trains are told which weights are frozen."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.config.load import load_recipe
from fivefold.config.roles import roles_of
from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.placement import place
from fivefold.roles.specs import trainer_specs

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
FREEZE = 'freeze=["model.layers.*"]'


KINDS = {"quickstart": TrainRecipe, "tiny-moe-sft": SFTRecipe, "quickstart-dpo": DPORecipe, "quickstart-rm": RMRecipe}


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_the_actor_of_every_command_freezes_what_its_section_names(name: str, kind: type[Recipe]) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml", [f"actor.{FREEZE}"], kind)
    assert trainer_specs(recipe, place(recipe), n_steps=1)["actor"].options.trained.frozen == ("model.layers.*",)


def test_actor_and_critic_freeze_their_own_weights_and_a_reference_needs_none() -> None:
    keys = ["critic.path=package:tiny-moe", "critic.backend=megatron:d2", "actor.advantage=gae", "actor.kl_ctl=0.1"]
    recipe = load_recipe(RECIPES / "quickstart.yaml", [*keys, f"critic.{FREEZE}"], TrainRecipe)
    specs = trainer_specs(recipe, place(recipe), n_steps=1)
    assert (specs["actor"].options.trained.frozen, specs["critic"].options.trained.frozen) == ((), ("model.layers.*",))
    assert specs["actor"].reference is not None, "the weights that are trained move away from it"
    assert roles_of(recipe)["ref"].trained is None
