"""Keys of the replay buffer: where it cannot be right, the recipe is refused."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.config.schema.train import TrainRecipe


def recipe(rollout: dict[str, Any], actor: dict[str, Any] | None = None, **buffer: Any) -> TrainRecipe:
    return TrainRecipe.model_validate(
        {
            "experiment_name": "e",
            "actor": {"path": "m", **(actor or {})},
            "train_dataset": {"path": "d"},
            "rollout": {**rollout, "replay_buffer": {"batch_size": 8, "max_age": 4, **buffer}},
        }
    )


AHEAD = {"max_head_offpolicyness": 2}
NO_METHOD = {"rollout_correction": {"method": "none"}}


@pytest.mark.parametrize(
    ("rollout", "actor", "buffer", "fault"),
    [
        ({}, {}, {}, r"replay_buffer.* which a synchronous run does not correct for, got max_head_offpolicyness=0"),
        ({"max_head_offpolicyness": 4}, {}, {}, r"max_age=4 must be above max_head_offpolicyness=4"),
        (AHEAD, {}, {"cooldown_steps": 5}, r"cooldown_steps=5 is above max_age=4"),
        (AHEAD, {}, {"max_uses": 1}, "max_uses"),
        (AHEAD, NO_METHOD, {}, r"rollout_correction.method=none nothing weighs them"),
        (AHEAD, {"dynamic_sampling": True}, {}, "dynamic_sampling"),
    ],
)
def test_a_buffer_that_would_be_wrong_is_refused(
    rollout: dict[str, Any], actor: dict[str, Any], buffer: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        recipe(rollout, actor, **buffer)


def test_the_oldest_tokens_are_those_of_the_buffer() -> None:
    assert recipe(AHEAD).rollout.oldest == 4
    assert recipe(AHEAD, {**NO_METHOD, "recompute_logprob": False}).rollout.oldest == 4
    assert (
        TrainRecipe.model_validate(
            {"experiment_name": "e", "actor": {"path": "m"}, "train_dataset": {"path": "d"}, "rollout": AHEAD}
        ).rollout.oldest
        == 2
    )
