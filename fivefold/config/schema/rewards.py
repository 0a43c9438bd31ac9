"""Rewards of completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from fivefold.config.schema.engine import FrozenModelConfig
from fivefold.config.schema.fields import NAME, ModelDtype, PathText, Positive, Section
from fivefold.config.schema.generator import GeneratorConfig
from fivefold.config.schema.role import Head
from fivefold.config.schema.rules import absent, needs, rule

OF_MODEL = "model"
"""Value of `fn` for the score of the reward model."""
OF_ENVIRONMENT = "environment"
"""Value of `fn` for what the environment gives."""
JUDGE = "judge"
"""Value of `fn` for the score that a model writes: at the URL `base_url` of its `kwargs`, or the model of the run."""


class RewardModelConfig(FrozenModelConfig):
    """A model that scores completions, for `fn: model` (docs/rewards.md).

    `path` is the folder of a model for sequence classification with one label, as `fivefold rm` writes it, for token
    classification with one label, or of a model with TRL's value head.
    """

    @property
    def head(self) -> Head:
        """The head in the model's weight files."""
        return "stored"


class JudgeConfig(GeneratorConfig):
    """A model that the run hosts, and that writes judgements for `fn: judge` without `base_url` (docs/rewards.md)."""

    path: PathText
    """Hugging Face folder, hub name, or `package:<name>` for a model that ships with Fivefold; its tokenizer has a chat
    template."""
    dtype: ModelDtype = "bfloat16"
    """Dtype of the engine's weights."""
    max_length: Positive = 8192
    """Most tokens of a question and its answer; a longer question has no score."""
    chat_template_kwargs: dict[str, Any] = {}
    """Values of the variables of the judge's chat template, such as `{enable_thinking: false}`."""
    colocate: Annotated[bool, needs(True, absent("device_mapping"), "shares the actor's devices")] = False
    """Share the actor's devices, in turn, which is for synchronous training; false: have its own devices."""

    @property
    def takes_turns(self) -> bool | None:
        """Whether the judge shares the actor's devices, in turn."""
        return self.colocate


class OneRewardConfig(Section):
    """A function that judges completions."""

    fn: str = "math"
    """`exact_match`, `math` (math-verify), `choice` (a letter), `countdown` (an expression), `detection` (boxes),
    `instructions` (what a program can check), `repetition` (words that come again), `judge` (the score that
    `reward.judge` writes, or a model behind a URL), `http` (a service), `code` (tests in a sandbox), `model` (the score
    of `reward.model`), `environment` (what `environment` gives), or your own function as `module:function` or
    `file.py:function`."""
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
    model: RewardModelConfig | None = None
    judge: JudgeConfig | None = None

    @rule
    def _rewards(self) -> Iterator[str]:
        if self.rewards and (self.fn, self.kwargs) != ("math", {}):
            yield (
                f"fn={self.fn} with kwargs={self.kwargs} and rewards={sorted(self.rewards)} exclude each other: make "
                "the function one of rewards, or drop rewards"
            )
        if self.accuracy_of is not None and self.accuracy_of not in self.rewards:
            yield (
                f"accuracy_of={self.accuracy_of} is none of rewards={sorted(self.rewards)}: name one of them, or drop "
                "it"
            )
        if "source" in self.rewards:
            yield "rewards.source has the name of the metrics of data sources, reward/source/*: choose another name"
        for name, reward in self.rewards.items():
            if reward.data_sources == []:
                yield f"rewards.{name}.data_sources=[] leaves the reward no prompt: name data sources, or set null"

    @property
    def asked(self) -> dict[str, OneRewardConfig]:
        """The one function, or each of `rewards`, by the beginning of its keys."""
        return {f"rewards.{name}.": each for name, each in self.rewards.items()} or {"": self}

    @property
    def is_of_environment(self) -> bool:
        """Whether what the environment gives is one of the rewards."""
        return any(each.fn == OF_ENVIRONMENT for each in self.asked.values())

    @rule
    def _environment(self) -> Iterator[str]:
        for name, each in self.asked.items():
            if each.fn == OF_ENVIRONMENT and each.kwargs:
                yield f"{name}kwargs={each.kwargs}: what an environment gives has no keyword arguments: drop them"

    @rule
    def _model(self) -> Iterator[str]:
        asked = self.asked
        users = [name for name, each in asked.items() if each.fn == OF_MODEL]
        if users and self.model is None:
            yield (
                f"{users[0]}fn=model is the score of a reward model, and reward.model names none: set reward.model.path"
            )
        if self.model is not None and not users:
            yield (
                "the section model has no effect: set fn=model, or give one of rewards fn: model, or drop the section"
            )
        if strays := [name for name in users if asked[name].kwargs]:
            yield (f"{strays[0]}kwargs={asked[strays[0]].kwargs}: a reward model has no keyword arguments: drop them")

    @rule
    def _judge(self) -> Iterator[str]:
        users = [name for name, each in self.asked.items() if is_hosted(each)]
        if users and self.judge is None:
            yield (
                f"{users[0]}fn=judge asks a model at a URL, or one that the run hosts, and there is neither: set "
                f"{users[0]}kwargs.base_url and {users[0]}kwargs.model, or judge.path"
            )
        if self.judge is not None and not users:
            yield (
                "the section judge has no effect: set fn=judge without kwargs.base_url, or give one of rewards "
                "fn: judge, or drop the section"
            )


def is_hosted(config: OneRewardConfig) -> bool:
    """Return whether a reward asks the judge that the run hosts."""
    return config.fn == JUDGE and "base_url" not in config.kwargs
