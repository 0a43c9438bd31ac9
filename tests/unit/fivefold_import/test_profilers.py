"""The steps that a source's profiler records become `profile.steps`."""

from __future__ import annotations

import pytest
from dialect_conversion import convert_words

RANKS = "actor_rollout_ref.actor.profiler.ranks=[0,2]"


@pytest.mark.parametrize("key", ["global_profiler.steps", "trainer.profile_steps"])
def test_verls_steps_of_a_profile_are_recorded(key: str) -> None:
    conversion = convert_words("verl", f"{key}=[2,5]", "global_profiler.tool=torch", RANKS)
    assert conversion.recipe["profile.steps"] == [2, 5]
    assert conversion.recipe.get("profile.ranks") == ([0, 2] if key == "global_profiler.steps" else None)
    assert not {key, "global_profiler.tool", RANKS.partition("=")[0]} & conversion.unsupported()


def test_a_profiler_without_steps_records_nothing() -> None:
    conversion = convert_words(
        "verl", "global_profiler.steps=null", "global_profiler.profile_continuous_steps=true", RANKS
    )
    assert not [key for key in conversion.recipe if key.startswith("profile.")]
    assert not conversion.unsupported()


def test_what_torch_does_not_record_is_unsupported() -> None:
    assert "global_profiler.tool" in convert_words("verl", "global_profiler.tool=nsys").unsupported()
    assert "profiler_timeline" in convert_words("roll", "profiler_timeline=true").unsupported()
    assert "perf_tracer.enabled" in convert_words("areal", "perf_tracer.enabled=true").unsupported()
