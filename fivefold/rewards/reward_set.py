"""The rewards of a recipe: one function, or several with weights, each for all prompts or for some data sources."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, TypeVar

from fivefold.rewards.contract import BuiltIn, GivenByEnvironment, ScoredByModel
from fivefold.rewards.event_loop import N_AT_ONCE, judge_together
from fivefold.rewards.judge import Host, HostedJudge
from fivefold.rewards.reward import InWork, Judged, NamedReward, describe
from fivefold.rewards.time_limit import OutOfTime, time_limit
from fivefold.rewards.unscored import Unscored
from fivefold.types import Prompt

MOST_THREADS = 16
"""Most threads that judge with functions: each lets the function judge several responses at the same time."""


@dataclass(frozen=True)
class WeightedReward:
    """One of several rewards."""

    reward: NamedReward
    weight: float = 1.0
    """Factor of the reward in the sum that is trained on."""
    data_sources: frozenset[str] | None = None
    """Data sources whose prompts it is for; None: all."""

    def is_for(self, prompt: Prompt) -> bool:
        """Return whether this reward judges the completions of a prompt."""
        return self.data_sources is None or prompt.data_source in self.data_sources

    @property
    def is_of_environment(self) -> bool:
        """Whether this reward comes with the episode."""
        return isinstance(self.reward.reward, GivenByEnvironment)

    @property
    def is_of_model(self) -> bool:
        """Whether this reward is the score of the recipe's reward model."""
        return isinstance(self.reward.reward, ScoredByModel)


@dataclass(frozen=True)
class RewardSet:
    """The rewards of a recipe, in its order."""

    rewards: tuple[WeightedReward, ...]
    accuracy_of: str | None = None
    """Name of the reward by which a completion counts as right, where it is for the prompt. None, or elsewhere: the
    first reward that is for the prompt."""
    tells_each: bool = True
    """Whether each reward is a column and has its own metrics; one function alone has the sum's."""

    @staticmethod
    def of(reward: NamedReward) -> RewardSet:
        """Return the set of one reward, which judges every completion."""
        return RewardSet((WeightedReward(reward),), tells_each=False)

    @cached_property
    def weights(self) -> Mapping[str, float]:
        """Factors of the rewards in their sum, by the names in logs and metrics; empty for one function alone."""
        return {each.reward.name: each.weight for each in self.rewards if self.tells_each}

    @property
    def n_at_once(self) -> int:
        """Number of threads that may judge at the same time, each with the responses of a prompt.

        It is 1 if the reward model judges, which takes many responses together.
        """
        if any(each.is_of_model for each in self.rewards):
            return 1
        return max(
            N_AT_ONCE if reward.is_coroutine else min(reward.n_threads, MOST_THREADS)
            for reward in (each.reward for each in self.rewards)
        )

    @property
    def has_coroutines(self) -> bool:
        """Whether one of the rewards is a coroutine function."""
        return any(each.reward.is_coroutine for each in self.rewards)

    @property
    def reads_tokens(self) -> bool:
        """Whether one of the rewards gets the tokens of responses."""
        return any(each.reward.reads_tokens for each in self.rewards)

    def asking(self, host: Host) -> RewardSet:
        """Return the same rewards, with the model that the run hosts for those that ask it."""

        def with_host(each: WeightedReward) -> WeightedReward:
            judge = each.reward.reward
            if not isinstance(judge, HostedJudge):
                return each
            return replace(each, reward=replace(each.reward, reward=judge.asking(host)))

        return replace(self, rewards=tuple(map(with_host, self.rewards)))

    def slowest(self) -> InWork | None:
        """Return the response that has been judged for longest; None: none is being judged that has a limit."""
        limited = [each.reward for each in self.rewards if each.reward.timeout_s is not None]
        in_work = [work for reward in limited for work in list(reward.in_work)]
        return min(in_work, key=lambda work: work.began, default=None)

    def scored_by(self, prompt: Prompt) -> str | None:
        """Return the name of the reward by which a completion of `prompt` counts as right; None: the sum."""
        own = [each for each in self.rewards if each.is_for(prompt)]
        if self.accuracy_of in {each.reward.name for each in own}:
            return self.accuracy_of
        # One reward alone may be several numbers of an environment, whose sum counts.
        return None if own[0].is_of_environment and not self.tells_each else own[0].reward.name

    def scored_by_model(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return the indices of the prompts whose responses the reward model scores."""
        of_model = [each for each in self.rewards if each.is_of_model]
        return [index for index, prompt in enumerate(prompts) if any(each.is_for(prompt) for each in of_model)]

    def judge(
        self, prompts: Sequence[Prompt], responses: Sequence[str], sizes: Sequence[int] | None = None
    ) -> list[dict[str, float]]:
        """Return the rewards of each response by name, without those that the reward model gives.

        Args:
            prompts: the prompt of each response.
            responses: the completions, decoded without special tokens.
            sizes: numbers of responses that follow one another as a group; None: each is a group.

        Raises:
            ValueError: see `compute_rewards`; each reward may take the time limit on its own.
        """
        results: list[dict[str, float]] = [{} for _ in responses]
        for each in self.rewards:
            if each.is_of_model or each.is_of_environment:
                continue
            own = [index for index, prompt in enumerate(prompts) if each.is_for(prompt)]
            if not own:
                continue
            counts = _kept(sizes, set(own)) if each.reward.judges_groups and sizes is not None else None
            values = compute_rewards(each.reward, [prompts[i] for i in own], [responses[i] for i in own], counts)
            for index, value in zip(own, values, strict=True):
                results[index][each.reward.name] = value
        return results

    def complete(
        self, prompt: Prompt, response: str, judged: Mapping[str, float], score: float | None
    ) -> dict[str, float]:
        """Return the rewards of one response by name and in the recipe's order, with the reward model's.

        Args:
            prompt: the prompt.
            response: the completion, decoded without special tokens.
            judged: the other rewards, as `judge` returns them.
            score: the reward model's score of it; None: no reward of the prompt is one.

        Raises:
            ValueError: the score is not finite.
        """
        if score is None:
            return dict(judged)
        own = [each for each in self.rewards if each.is_for(prompt) and not each.is_of_environment]
        names = [(each.reward.name, each.is_of_model) for each in own]
        return {name: _finite(score, name, prompt, response) if of_model else judged[name] for name, of_model in names}

    def check_scored(self, given: Sequence[Mapping[str, float]]) -> None:
        """Refuse a step or an evaluation in which a reward could score none of its responses.

        Args:
            given: the rewards of each response, by name.

        Raises:
            ValueError: there is such a reward; the message has the first reason.
        """
        for name in (each.reward.name for each in self.rewards):
            values = [rewards[name] for rewards in given if name in rewards]
            unscored = [value for value in values if isinstance(value, Unscored)]
            if unscored and len(unscored) == len(values):
                raise ValueError(
                    f"the reward {name!r} scored none of the {len(values)} responses of a step or an evaluation, so "
                    f"on_failure={unscored[0]:g} would be all that counts. The first reason: {unscored[0].reason}"
                )

    def check_given(self, prompt: Prompt, given: Mapping[str, float]) -> None:
        """Refuse an episode whose environment gives other rewards than the recipe names.

        Args:
            prompt: the episode's prompt.
            given: what its environment gave, by name.

        Raises:
            ValueError: a reward is missing, or the recipe does not name it.
        """
        named = {each.reward.name for each in self.rewards if each.is_for(prompt) and each.is_of_environment}
        if self.tells_each and named != given.keys():
            raise ValueError(
                f"the environment gave the rewards {sorted(given)} in an episode of prompt {prompt.index + 1}, and the "
                f"recipe's reward.rewards with fn=environment are {sorted(named)}: name each of them"
            )

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse, before a run, prompts that cannot be judged.

        Raises:
            ValueError: prompts that no reward is for, or ground truths with which a reward cannot compare.
        """
        unjudged = Counter(prompt.data_source for prompt in prompts if not any(e.is_for(prompt) for e in self.rewards))
        if unjudged:
            counts = ", ".join(f"{source!r} ({count} prompts)" for source, count in unjudged.most_common(10))
            raise ValueError(
                f"no reward is for the prompts of data_source {counts}: reward.rewards are for {self._sources()}. Name "
                "the source in data_sources of one of them, or set data_sources to null"
            )
        for each in self.rewards:
            check_ground_truths(each.reward, [prompt for prompt in prompts if each.is_for(prompt)])

    def check_sources(self, prompts: Sequence[Prompt]) -> None:
        """Refuse a data source that none of a run's prompts has, because its reward would never be asked.

        Raises:
            ValueError: there is such a data source.
        """
        present = {prompt.data_source for prompt in prompts}
        for each in self.rewards:
            if strays := sorted((each.data_sources or frozenset()) - present):
                raise ValueError(
                    f"reward.rewards.{each.reward.name}.data_sources names {strays}, which no prompt has: the column "
                    f"data_source holds {sorted(present)[:20]}"
                )

    def _sources(self) -> str:
        return ", ".join(f"{each.reward.name}: {sorted(each.data_sources or ())}" for each in self.rewards)


def _finite(score: float, name: str, prompt: Prompt, response: str) -> float:
    if not math.isfinite(score):
        raise ValueError(
            f"the reward model of the reward {name!r} gave {score} to {describe(prompt, response)}: its weights or its "
            "dtype do not hold; try reward.model.dtype=float32"
        )
    return score


Result = TypeVar("Result")


def _kept(sizes: Sequence[int], own: Collection[int]) -> list[int]:
    """Return the sizes of groups that keep only their responses with the indices `own`."""
    ends = list(accumulate(sizes))
    counts = [sum(i in own for i in range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    return [count for count in counts if count]


def compute_rewards(
    reward: NamedReward, prompts: Sequence[Prompt], responses: Sequence[str], sizes: Sequence[int] | None = None
) -> list[float]:
    """Return one reward for each response, in their order.

    Args:
        reward: the reward.
        prompts: the prompt of each response.
        responses: the completions, decoded without special tokens.
        sizes: numbers of responses that follow one another as a group, for a reward of groups; None: 1 each.

    Raises:
        ValueError: not one prompt for each response, an error of the function, a value that is no finite number, or
            rewards that took longer than `reward.timeout_s`. A coroutine function may take it for each response; any
            other has the limit for all of them together, and on the main thread only.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts and {len(responses)} responses: give the prompt of each response")
    judged: Sequence[Judged] = responses
    if reward.judges_groups:
        sizes = [1] * len(responses) if sizes is None else sizes
        ends = list(accumulate(sizes))
        judged = [tuple(responses[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
        prompts = [prompts[end - 1] for end in ends]
    if reward.is_coroutine:
        return list(chain.from_iterable(judge_together(reward, prompts, judged)))
    try:
        with time_limit(reward.timeout_s):
            return list(chain.from_iterable(_in_threads(reward, reward.judge, prompts, judged)))
    except OutOfTime as error:
        notes = getattr(error, "__notes__", ())
        raise reward.too_slow(f"{len(responses)} responses", notes) from error


def check_ground_truths(reward: NamedReward, prompts: Sequence[Prompt]) -> None:
    """Refuse, before a run, ground truths with which the reward cannot compare answers.

    A user's function is not asked: it alone knows which ground truths it accepts.

    Raises:
        ValueError: a ground truth that cannot be compared, with its prompt.
    """
    if not isinstance(reward.reward, BuiltIn):
        return
    check = reward.reward.check_ground_truth
    # Many data sets have few distinct answers: each is checked once, at its first prompt.
    first = {repr(prompt.ground_truth): prompt for prompt in reversed(prompts)}

    def check_one(prompt: Prompt) -> None:
        try:
            check(prompt.ground_truth)
        except ValueError as error:
            raise ValueError(
                f"prompt {prompt.index + 1} ({prompt.text[-200:]!r}): the reward {reward.name!r} cannot judge its "
                f"answers: {error}"
            ) from error

    _in_threads(reward, check_one, list(first.values())[::-1])


def _in_threads(reward: NamedReward, function: Callable[..., Result], *arguments: Sequence[Any]) -> list[Result]:
    """Return `function` of each set of arguments, in order; after the first exception, the rest is not called.

    At most `reward.n_threads` calls are in progress, those that other threads make at the same time among them.
    """

    def in_turn(*each: Any) -> Result:
        with reward.free:
            return function(*each)

    if reward.n_threads == 1:
        return list(map(in_turn, *arguments))
    with ThreadPoolExecutor(reward.n_threads) as pool:
        return list(pool.map(in_turn, *arguments))
