"""What a run says of a step whose gradient is 0."""

from __future__ import annotations

import pytest

from fivefold.experience.samples import no_signal
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
