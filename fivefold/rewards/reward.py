"""What a reward is: a function that judges one response, and its name."""

from __future__ import annotations

import asyncio
import importlib
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

from fivefold.config.user_code import one_process, user_traceback
from fivefold.rewards.asking import HostFailed
from fivefold.rewards.contract import GivenByEnvironment, GroupReward, PromptReward, Reward, ScoredByModel
from fivefold.rewards.time_limit import OutOfTime
from fivefold.rewards.token_rewards import TokenizedText, TokenRewards, of_tokens
from fivefold.rewards.unscored import Unscored
from fivefold.types import Prompt

Judged = str | tuple[str, ...]
"""What one call judges: a response, or by a function of groups all responses to a prompt."""


@dataclass(frozen=True)
class NamedReward:
    """A reward with its name, which errors mention."""

    name: str
    reward: Reward | GroupReward | PromptReward | ScoredByModel | GivenByEnvironment
    timeout_s: float | None = None
    """Most seconds that rewards which are computed together may take, or a coroutine function for each response; None:
    no limit."""
    n_threads: int = 1
    """Number of responses to judge at the same time, each in a thread: 1 for a function that may not be thread-safe."""
    is_coroutine: bool = False
    """Whether the reward is a coroutine function, whose result `judge_coroutine` awaits."""
    judges_groups: bool = False
    """Whether the reward is a `GroupReward`."""
    is_of_user: bool = False
    """Whether the code is a user's, which may fork a process and return in it."""
    reads_tokens: bool = False
    """Whether the reward gets the tokens of responses, which are `TokenizedText`, and may give each a reward."""
    in_work: set[InWork] = field(default_factory=set, init=False, repr=False, compare=False)
    """Responses that are being judged."""
    free: threading.Semaphore = field(init=False, repr=False, compare=False)
    """Held by each call of `judge` that `compute_rewards` makes, whichever thread asks: `n_threads` at one time."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "free", threading.BoundedSemaphore(self.n_threads))

    def judge(self, prompt: Prompt, judged: Judged) -> list[float]:
        """Return the reward of a response, or of each response of a group.

        Raises:
            ValueError: the function raised an error, or returned something else than a finite number for each
                response. The message names the function and the prompt.
        """
        with self.working(prompt, judged), explaining(lambda: self._failed(prompt, judged)):
            value = self._call(prompt, judged)
        return self._finite(value, prompt, judged)

    async def judge_coroutine(self, prompt: Prompt, judged: Judged) -> list[float]:
        """Return what `judge` does, by a coroutine function, which its loop calls in `working`.

        Raises:
            ValueError: see `judge`.
        """
        task = asyncio.current_task()
        # A task that is cancelled has not failed.
        with explaining(
            lambda: self._failed(prompt, judged), passes=lambda: task is not None and task.cancelling() > 0
        ):
            value = await cast(Awaitable[object], self._call(prompt, judged))
        return self._finite(value, prompt, judged)

    @contextmanager
    def working(self, prompt: Prompt, judged: Judged) -> Iterator[InWork]:
        """Note what is judged inside the block, in this process alone."""
        work = InWork(self, prompt, judged)
        self.in_work.add(work)
        try:
            with one_process(f"the reward function {self.name!r}") if self.is_of_user else nullcontext():
                yield work
        except OutOfTime as error:
            error.add_note(f"at {work.what}")
            raise
        finally:
            self.in_work.discard(work)

    def too_slow(self, what: str, notes: Iterable[str]) -> ValueError:
        """Return the error that judging `what` took longer than `timeout_s`; the notes say what was in work."""
        where = "".join(f", and was {note}" for note in notes)
        return ValueError(
            f"the reward function {self.name!r} took longer than scheduler.timeout_s={self.timeout_s:g} s for "
            f"{what}{where}. Give it a shorter limit, or raise scheduler.timeout_s"
        )

    def _call(self, prompt: Prompt, judged: Judged) -> object:
        if isinstance(self.reward, ScoredByModel | GivenByEnvironment):
            raise TypeError(f"the reward {self.name!r} is given by a model or an environment, which is no function")
        if isinstance(self.reward, PromptReward):
            return self.reward.judge_prompt(prompt, cast(str, judged))
        call = cast(Callable[..., object], self.reward)
        return call(judged, prompt.ground_truth, data_source=prompt.data_source, extra_info=prompt.extra_info)

    def _failed(self, prompt: Prompt, judged: Judged) -> str:
        return f"the reward function {self.name!r} failed on {describe(prompt, judged)}"

    def _finite(self, value: object, prompt: Prompt, judged: Judged) -> list[float]:
        if isinstance(judged, str):
            values, n, wanted = [value], 1, "a finite number"
        else:
            n, wanted = len(judged), f"a finite number for each of the {len(judged)} responses"
            is_several = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
            values = list(cast(Iterable[object], value)) if is_several else []
        if self.reads_tokens:
            values = self._by_tokens(values, prompt, judged)
        numbers = [number for number in map(_as_number, values) if number is not None and math.isfinite(number)]
        if len(values) != n or len(numbers) != n:
            raise ValueError(
                f"the reward function {self.name!r} returned {value!r:.200} on {describe(prompt, judged)}: "
                f"it must return {wanted}"
            )
        return numbers

    def _by_tokens(self, values: list[object], prompt: Prompt, judged: Judged) -> list[object]:
        """Return values in which those that have a reward for each token of a response are `TokenRewards`."""
        responses = [judged] if isinstance(judged, str) else judged
        if len(values) != len(responses):
            return values
        try:
            given = [of_tokens(value, cast(TokenizedText, each)) for value, each in zip(values, responses, strict=True)]
        except (TypeError, ValueError) as error:
            raise ValueError(f"the reward function {self.name!r} on {describe(prompt, judged)}: {error}") from error
        return [value if own is None else own for value, own in zip(values, given, strict=True)]


@dataclass(frozen=True, eq=False)
class InWork:
    """A response, or a group's responses, that are being judged."""

    reward: NamedReward
    prompt: Prompt
    judged: Judged
    began: float = field(default_factory=time.perf_counter)
    """When that began, on the clock of `time.perf_counter`."""

    @property
    def what(self) -> str:
        """What is judged, for messages."""
        return describe(self.prompt, self.judged)

    def too_slow(self) -> ValueError:
        """Return the error that it takes longer than the reward's limit."""
        return self.reward.too_slow("one response", [f"at {self.what}"])


def describe(prompt: Prompt, judged: Judged) -> str:
    """Return a text that names a prompt, counted from 1, and the beginning of a response to it."""
    source = f"data_source {prompt.data_source!r}, ground truth {prompt.ground_truth!r:.200}"
    if isinstance(judged, str):
        return f"prompt {prompt.index + 1} ({source}), response {judged[:200]!r}"
    return f"prompt {prompt.index + 1} ({source}), {len(judged)} responses, the first {judged[0][:200]!r}"


def _as_number(value: object) -> float | None:
    if isinstance(value, (Unscored, TokenRewards)):
        return value
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # tensors of several elements raise RuntimeError
        return None


def accepted_answers(ground_truth: Any) -> Sequence[Any]:
    """Return the right answers: the items of a list or a tuple, each of them right, or the ground truth alone."""
    return ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]


def after_thoughts(response: str) -> str:
    """Return what a response says behind its last `</think>`, without line breaks before it; all of it without one."""
    return response.rpartition("</think>")[2].lstrip("\n") if "</think>" in response else response


def as_text(truth: Any) -> str:
    """Return a right answer as a response writes it: a float without an exponent, `0.00001` and not `1e-05`."""
    return format(Decimal(str(truth)), "f") if isinstance(truth, float) else str(truth)


_OTHER_CODE = (f"{Path(__file__).parent}/", importlib.__file__, "<frozen importlib")
"""Beginnings of the file names of code that calls or imports a user's code."""


@contextmanager
def explaining(message: Callable[[], str], passes: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Turn what a user's code raises inside this context into a ValueError with `message` and its traceback.

    SystemExit is turned too: it would end a run without a word, and even with exit code 0. KeyboardInterrupt,
    `OutOfTime` and `HostFailed` pass, because the user's code does not raise them itself.

    Args:
        message: returns what failed, and on what. It is called only if something was raised.
        passes: returns whether other exceptions pass too.

    Raises:
        ValueError: whatever the block raised.
    """
    try:
        yield
    except (KeyboardInterrupt, OutOfTime, HostFailed):
        raise
    except BaseException as error:
        if passes():
            raise
        raise ValueError(f"{message()}:\n{user_traceback(error, _OTHER_CODE)}") from error
