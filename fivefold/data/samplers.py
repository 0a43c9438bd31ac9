"""The samplers by the name that `train_dataset.sampler` gives them, and how one is made from a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from fivefold.config.options import built_in, options
from fivefold.config.schema.data import DatasetConfig
from fivefold.config.user_code import load_user_object
from fivefold.data.chosen_sampler import ChosenSampler, failing_as, shown_options, try_out
from fivefold.data.easy_to_hard import EasyToHard
from fivefold.data.prompt_sampler import PromptSampler
from fivefold.data.replay import Replay
from fivefold.types import Prompt

KEY = "train_dataset.sampler"
SAMPLERS: Mapping[str, type[PromptSampler]] = {"easy_to_hard": EasyToHard, "replay": Replay}


def build_sampler(prompts: Sequence[Prompt], config: DatasetConfig, seed: int, fingerprint: str) -> ChosenSampler:
    """Return the sampler that `train_dataset.sampler` names, a user's own after it was tried out.

    Args:
        prompts: the data set.
        config: its keys and `sampler_kwargs` are the options.
        seed: the recipe's seed.
        fingerprint: identifies the content of the data set.

    Raises:
        ValueError: a user's class that cannot be imported or does not do what `PromptSampler` says, options that the
            sampler does not take, or fewer prompts than a batch has.
    """
    name = config.sampler
    kind = SAMPLERS.get(name) or _load(name)
    chosen = options(KEY, kind, config, config.sampler_kwargs, n_arguments=1, given={"seed": seed})
    if not config.shuffle and "shuffle" not in chosen:
        raise ValueError(
            f"train_dataset.shuffle=false has no effect with {KEY}={name}, which has no parameter shuffle: drop it, or "
            "add the parameter"
        )

    def make() -> ChosenSampler:
        return ChosenSampler(
            prompts,
            _made(name, kind, prompts, chosen),
            name,
            batch_size=config.batch_size,
            shuffle=config.shuffle,
            seed=seed,
            fingerprint=f"{fingerprint} {shown_options(name, config.sampler_kwargs)}",
        )

    if name not in SAMPLERS:
        try_out(make)
    return make()


def _made(name: str, kind: Callable[..., Any], prompts: Sequence[Prompt], chosen: Mapping[str, Any]) -> PromptSampler:
    if name in SAMPLERS:
        return built_in(KEY, name, SAMPLERS[name], {"prompts": prompts, **chosen})
    with failing_as(f"{KEY}={name} could not be made"):
        return cast(PromptSampler, kind(prompts, **chosen))


def _load(name: str) -> Callable[..., Any]:
    found = load_user_object(KEY, name)
    if not callable(found):
        raise ValueError(f"{KEY}={name!r} is a {type(found).__name__}, which cannot be called: name a class")
    return cast(Callable[..., Any], found)
