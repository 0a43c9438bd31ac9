"""Rewards of completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from fivefold.config.schema.fields import NAME, Section


class OneRewardConfig(Section):
    """A function that judges completions."""

    fn: str = "math"
    """`exact_match`, `math` (math-verify), `judge` (a model behind a URL), `code` (tests in a sandbox), or your own
    function as `module:function` or `file.py:function`."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the function."""


class WeightedRewardConfig(OneRewardConfig):
    """One of several rewards."""

    weight: float = 1.0
    """Factor of this reward in the sum that is trained on; it may be negative."""
    data_sources: list[str] | None = None
    """Values of the column `data_source` whose prompts this reward is for; null: all prompts."""


class RewardConfig(OneRewardConfig):
    """The function that judges completions, or several of them in `rewards`."""

    rewards: dict[Annotated[str, Field(pattern=NAME)], WeightedRewardConfig] = {}
    """Several rewards in place of `fn`: each name has a mapping with the keys `fn`, `kwargs`, `weight` (1) and
    `data_sources` (null: all)."""
    accuracy_of: str | None = None
    """Name of the one of `rewards` by which a completion counts as right; null, or where it is not for the prompt: the
    first one that is."""

    @model_validator(mode="after")
    def _check_rewards(self) -> RewardConfig:
        if self.rewards and (self.fn, self.kwargs) != ("math", {}):
            raise ValueError(
                f"fn={self.fn} with kwargs={self.kwargs} and rewards={sorted(self.rewards)} exclude each other: make "
                "the function one of rewards, or drop rewards"
            )
        if self.accuracy_of is not None and self.accuracy_of not in self.rewards:
            raise ValueError(
                f"accuracy_of={self.accuracy_of} is none of rewards={sorted(self.rewards)}: name one of them, or drop "
                "it"
            )
        if "source" in self.rewards:
            raise ValueError(
                "rewards.source has the name of the metrics of data sources, reward/source/*: choose another name"
            )
        for name, reward in self.rewards.items():
            if reward.data_sources == []:
                raise ValueError(
                    f"rewards.{name}.data_sources=[] leaves the reward no prompt: name data sources, or set null"
                )
        return self
