"""The reward `judge`: a model scores each response, behind an OpenAI-compatible URL or in processes of the run."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fivefold.json_text import parsed
from fivefold.rewards.asking import Asking, NoScore, Question
from fivefold.rewards.http_client import SHOWN, RequestFailed, shown
from fivefold.rewards.service import Service

FIELDS = ("prompt", "question", "response", "ground_truth")
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
class Sampling:
    """How a judge's answer is sampled."""

    temperature: float
    """0: the most likely tokens are taken."""
    top_p: float
    top_k: int
    """0: all tokens."""
    max_tokens: int
    """Most tokens of the answer."""


@dataclass(frozen=True, kw_only=True)
class Judging(Asking):
    """Asks a model for a score, which is found in its answer by a regular expression, or by words."""

    template: str = TEMPLATE
    """What is asked: `{prompt}`, `{response}` and `{ground_truth}` stand for the sample's, `{question}` for the last
    message of the prompt."""
    temperature: float = 0.0
    top_p: float = 1.0
    """The answer is drawn from the likeliest tokens that have this probability together."""
    top_k: int = 0
    """The answer is drawn from so many likeliest tokens; 0: from all."""
    max_tokens: int = 512
    """Most tokens of the model's answer."""
    pattern: str = r"[Ss]core:[\s*]*(-?\d+(?:\.\d+)?)"
    """Regular expression that finds the score: the first group of its last match, or all of it without groups."""
    words: dict[str, float] = field(default_factory=dict)
    """Scores of words, in place of `pattern`: the first of them that is in the answer counts, in any case."""

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
        for word, score in self.words.items():
            if not word.strip() or not math.isfinite(score):
                raise ValueError(f"reward.kwargs.words has {word!r}: {score}; give words with finite numbers")
        if self.words and self.pattern != Judging.pattern:
            raise ValueError("reward.kwargs.words and pattern both find the score: drop one of them")
        if "{response}" not in self.template:
            raise ValueError("reward.kwargs.template has no {response}, so every response would have the same score")
        for name in re.findall(r"\{(\w+)\}", self.template):
            if name not in FIELDS and (near := difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.75)):
                raise ValueError(f"reward.kwargs.template has {{{name}}}: did you mean {{{near[0]}}}?")

    def _bounds(self) -> Iterator[tuple[str, tuple[float, float]]]:
        yield from super()._bounds()
        yield "max_tokens", (1, 10**6)
        yield "temperature", (0, 100)
        yield "top_p", (1e-6, 1)
        yield "top_k", (0, 10**6)

    @property
    def title(self) -> str:
        """What messages call the model."""
        return "the judge"

    def question(self, prompt: Question, response: str) -> str:
        """Return the text that the model is asked."""
        values = {"prompt": prompt.text, "response": response, "ground_truth": str(prompt.ground_truth)}
        if "{question}" in self.template:
            values["question"] = _text(prompt.chat[-1].get("content"))
        # In one pass, so that a response cannot bring further fields.
        return re.sub(rf"\{{({'|'.join(values)})\}}", lambda match: values[match[1]], self.template)

    def score(self, answer: str) -> float:
        """Return the scaled score in an answer.

        Raises:
            NoScore: it has none.
        """
        if self.words:
            return self._of_words(answer) * self.scale
        matches = list(re.finditer(self.pattern, answer))
        text = matches[-1].group(1 if matches[-1].re.groups else 0) if matches else None
        try:
            score = float(text or "") * self.scale
        except ValueError:
            score = math.nan
        if not math.isfinite(score):
            raise NoScore(f"{self.pattern!r} finds no score in the answer {answer[-SHOWN:]!r}")
        return score

    def _of_words(self, answer: str) -> float:
        for word, score in self.words.items():
            if word.lower() in answer.lower():
                return score
        raise NoScore(f"none of the words {', '.join(self.words)} is in the answer {answer[-SHOWN:]!r}")

    @property
    def sampling(self) -> Sampling:
        """How the model's answer is sampled."""
        return Sampling(self.temperature, self.top_p, self.top_k, self.max_tokens)


@dataclass(frozen=True)
class Judge(Judging, Service):
    """Asks a model behind a URL."""

    base_url: str
    """Address of the service, to which `/chat/completions` is added, such as `http://localhost:8000/v1`."""
    model: str
    """Name of the model, as the service knows it."""

    @property
    def address(self) -> tuple[str, str]:
        """The key of the service's address, and its value."""
        return "base_url", self.base_url

    @property
    def endpoint(self) -> str:
        """The URL that is asked."""
        return f"{self.base_url.rstrip('/')}/chat/completions"

    def judge_prompt(self, prompt: Question, response: str) -> float:
        """Return the score of one response, times `scale`; see `Asking.judge_prompt`."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": self.question(prompt, response)}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            **({"top_p": self.top_p} if self.top_p < 1 else {}),
            **({"top_k": self.top_k} if self.top_k else {}),
        }
        return self.asked(body, self._read)

    def _read(self, data: bytes) -> float:
        try:
            return self.score(_content(data))
        except RequestFailed:
            raise
        except NoScore as error:
            raise RequestFailed(str(error), again=True) from error


class Host(Protocol):
    """Answers questions with a model in processes of the run. Any thread may ask."""

    def answer(self, question: str, *, sampling: Sampling, attempt: int) -> str:
        """Return the model's answer, without special tokens.

        Args:
            question: the text of a user's only message.
            sampling: how the answer is sampled.
            attempt: 0 for the first answer to a question; others have other random numbers.

        Raises:
            NoScore: the model cannot read the question.
            HostFailed: the model's processes failed.
        """


@dataclass(frozen=True, kw_only=True)
class HostedJudge(Judging):
    """Asks the model of the section `reward.judge`, once the run has started it."""

    concurrency: int = 256
    """Questions at the same time."""

    def judge_prompt(self, prompt: Question, response: str) -> float:
        """Refuse to judge: what `asking` returns does.

        Raises:
            TypeError: always.
        """
        raise TypeError("the run has not started the model that judges")

    def asking(self, host: Host) -> AskedHost:
        """Return this reward with the model that answers."""
        return AskedHost(self, host)


@dataclass(frozen=True)
class AskedHost:
    """The reward of a model that the run has started."""

    judge: HostedJudge
    host: Host

    def judge_prompt(self, prompt: Question, response: str) -> float:
        """Return the score of one response, times `scale`; see `Asking.judge_prompt`."""
        question = self.judge.question(prompt, response)
        return self.judge.scored(lambda: self._ask(question))

    def _ask(self, question: str) -> float:
        """Return the first score that the model gives. The most likely answer, at temperature 0, is always the same.

        Raises:
            NoScore: it gave none.
        """
        judge = self.judge
        attempts = 1 + judge.retries if judge.temperature > 0 else 1
        for attempt in range(attempts):
            answer = self.host.answer(question, sampling=judge.sampling, attempt=attempt)
            try:
                return judge.score(answer)
            except NoScore as error:
                last = error
        times = "its answer" if attempts == 1 else f"{attempts} answers"
        raise NoScore(f"the judge gave no score in {times}: {last}")


def _text(content: Any) -> str:
    """Return the content of a chat message as one text; it may be a list of parts."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or () if isinstance(part, Mapping))


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
