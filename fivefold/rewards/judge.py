"""The reward `judge`: a model behind an OpenAI-compatible URL scores each response."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.json_text import parsed
from fivefold.rewards.http_client import SHOWN, RequestFailed, shown
from fivefold.rewards.service import Question, Service

FIELDS = ("prompt", "response", "ground_truth")
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


@dataclass(frozen=True)
class Judge(Service):
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
    pattern: str = r"[Ss]core:[\s*]*(-?\d+(?:\.\d+)?)"
    """Regular expression that finds the score: the first group of its last match, or all of it without groups."""

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: one that cannot work.
        """
        super().__post_init__()
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"reward.kwargs.pattern={self.pattern!r} is not a regular expression: {error}") from error
        if "{response}" not in self.template:
            raise ValueError("reward.kwargs.template has no {response}, so every response would have the same score")
        for name in re.findall(r"\{(\w+)\}", self.template):
            if name not in FIELDS and (near := difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.75)):
                raise ValueError(f"reward.kwargs.template has {{{name}}}: did you mean {{{near[0]}}}?")

    def _bounds(self) -> Iterator[tuple[str, tuple[float, float]]]:
        yield from super()._bounds()
        yield "max_tokens", (1, 10**6)
        yield "temperature", (0, 100)

    @property
    def address(self) -> tuple[str, str]:
        """The key of the service's address, and its value."""
        return "base_url", self.base_url

    @property
    def endpoint(self) -> str:
        """The URL that is asked."""
        return f"{self.base_url.rstrip('/')}/chat/completions"

    @property
    def title(self) -> str:
        """What messages call the service."""
        return "the judge"

    def judge_prompt(self, prompt: Question, response: str) -> float:
        """Return the score of one response, times `scale`; see `Service.judge_prompt`."""
        values = {"prompt": prompt.text, "response": response, "ground_truth": str(prompt.ground_truth)}
        # In one pass, so that a response cannot bring further fields.
        question = re.sub(r"\{(prompt|response|ground_truth)\}", lambda match: values[match[1]], self.template)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        return self.asked(body, self._score)

    def _score(self, data: bytes) -> float:
        """Return the scaled score in the answer that a reply holds.

        Raises:
            RequestFailed: it has none.
        """
        answer = _content(data)
        matches = list(re.finditer(self.pattern, answer))
        text = matches[-1].group(1 if matches[-1].re.groups else 0) if matches else None
        try:
            score = float(text or "") * self.scale
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise RequestFailed(f"{self.pattern!r} finds no score in the answer {answer[-300:]!r}", again=True)
        return score


def _content(data: bytes) -> str:
    """Return the text of the first choice.

    Raises:
        RequestFailed: the reply has another form; a proxy may have answered in place of the service.
    """
    try:
        content = parsed(data)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise RequestFailed(f"the reply has no choices[0].message.content: {shown(data)}", again=True) from error
    if not isinstance(content, str):
        raise RequestFailed(f"the answer is {content!r:.{SHOWN}} and no text", again=True)
    return content
