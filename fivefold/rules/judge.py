"""Rules of the model that judges: what its engine or its devices cannot do with the recipe's keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fivefold.config.schema.rewards import is_hosted
from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.backends import BACKENDS
from fivefold.layout.placement import Placement
from fivefold.layout.recipe import recipe_allocation
from fivefold.rewards.judge import HostedJudge
from fivefold.rules.models import RoleShapes
from fivefold.rules.rollout import key_problems


def judge_problems(recipe: TrainRecipe, others: RoleShapes) -> Iterator[str]:
    """Yield a line for each key of the section that the judge's engine or its model cannot take."""
    if (judge := recipe.reward.judge) is None:
        return
    backend = next(BACKENDS[role.backend] for role in recipe_allocation(recipe).roles if role.role == "judge")
    yield from key_problems("reward.judge", judge, backend)
    if "judge" in others:
        # Servers compute sparse attention.
        model = replace(others["judge"], indexer=None) if backend.is_server else others["judge"]
        if judge.max_length > model.most_tokens:
            yield f"reward.judge.max_length={judge.max_length} is too much: the model {model.limit}; lower it"
    for name, each in recipe.reward.asked.items():
        if not is_hosted(each):
            continue
        key, kwargs = f"reward.{name}kwargs", each.kwargs
        if isinstance(answer := kwargs.get("max_tokens", HostedJudge.max_tokens), int) and answer >= judge.max_length:
            yield (
                f"{key}.max_tokens={answer} leaves no room for a question in reward.judge.max_length="
                f"{judge.max_length}: lower the first, or raise the second"
            )
        asked, allowed = kwargs.get("temperature", 0), backend.temperatures
        if allowed is not None and isinstance(asked, int | float) and asked and not allowed[0] <= asked <= allowed[1]:
            yield (
                f"{key}.temperature={asked}: {backend.title} samples with {allowed[0]} to {allowed[1]}; choose a "
                "temperature in this range, or 0"
            )


def judge_turn_problems(recipe: TrainRecipe, placement: Placement) -> Iterator[str]:
    """Yield a line if the judge shares devices in asynchronous training, in which all roles work at the same time."""
    if "judge" not in placement or not recipe.rollout.max_head_offpolicyness:
        return
    if others := placement.sharers("judge"):
        yield (
            f"the judge has devices in turn with {' and '.join(others)}, which asynchronous training "
            f"(rollout.max_head_offpolicyness={recipe.rollout.max_head_offpolicyness}) keeps at work: give it "
            "other devices (reward.judge.colocate=false, or another device_mapping)"
        )
