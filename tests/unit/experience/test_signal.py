"""What a run says of a step whose gradient is 0."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.experience.samples import many_sequences, no_signal
from fivefold.types import Prompt, Sample


def samples(*rewards: float) -> list[Sample]:
    return [Sample(Prompt(i // 2, "", (1,), None), "", "stop", 2, 1, (0, 0), {"a": r}) for i, r in enumerate(rewards)]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ((0.0, 0.0, 0.0, 0.0), "all 4 responses earned 0. Compare responses"),
        ((0.0, 0.0, 1.0, 1.0), "the responses of each prompt earned the same"),
    ],
)
def test_a_gradient_of_0_is_explained(rewards: tuple[float, ...], message: str) -> None:
    note = no_signal(samples(*rewards), {"grad_norm": 0.0})
    assert note is not None
    assert message in note


def test_a_step_with_a_gradient_or_without_an_update_needs_no_word() -> None:
    assert no_signal(samples(0.0, 1.0), {"grad_norm": 1e-9}) is None
    assert no_signal(samples(0.0, 0.0), {}) is None


@pytest.mark.parametrize(
    ("fields", "n", "said"),
    [
        ({"agent": "a:b"}, 3.2, r"trained as 3\.2 sequences .* environment\.keep_thinking=true keeps"),
        ({"agent": "a:b", "keep_thinking": True}, 3.2, r"fivefold play shows where\)\. Later"),
        ({"agent": "a:b"}, 1.4, None),
        ({"game": "a:b", "turn_template": "{observation}", "memory": 0}, 5.0, None),
    ],
)
def test_a_template_that_cuts_episodes_is_told(fields: dict[str, Any], n: float, said: str | None) -> None:
    note = many_sequences(EnvironmentConfig(**fields), {"episode/sequences/mean": n})
    assert note is None if said is None else re.search(said, note or "")
    assert many_sequences(None, {}) is None
