"""The reward `judge` that asks a model of the run, against a host of the test's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from fivefold.config.schema.rewards import RewardConfig
from fivefold.rewards.asking import HostFailed, NoScore
from fivefold.rewards.judge import Sampling
from fivefold.rewards.resolve import resolve_rewards
from fivefold.rewards.reward_set import RewardSet
from fivefold.rewards.static_check import reward_problems
from fivefold.types import Prompt

JUDGE = {"path": "package:tiny-moe-tools"}


@dataclass
class Host:
    """Gives the answers of a list, one after the other, and keeps what it was asked."""

    answers: list[str | Exception]
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def answer(self, question: str, *, sampling: Sampling, attempt: int) -> str:
        self.asked.append((question, sampling, attempt))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def config(**kwargs: Any) -> RewardConfig:
    return RewardConfig.model_validate({"fn": "judge", "kwargs": kwargs, "judge": JUDGE})


def judged(host: Host, *responses: str, **kwargs: Any) -> list[float]:
    rewards: RewardSet = resolve_rewards(config(**kwargs)).asking(host)
    found = rewards.judge([Prompt(0, "1+1=", (1,), "2")] * len(responses), responses)
    return [next(iter(each.values())) for each in found]


def test_the_question_is_the_template_and_the_last_score_of_the_answer_counts() -> None:
    host = Host(["Score: 3, no: Score: 8"])
    assert judged(host, "{prompt}", template="{prompt} {response} {ground_truth}", scale=0.1) == [pytest.approx(0.8)]
    assert host.asked == [("1+1= {prompt} 2", Sampling(0.0, 1.0, 0, 512), 0)]


def test_an_answer_without_a_score_is_drawn_again_with_other_numbers() -> None:
    host = Host(["hm", "well", "Score: 1"])
    sampled = {"temperature": 0.7, "top_p": 0.8, "top_k": 50, "max_tokens": 9}
    assert judged(host, "2", **sampled, retries=2, template="{response}") == [1.0]
    assert host.asked == [("2", Sampling(**sampled), attempt) for attempt in range(3)]


@pytest.mark.parametrize(("answer", "score"), [("YES.", 1.0), ("no, or yes?", 1.0), ("No", 0.0)])
def test_the_first_of_the_words_that_is_in_the_answer_gives_the_score(answer: str, score: float) -> None:
    assert judged(Host([answer]), "2", words={"Yes": 1, "no": 0}) == [score]
    with pytest.raises(ValueError, match="none of the words Yes, no is in the answer 'hm'"):
        judged(Host(["hm"]), "2", words={"Yes": 1, "no": 0})


def test_the_question_of_a_template_is_the_last_message_without_the_chat_template() -> None:
    host = Host(["Score: 1"])
    rewards = resolve_rewards(config(template="{question}|{response}")).asking(host)
    chat = ({"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "1+1="}]})
    rewards.judge([Prompt(0, "<s>1+1=", (1,), "2", messages=chat)], ["2"])
    assert host.asked[0][0] == "1+1=|2"


def test_the_most_likely_answer_is_asked_for_once() -> None:
    host = Host(["hm", "Score: 1"])
    assert judged(host, "2", retries=5, on_failure=-1.0) == [-1.0]
    assert len(host.asked) == 1


@pytest.mark.parametrize(
    ("answers", "kwargs", "reason"),
    [
        (["hm"], {}, "the judge gave no score in its answer: .*'hm'"),
        (["a", "b"], {"temperature": 1.0, "retries": 1}, "the judge gave no score in 2 answers: .*'b'"),
        ([NoScore("the question is too long")], {}, "the question is too long"),
    ],
)
def test_without_a_score_the_run_ends_or_goes_on_with_another_reward(
    answers: list[str | Exception], kwargs: dict[str, Any], reason: str
) -> None:
    assert judged(Host([*answers]), "2", **kwargs, on_failure=0.25) == [0.25]
    with pytest.raises(ValueError, match=reason):
        judged(Host([*answers]), "2", **kwargs)


def test_many_failures_in_a_row_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.rewards.asking.MOST_FAILED", 3)
    with pytest.raises(ValueError, match="the judge gave no score for 3 responses in a row"):
        judged(Host(["hm"] * 3), "1", "2", "3", on_failure=0.0, concurrency=1)


def test_a_host_that_failed_is_no_fault_of_the_reward() -> None:
    failure = HostFailed()
    failure.__cause__ = RuntimeError("the process died")
    with pytest.raises(HostFailed) as caught:
        judged(Host([failure]), "1", on_failure=0.0)
    assert str(caught.value.__cause__) == "the process died"


def test_as_many_questions_are_asked_at_once_as_the_recipe_says() -> None:
    barrier = threading.Barrier(3, timeout=60)

    class Meeting(Host):
        def answer(self, question: str, *, sampling: Sampling, attempt: int) -> str:
            barrier.wait()
            return "Score: 1"

    assert judged(Meeting([]), *"abc", concurrency=3) == [1.0] * 3
    assert resolve_rewards(config()).rewards[0].reward.n_threads == 256


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"fn": "judge"}, "fn=judge asks a model at a URL, or one that the run hosts, and there is neither"),
        ({"fn": "math", "judge": JUDGE}, "the section judge has no effect: set fn=judge without kwargs.base_url"),
        (
            {"fn": "judge", "kwargs": {"base_url": "http://a.b/v1", "model": "m"}, "judge": JUDGE},
            "the section judge has no effect",
        ),
        (
            {"fn": "judge", "judge": {**JUDGE, "colocate": True, "device_mapping": "0-3"}},
            "colocate=true shares the actor's devices, got device_mapping=0-3: drop device_mapping",
        ),
    ],
)
def test_the_section_and_its_users_belong_together(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RewardConfig.model_validate(values)


@pytest.mark.parametrize("key", ["timeout_s", "api_key_env", "model", "backoff_s"])
def test_keys_of_a_service_are_refused(key: str) -> None:
    def problems() -> Iterator[str]:
        yield from reward_problems(config(**{key: 1}))

    assert [line for line in problems() if f"reward.kwargs has ['{key}']" in line]
