"""Single completions, whose prompts may leave them less than `gconfig.max_new_tokens`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fivefold.config.schema.rollout import GenerationConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.environments.single_turn import SingleTurn
from fivefold.families.read import find_shape
from fivefold.rollout.protocol import SamplingParams
from fivefold.rules.models import sampling_problems
from fivefold.types import Completion
from tests.unit.environments.test_agents import task


class Client:
    """Remembers how completions are asked for."""

    asked: SamplingParams | None = None

    async def complete(self, token_ids: Sequence[int], sampling: SamplingParams | None = None) -> Completion:
        self.asked = sampling
        return Completion.of([1], [-0.5], "stop", 0)


@pytest.mark.parametrize(
    ("n_prompt", "keys", "expected"),
    [
        (5, {}, None),  # as the task says
        (5, {"max_tokens": 64}, (50, 8)),
        (20, {"max_tokens": 64}, (44, 8)),
        (60, {"max_tokens": 64}, (4, 4)),
    ],
)
def test_a_prompt_leaves_its_completion_the_rest_of_the_tokens(
    n_prompt: int, keys: dict[str, int], expected: tuple[int, int] | None
) -> None:
    config = GenerationConfig.model_validate({"max_new_tokens": 50, "min_new_tokens": 8, **keys})
    given, client = task("x" * n_prompt), Client()
    assert len(given.request.token_ids) == n_prompt
    asyncio.run(SingleTurn().run(replace(given, sampling=SamplingParams.from_config(config)), client))
    assert expected == (client.asked and (client.asked.max_new_tokens, client.asked.min_new_tokens))


def bounded(most: int | None) -> TrainRecipe:
    values = {
        "experiment_name": "long",
        "actor": {"path": "Qwen/Qwen3-8B"},
        "gconfig": {"max_new_tokens": 40960, "max_tokens": most},
        "train_dataset": {"path": "d", "max_length": 2000},
    }
    return TrainRecipe.model_validate(values)


def test_the_bound_is_what_a_sequence_may_have_at_most_and_fits_the_model() -> None:
    shape, fitting = find_shape("Qwen/Qwen3-8B"), bounded(4096)
    assert fitting.most_tokens(fitting.train_dataset) == 4096
    assert list(sampling_problems(fitting, shape)) == []
    assert "leaves no room for a prompt" in next(sampling_problems(bounded(None), shape))
    assert "gconfig.max_tokens=99999 is too much" in next(sampling_problems(bounded(99999), shape))
    with pytest.raises(ValueError, match=r"train_dataset\.max_length=2000 leaves no room for a completion"):
        bounded(2000)
