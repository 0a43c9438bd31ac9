"""The reward `judge`: a model behind an OpenAI-compatible URL scores each response."""

from __future__ import annotations

import difflib
import math
import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from fivefold.rewards.chat_client import ChatClient, ChatFailed, check_address
from fivefold.rewards.unscored import Unscored

FIELDS = ("prompt", "response", "ground_truth")
MOST_AT_ONCE = 1024
MOST_FAILED = 64
"""Responses in a row without a score, after which the run ends though `on_failure` is given, in the midst of a step."""
TEMPLATE = """\
Judge the answer to a question.

Question:
{prompt}

Reference answer:
{ground_truth}

Answer:
{response}

Does the answer agree with the reference? Explain in one sentence. Then end with a line "Score: 1" if it does, or \
"Score: 0" if it does not."""


class Question(Protocol):
    """What the judge sees of a prompt. A prompt itself needs torch, which a plan does without."""

    @property
    def text(self) -> str:
        """The prompt as the model in training sees it."""

    @property
    def ground_truth(self) -> Any:
        """The ground truth."""


@dataclass(frozen=True)
class Judge:
    """Asks a model for a score, which is found in its answer by a regular expression."""

    base_url: str
    """Address of the service, to which `/chat/completions` is added, such as `http://localhost:8000/v1`."""
    model: str
    """Name of the model, as the service knows it."""
    template: str = TEMPLATE
    """What is asked: `{prompt}`, `{response}` and `{ground_truth}` stand for the sample's."""
    temperature: float = 0.0
    max_tokens: int = 512
    """Most tokens of the model's answer."""
    api_key_env: str | None = None
    """Environment variable that holds the API key; None: the service needs none."""
    pattern: str = r"[Ss]core:[\s*]*(-?\d+(?:\.\d+)?)"
    """Regular expression that finds the score: the first group of its last match, or all of it without groups."""
    scale: float = 1.0
    """Factor from the score to the reward: 0.1 for scores from 0 to 10."""
    timeout_s: float = 60.0
    """Seconds of one attempt."""
    retries: int = 3
    """Further attempts after a time-out, a broken connection, status 408, 429 or 5xx, or an answer without a score."""
    backoff_s: float = 1.0
    """Seconds before the second attempt, about; they double with each further one."""
    concurrency: int = 32
    """Requests at the same time."""
    on_failure: float | None = None
    """Reward of a response for which all attempts failed; None: the run ends. It also ends after `MOST_FAILED` such
    responses in a row, and after a step without any other."""
    failed_in_a_row: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """Why the last responses had no score, since the last one that had."""

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: one that cannot work.
        """
        if not re.fullmatch(r"https?://(\[[\da-fA-F:.]+\]|[^\s/:?#\[\]@]+)(:\d{1,5})?(/[^\s?#]*)?", self.base_url):
            raise ValueError(f"reward.kwargs.base_url={self.base_url!r} must be a URL such as http://localhost:8000/v1")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"reward.kwargs.pattern={self.pattern!r} is not a regular expression: {error}") from error
        if "{response}" not in self.template:
            raise ValueError("reward.kwargs.template has no {response}, so every response would have the same score")
        for name in re.findall(r"\{(\w+)\}", self.template):
            if name not in FIELDS and (near := difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.75)):
                raise ValueError(f"reward.kwargs.template has {{{name}}}: did you mean {{{near[0]}}}?")
        bounds = {"timeout_s": (0.001, 86_400), "max_tokens": (1, 10**6), "retries": (0, 100), "backoff_s": (0, 3600)}
        bounds |= {"concurrency": (1, MOST_AT_ONCE), "temperature": (0, 100)}
        for name, (least, most) in bounds.items():
            if not least <= (value := getattr(self, name)) <= most:
                raise ValueError(f"reward.kwargs.{name}={value} must be from {least:g} to {most:,g}")
        for name in ("scale", "on_failure"):
            if (number := getattr(self, name)) is not None and not math.isfinite(number):
                raise ValueError(f"reward.kwargs.{name}={number} must be a finite number")

    @property
    def n_at_once(self) -> int:
        """Number of responses that can be judged at the same time, each from a separate thread."""
        return self.concurrency

    def check_machine(self) -> None:
        """Refuse a machine without the API key, or from which the service cannot be reached.

        Raises:
            ValueError: the environment variable is not set, or nothing listens at the address.
        """
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise ValueError(
                f"reward.kwargs.api_key_env={self.api_key_env}: this environment variable is not set: export it where "
                "fivefold starts, or drop api_key_env if the service needs no key"
            )
        try:
            check_address(self.base_url)
        except ValueError as error:
            raise ValueError(
                f"reward.kwargs.base_url={self.base_url!r}: {error}. Start the service first, or correct the URL"
            ) from error

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Accept every ground truth: it is only shown to the model."""

    def judge_prompt(self, prompt: Question, response: str) -> float:
        """Return the score of one response, times `scale`.

        Raises:
            ValueError: the service gave no score and `on_failure` is None, or it refuses every request.
        """
        values = {"prompt": prompt.text, "response": response, "ground_truth": str(prompt.ground_truth)}
        # In one pass, so that a response cannot bring further fields.
        question = re.sub(r"\{(prompt|response|ground_truth)\}", lambda match: values[match[1]], self.template)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        try:
            score = self._client.ask(body, self._score)
        except ChatFailed as error:
            self.failed_in_a_row.append(str(error))
            if self.on_failure is None or error.is_settings_fault:
                raise ValueError(str(error)) from error
            if len(self.failed_in_a_row) >= MOST_FAILED:
                raise ValueError(
                    f"the judge gave no score for {MOST_FAILED} responses in a row, so on_failure={self.on_failure:g} "
                    f"would be all that is trained on. The first reason: {self.failed_in_a_row[0]}"
                ) from error
            return Unscored(self.on_failure, str(error))
        self.failed_in_a_row.clear()
        return score

    def _score(self, answer: str) -> float:
        """Return the scaled score in an answer.

        Raises:
            ChatFailed: it has none.
        """
        matches = list(re.finditer(self.pattern, answer))
        text = matches[-1].group(1 if matches[-1].re.groups else 0) if matches else None
        try:
            score = float(text or "") * self.scale
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise ChatFailed(f"{self.pattern!r} finds no score in the answer {answer[-300:]!r}", again=True)
        return score

    @cached_property
    def _client(self) -> ChatClient:
        key = os.environ.get(self.api_key_env) if self.api_key_env is not None else None
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        return ChatClient(url, key, self.timeout_s, self.retries, self.backoff_s, self.concurrency)
