"""Agents that ask through a URL: exact tokens over turns, tools, forks, retries, limits, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import urllib3
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.environments.agents import agent as agent_module
from fivefold.environments.agents.agent import Agent, load_agent
from fivefold.environments.environment import Task
from fivefold.environments.play import Player
from fivefold.environments.user_code import EnvironmentFailed
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.types import Completion, Episode, Prompt
from tests.unit.environments import test_game
from tests.unit.environments.test_game import Replies, halving
from tests.unit.environments.test_play import Scripted, played

TEMPLATE = """\
{% if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
FORGETFUL = TEMPLATE.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
"""A template that drops thoughts, as Qwen3's does."""


def tokenizer_of(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes in which `ab` is a token too: two sequences of tokens give one text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    made.chat_template = template
    return made


CHATML = tokenizer_of()
END = CHATML.convert_tokens_to_ids("<|im_end|>")


def ids(text: str) -> list[int]:
    return CHATML.encode(text, add_special_tokens=False)


def apart(text: str) -> list[int]:
    """Return a text as tokens of one byte each, which the tokenizer itself never writes for `ab`."""
    return [token for character in text for token in ids(character)]


class Policy(Scripted):
    """An engine that gives what `answer` returns for the text so far, as tokens of one byte, and its end token."""

    def __init__(self, answer: Callable[[str], str], *, is_cut: bool = False) -> None:
        super().__init__()
        self._answer, self._is_cut = answer, is_cut
        self.sampled: list[list[int]] = []
        self.samplings: list[SamplingParams] = []

    def submit(self, number: int, request: GenerationRequest, sampling: SamplingParams) -> None:
        super().submit(number, request, sampling)
        self.samplings.append(sampling)

    def collect(self, seconds: float) -> list[tuple[int, Completion]]:
        number = min(self.running)
        request = self.running.pop(number)
        tokens = apart(self._answer(CHATML.decode(list(request.token_ids)))) + [END] * (not self._is_cut)
        self.sampled.append(tokens)
        reason: Any = "length" if self._is_cut else "stop"
        return [(number, Completion.of(tokens, [-0.5] * len(tokens), reason, 3))]


def task(prompt: str = "go", seed: int = 0) -> Task:
    row = Prompt(3, prompt, tuple(ids(prompt)), "4")
    return Task(row, GenerationRequest(row.token_ids, seed), SamplingParams(200, 0, False, 1.0, 1.0, 0, (), ()))


def config(**fields: Any) -> EnvironmentConfig:
    return EnvironmentConfig(**{"agent": "tests.unit.environments.test_agents:unused", "max_length": 2000, **fields})


def unused(base_url: str) -> float:
    """Stand for the agents of the cases."""
    return 0.0


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Episode]]:
    """(agent, policy, tasks, template, fields of the section) -> the episodes of the tasks."""

    def run(agent: Any, policy: Any, *tasks: Task, template: str = TEMPLATE, **fields: Any) -> list[Episode]:
        monkeypatch.setattr(agent_module, "load_agent", lambda _: agent)
        player = Player(policy, Agent(config(**fields), tokenizer_of(template)))
        player.begin(0, tasks or [task()])
        return played(player)[0]

    return run


def post(base_url: str, path: str, **body: Any) -> Any:
    return urllib3.request("POST", f"{base_url}/{path}", json=body, retries=False, timeout=60).json()


def ask(base_url: str, messages: Sequence[Any], **body: Any) -> Any:
    """Return the message that answers a chat."""
    reply = post(base_url, "chat/completions", messages=list(messages), **body)
    assert "error" not in reply, reply
    return reply["choices"][0]["message"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def texts(episode: Episode) -> list[str]:
    return [CHATML.decode(trajectory.tokens_T.tolist()) for trajectory in episode.trajectories]


def trained(episode: Episode) -> list[list[int]]:
    """Return the trained tokens of each sequence."""
    return [trajectory.tokens_T[trajectory.mask_T].tolist() for trajectory in episode.trajectories]


def test_the_game_through_a_url_has_the_tokens_of_the_game(monkeypatch: pytest.MonkeyPatch) -> None:
    games = test_game.play(
        test_game.Game(test_game.config(), test_game.TOKENIZER),
        Replies(halving),
        *(test_game.task(str(digit)) for digit in range(1, 10)),
    )
    section = EnvironmentConfig(agent="fivefold.environments.guess_digit:play", max_turns=3, max_length=24)
    player = Player(Replies(halving), Agent(section, test_game.TOKENIZER))
    player.begin(0, [test_game.task(str(digit)) for digit in range(1, 10)])
    episodes = played(player)[0]
    for game, episode in zip(games, episodes, strict=True):
        assert (episode.rewards, episode.n_turns) == (game.rewards, game.n_turns)
        [one], [other] = game.trajectories, episode.trajectories
        for name in ("tokens_T", "mask_T", "logprobs_T", "versions_T"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_what_was_sampled_is_kept_over_the_turns_of_a_chat(run: Callable[..., list[Episode]]) -> None:
    def agent(base_url: str) -> float:
        chat = [user("say ab")]
        for more in ("again", "and again"):
            chat += [ask(base_url, chat), user(more)]
        assert ask(base_url, chat) == {"role": "assistant", "content": "ab ab"}
        return 0.5

    policy = Policy(lambda text: "ab ab")
    [episode] = run(agent, policy)
    assert ids("ab ab") != apart("ab ab")
    expected = CHATML.apply_chat_template(
        [user("say ab"), {"role": "assistant", "content": "ab ab"}, user("again"),
         {"role": "assistant", "content": "ab ab"}, user("and again"), {"role": "assistant", "content": "ab ab"}],
        tokenize=False,
    )  # fmt: skip
    assert texts(episode) == [expected.removesuffix("\n")]
    assert trained(episode) == [[*apart("ab ab"), END] * 3]
    assert (episode.rewards, episode.n_turns, episode.finish_reason) == ({"environment": 0.5}, 3, "done")
    # Each request begins with all tokens of the one before and of its answer.
    for earlier, later, sampled in zip(policy.seen, policy.seen[1:], policy.sampled, strict=False):
        assert list(later.token_ids)[: len(earlier.token_ids) + len(sampled)] == [*earlier.token_ids, *sampled]


def test_a_turn_that_was_cut_is_continued_by_the_end_that_the_template_writes(
    run: Callable[..., list[Episode]],
) -> None:
    def agent(base_url: str) -> float:
        ask(base_url, [user("x"), ask(base_url, [user("x")]), user("y")])
        return 1.0

    [episode] = run(agent, Policy(lambda text: "ab", is_cut=True))
    assert len(episode.trajectories) == 1
    assert trained(episode) == [apart("ab") * 2], "the end token between the turns is not the policy's"


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def calls_a_tool(text: str) -> str:
    if "<|im_start|>tool" in text:
        return "It is 3."
    return 'Let me see.\n<tool_call>\n{"name": "add", "arguments":   {"x": 1, "y": 2}}\n</tool_call>'


def test_a_tool_call_is_repeated_in_other_forms_and_stays_one_sequence(run: Callable[..., list[Episode]]) -> None:
    def agent(base_url: str) -> float:
        chat = [user("1+2?")]
        answer = ask(base_url, chat, tools=TOOLS)
        [call] = answer["tool_calls"]
        assert answer["content"] == "Let me see."
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) == {"x": 1, "y": 2}
        call["function"]["arguments"] = '{"y":2,"x":1}'
        chat += [{**answer, "content": [{"type": "text", "text": "Let me see."}], "refusal": None}]
        chat += [{"role": "tool", "tool_call_id": call["id"], "content": "3"}]
        assert ask(base_url, chat, tools=TOOLS)["content"] == "It is 3."
        return 1.0

    policy = Policy(calls_a_tool)
    [episode] = run(agent, policy)
    assert trained(episode) == [policy.sampled[0] + policy.sampled[1]]
    assert "<tool_call>" in texts(episode)[0]
    assert '"add"' in texts(episode)[0].partition("<|im_start|>user")[0], "the template has the tools"


@pytest.mark.parametrize("answer", ["<tool_call>\nadd(1, 2)\n</tool_call>", '<tool_call>{"name": 3}</tool_call>'])
def test_a_call_of_another_form_is_text_that_the_agent_sees(run: Callable[..., list[Episode]], answer: str) -> None:
    def agent(base_url: str) -> float:
        reply = post(base_url, "chat/completions", messages=[user("1+2?")], tools=TOOLS)
        assert reply["choices"][0]["message"] == {"role": "assistant", "content": answer}
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert reply["choices"][0]["parse_error"].startswith("a call")
        return 0.0

    [episode] = run(agent, Policy(lambda text: answer))
    assert episode.finish_reason == "done", "the agent decides what becomes of it"


def test_what_a_user_types_is_no_call_and_tools_that_are_not_offered_are_none(
    run: Callable[..., list[Episode]],
) -> None:
    typed = '<tool_call>{"name": "add"}</tool_call>'

    def agent(base_url: str) -> float:
        for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            assert "tool_calls" not in ask(base_url, [user(typed)], **options)
        return 0.0

    run(agent, Policy(lambda text: typed))


def test_forks_are_sequences_and_what_they_share_is_trained_once(run: Callable[..., list[Episode]]) -> None:
    def agent(base_url: str) -> float:
        root = [user("x"), ask(base_url, [user("x")])]
        for way in "pqr":
            ask(base_url, [*root, user(way)])
        return 1.0

    policy = Policy(lambda text: f"ab{text[-20:].count('r')}")
    [episode] = run(agent, policy)
    assert len(episode.trajectories) == 3
    assert trained(episode) == [policy.sampled[0] + policy.sampled[1], policy.sampled[2], policy.sampled[3]]
    assert all(text.startswith(texts(episode)[0][:30]) for text in texts(episode))


def test_a_summary_is_trained_and_what_continues_it_is_another_sequence(run: Callable[..., list[Episode]]) -> None:
    """An agent shortens its history: the policy's summary of it is sampled, so it is trained, where it was sampled."""

    def agent(base_url: str) -> float:
        chat = [user("x")]
        chat += [ask(base_url, chat), user("sum up")]
        summary = ask(base_url, chat)["content"]
        ask(base_url, [user(f"So far: {summary}. Go on")])
        return 1.0

    policy = Policy(lambda text: "sum" if "sum up" in text else "ab")
    [episode] = run(agent, policy)
    first, second, third = policy.sampled
    assert trained(episode) == [first + second, third]
    assert "So far: sum. Go on" in texts(episode)[1]
    assert "sum up" not in texts(episode)[1]
    assert (episode.n_turns, episode.rewards) == (3, {"environment": 1.0})


def test_a_sub_agent_with_another_prompt_is_part_of_the_episode(run: Callable[..., list[Episode]]) -> None:
    def agent(base_url: str) -> float:
        chat = [user("x"), ask(base_url, [user("x")])]
        found = ask(base_url, [{"role": "system", "content": "You search."}, user("y")])["content"]
        ask(base_url, [*chat, user(found)])
        return 1.0

    policy = Policy(lambda text: "ab" * (1 + text.count("search")))
    [episode] = run(agent, policy)
    first, searched, last = policy.sampled
    assert sorted(trained(episode)) == sorted([first + last, searched])
    assert episode.n_turns == 3


def test_a_template_that_drops_thoughts_begins_another_sequence(run: Callable[..., list[Episode]]) -> None:
    def agent(base_url: str) -> float:
        ask(base_url, [user("x"), ask(base_url, [user("x")]), user("y")])
        return 1.0

    policy = Policy(lambda text: "hm</think>ab")
    [episode] = run(agent, policy, template=FORGETFUL)
    assert trained(episode) == policy.sampled
    assert [text.count("hm") for text in texts(episode)] == [1, 1]


def test_a_tokenizer_that_drops_the_first_space_of_a_text_keeps_the_chat_one_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As SentencePiece's do: a sampled word has a space before it, which is lost if it is decoded alone."""
    letters = sorted({*"▁\n abcdefghijklmnopqrstuvwxyz<|_>0123456789."})
    model = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    model.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    model.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    sampled = [*tokenizer.convert_tokens_to_ids(["▁", "a", "▁", "b"]), tokenizer.eos_token_id]
    assert tokenizer.decode(sampled, skip_special_tokens=True) == "a b"

    class Spaced(Scripted):
        def collect(self, seconds: float) -> list[tuple[int, Completion]]:
            number = min(self.running)
            del self.running[number]
            return [(number, Completion.of(sampled, [-0.5] * len(sampled), "stop", 3))]

    said: list[str] = []

    def agent(base_url: str) -> float:
        chat = [user("go")]
        for _ in range(3):
            chat += [ask(base_url, chat), user("on")]
            said.append(chat[-2]["content"])
        return 1.0

    monkeypatch.setattr(agent_module, "load_agent", lambda _: agent)
    player = Player(Spaced(), Agent(config(), tokenizer))
    player.begin(0, [task()])
    [episode] = played(player)[0]
    assert trained(episode) == [sampled * 3]
    assert said == [" a b"] * 3, "clients see it as it is in its place"


def test_kept_thoughts_leave_the_chat_one_sequence(run: Callable[..., list[Episode]]) -> None:
    def agent(base_url: str) -> float:
        chat = [user("x")]
        for text in "yz":
            chat += [ask(base_url, chat), user(text)]
        ask(base_url, [*chat, {"role": "assistant", "content": "its own"}, user("w")])
        return 1.0

    policy = Policy(lambda text: "hm</think>ab")
    [forgetful] = run(agent, policy, template=FORGETFUL)
    assert len(forgetful.trajectories) == 3
    policy = Policy(lambda text: "hm</think>ab")
    [episode] = run(agent, policy, template=FORGETFUL, keep_thinking=True)
    [text] = texts(episode)
    assert trained(episode) == [[token for sampled in policy.sampled for token in sampled]]
    assert [text.count(part) for part in ("hm</think>", "its own", "<|im_start|>assistant")] == [3, 1, 4]
    # Without thoughts, both are what the template makes.
    for template, keeps in ((TEMPLATE, False), (TEMPLATE, True)):
        [plain] = run(agent, Policy(lambda text: " ab "), template=template, keep_thinking=keeps)
        assert texts(plain) == texts(run(agent, Policy(lambda text: " ab "), template=TEMPLATE)[0])


def test_the_same_request_again_is_the_same_turn(run: Callable[..., list[Episode]]) -> None:
    def agent(base_url: str) -> float:
        with ThreadPoolExecutor(3) as threads:
            answers = list(threads.map(lambda _: ask(base_url, [user("x")]), range(3)))
        assert answers == [ask(base_url, [user("x")])] * 3
        return 1.0

    policy = Policy(lambda text: "ab")
    [episode] = run(agent, policy)
    assert (episode.n_turns, len(policy.seen)) == (1, 1)


def test_requests_at_once_have_seeds_that_do_not_depend_on_their_order(run: Callable[..., list[Episode]]) -> None:
    seeds = []
    for order in ("pqrs", "srqp"):

        async def agent(base_url: str, order: str = order) -> float:
            chats = [asyncio.to_thread(ask, base_url, [user(way)]) for way in order]
            await asyncio.gather(asyncio.to_thread(ask, base_url, [user("first")]))
            await asyncio.gather(*chats)
            return 1.0

        policy = Policy(lambda text: "ab")
        [episode] = run(agent, policy)
        assert len(episode.trajectories) == 5
        seeds.append({request.token_ids: request.seed for request in policy.seen})
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 5


def test_a_stream_has_the_answer_and_its_end(run: Callable[..., list[Episode]]) -> None:
    def agent(base_url: str) -> float:
        body = {"messages": [user("1+2?")], "tools": TOOLS, "stream": True}
        reply = urllib3.request("POST", f"{base_url}/chat/completions", json=body, retries=False)
        assert reply.headers["content-type"].startswith("text/event-stream")
        first, last = reply.data.decode().strip().split("\n\n")
        [choice] = json.loads(first.removeprefix("data: "))["choices"]
        assert choice["delta"]["tool_calls"][0]["index"] == 0
        assert choice["finish_reason"] == "tool_calls"
        assert last == "data: [DONE]"
        return 1.0

    run(agent, Policy(calls_a_tool))


def test_ids_of_a_turn_are_told_who_asks_for_them(run: Callable[..., list[Episode]]) -> None:
    def agent(base_url: str) -> float:
        reply = post(base_url, "chat/completions", messages=[user("x")], return_token_ids=True)
        assert reply["choices"][0]["token_ids"] == [*apart("ab"), END]
        prompt = CHATML.apply_chat_template([user("x")], tokenize=False, add_generation_prompt=True)
        assert reply["prompt_token_ids"] == ids(prompt)


BROKEN_CALL = {"function": {"name": "add", "arguments": "{"}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"n": 2}, "n=2 is not supported"),
        ({"temperature": 0.3}, r"temperature=0.3 differs from gconfig.temperature=1.0"),
        ({"seed": 3}, "seed=3 is not supported"),
        ({"stop": ["x", 1]}, "stop=.* must be a text, or a list of texts"),
        ({"stop_token_ids": "x"}, "stop_token_ids='x' must be a list of tokens"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5 is not supported"),
        ({"min_p": 0.1}, r"min_p=0.1 differs from gconfig.min_p=0.0"),
        ({"tool_choice": "required"}, "tool_choice='required' is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 0}, "max_tokens=0 must be a positive integer"),
        ({"messages": []}, "messages=.* must be a list that is not empty"),
        ({"messages": [{"content": "x"}]}, "a message must have a role"),
        ({"messages": [user("x") | {"content": [{"type": "image_url"}]}]}, "only parts of text are supported"),
        ({"messages": [{"role": "assistant", "tool_calls": [BROKEN_CALL]}]}, "no JSON"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_reason(
    run: Callable[..., list[Episode]], body: dict[str, Any], message: str
) -> None:
    found: list[str] = []

    def agent(base_url: str) -> float:
        reply = post(base_url, "chat/completions", **({"messages": [user("x")]} | body))
        found.append(reply["error"]["message"])
        ask(base_url, [user("y")])
        return 1.0

    run(agent, Policy(lambda text: "ab"))
    [said] = found
    assert re.search(message, said), said


class Stopped(Policy):
    """Writes an action and the stop text after it, and no end token, as an engine that was asked to stop there."""

    def __init__(self) -> None:
        super().__init__(lambda text: f"turn {text.count('Seen: ') + 1}, ab\nSeen: ", is_cut=True)

    def collect(self, seconds: float) -> list[tuple[int, Completion]]:
        return [(number, replace(whole, finish_reason="stop")) for number, whole in super().collect(seconds)]


@pytest.mark.parametrize("form", ["chat", "text", "tokens"])
def test_what_a_stop_cuts_off_stays_among_the_tokens(run: Callable[..., list[Episode]], form: str) -> None:
    def agent(base_url: str) -> float:
        if form == "text":
            first = post(base_url, "completions", prompt="go", stop="Seen: ")["choices"][0]
            assert (first["text"], first["finish_reason"], first["stop_reason"]) == ("turn 1, ab\n", "stop", "Seen: ")
            last = post(base_url, "completions", prompt=f"go{first['text']}Seen: 7\n", stop=["Seen: "])
            assert last["choices"][0]["text"] == "turn 2, ab\n"
            return 1.0
        if form == "tokens":
            root, sampling = base_url.removesuffix("/v1"), {"stop": ["Seen: "]}
            first = post(root, "generate", input_ids=ids("go"), sampling_params=sampling)
            assert (first["text"], first["meta_info"]["finish_reason"]["matched"]) == ("turn 1, ab\n", "Seen: ")
            later = [*ids("go"), *first["output_ids"], *ids("7\n")]
            assert post(root, "generate", input_ids=later, sampling_params=sampling)["text"] == "turn 2, ab\n"
            return 1.0
        body = {"max_tokens": 90, "stop_sequences": ["Seen: "]}
        said = post(base_url, "messages", messages=[user("go")], **body)
        assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "Seen: ")
        assert said["content"] == [{"type": "text", "text": "turn 1, ab\n"}]
        chat = [user("go"), {"role": "assistant", "content": "turn 1, ab\n"}, user("7")]
        assert ask(base_url, chat, stop="Seen: ")["content"] == "turn 2, ab\n"
        return 1.0

    policy = Stopped()
    [episode] = run(agent, policy)
    assert trained(episode) == [policy.sampled[0] + policy.sampled[1]]
    assert [sampling.stop for sampling in policy.samplings] == [("Seen: ",)] * 2


def test_a_session_is_reached_by_its_url_alone_and_while_its_episode_lasts(run: Callable[..., list[Episode]]) -> None:
    urls: list[str] = []

    def agent(base_url: str, api_key: str, model: str) -> float:
        urls.append(base_url)
        ask(base_url, [user("x")], model=model)
        assert base_url.startswith("http://127.0.0.1:")
        assert post(base_url[:-8] + "other/v1", "completions", prompt="x")["error"]["code"] == "no_session"
        return 1.0

    run(agent, Policy(lambda text: "ab"), task(), task(seed=1))
    assert len(set(urls)) == 2
    assert post(urls[0], "chat/completions", messages=[user("x")])["error"]["code"] == "no_session"


def test_limits_refuse_and_the_episode_says_which_it_has_reached(run: Callable[..., list[Episode]]) -> None:
    codes: list[str] = []

    def agent(base_url: str) -> float:
        text = "go"
        while "error" not in (reply := post(base_url, "completions", prompt=text)):
            text += reply["choices"][0]["text"] + "?"
        codes.append(reply["error"]["code"])
        return 0.25

    [episode] = run(agent, Policy(lambda text: "ab"), max_turns=4)
    assert (episode.finish_reason, episode.n_turns, episode.rewards) == ("turns", 4, {"environment": 0.25})
    [episode] = run(agent, Policy(lambda text: "ab"), max_length=12, max_turns=99)
    # go, then ab with its end and a question mark: 2, 6, 10, and 14 are too many.
    assert (episode.finish_reason, episode.n_turns) == ("context", 3)
    assert codes == ["max_turns_reached", "context_length_exceeded"]


def test_an_agent_that_fails_after_a_limit_has_reward_0_and_one_without_a_limit_ends_the_run(
    run: Callable[..., list[Episode]],
) -> None:
    def agent(base_url: str) -> float:
        for turn in range(9):
            ask(base_url, [user(str(turn))])
        return 1.0

    [episode] = run(agent, Policy(lambda text: "ab"), max_turns=2)
    assert (episode.finish_reason, episode.rewards) == ("turns", {"environment": 0.0})

    def broken(base_url: str) -> float:
        ask(base_url, [user("x")])
        return {}["x"]

    with pytest.raises(EnvironmentFailed, match=r"(?s)broken, in an episode of prompt 4, failed:.*KeyError: 'x'"):
        run(broken, Policy(lambda text: "ab"))


def test_an_agent_that_takes_too_long_stops_with_its_turns_and_reward_0(run: Callable[..., list[Episode]]) -> None:
    async def agent(base_url: str) -> float:
        await asyncio.to_thread(ask, base_url, [user("x")])
        await asyncio.sleep(60)
        return 1.0

    began = time.monotonic()
    [episode] = run(agent, Policy(lambda text: "ab"), timeout_s=0.5)
    assert time.monotonic() - began < 30
    assert (episode.finish_reason, episode.rewards, episode.n_turns) == ("time", {"environment": 0.0}, 1)


def test_the_time_in_which_an_agent_waits_for_the_model_does_not_count(run: Callable[..., list[Episode]]) -> None:
    def slow(text: str) -> str:
        time.sleep(1.5)
        return "ab"

    async def agent(base_url: str) -> float:
        await asyncio.to_thread(ask, base_url, [user("x")])
        await asyncio.gather(*(asyncio.to_thread(ask, base_url, [user(text)]) for text in "yz"))
        return 1.0

    [episode] = run(agent, Policy(slow), timeout_s=3.0)
    assert (episode.finish_reason, episode.rewards, episode.n_turns) == ("done", {"environment": 1.0}, 3)


def test_an_agent_may_return_a_reward_for_each_turn(run: Callable[..., list[Episode]]) -> None:
    def agent(base_url: str) -> list[float | dict[str, float]]:
        chat = [user("x")]
        chat += [ask(base_url, chat), user("again")]
        ask(base_url, chat)
        ask(base_url, [user("another")])
        return [0.5, {"environment": 0.25, "style": 2.0}, 1.0]

    [episode] = run(agent, Policy(lambda text: "ab"))
    assert episode.rewards == {"environment": 1.75, "style": 2.0}
    assert [dict(move.rewards) for move in episode.moves] == [
        {"environment": 0.5}, {"environment": 0.25, "style": 2.0}, {"environment": 1.0}
    ]  # fmt: skip
    tokens, mask = (
        np.concatenate([getattr(each, name) for each in episode.trajectories]) for name in ("tokens_T", "mask_T")
    )
    assert len(episode.trajectories) == 2
    assert all(mask[move.start : move.start + move.n_tokens].all() for move in episode.moves)
    assert all(tokens[move.start + move.n_tokens - 1] == END for move in episode.moves)
    assert sum(move.n_tokens for move in episode.moves) == mask.sum()
    with pytest.raises(EnvironmentFailed, match="a list of these for each of its 1 turns"):
        run(lambda base_url: (ask(base_url, [user("x")]), [1.0, 2.0])[1], Policy(lambda text: "ab"))


@pytest.mark.parametrize(
    ("returned", "message"),
    [(None, "returned None: it must return a finite reward"), ({}, "it must return"), (float("inf"), "it must return")],
)
def test_an_agent_returns_rewards(run: Callable[..., list[Episode]], returned: Any, message: str) -> None:
    def agent(base_url: str) -> Any:
        ask(base_url, [user("x")])
        return returned

    with pytest.raises(EnvironmentFailed, match=message):
        run(agent, Policy(lambda text: "ab"))


def test_an_agent_that_asks_nothing_is_an_error(run: Callable[..., list[Episode]]) -> None:
    with pytest.raises(EnvironmentFailed, match="asked the model for nothing"):
        run(lambda base_url: 1.0, Policy(lambda text: "ab"))


@pytest.mark.parametrize(
    "name", ["tests.unit.environments.test_agents:TOOLS", "tests.unit.environments.test_agents:post"]
)
def test_what_is_no_agent_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"environment\.agent=.* (is a list|cannot be called)"):
        load_agent(name)


def test_many_sessions_at_once(run: Callable[..., list[Episode]]) -> None:
    here, most, lock = 0, 0, threading.Lock()

    async def agent(base_url: str, seed: int) -> float:
        nonlocal here, most
        with lock:
            here, most = here + 1, max(most, here + 1)
        chat = [user(f"episode {seed}")]
        for _ in range(3):
            chat += [await asyncio.to_thread(ask, base_url, chat), user("go on")]
        with lock:
            here -= 1
        return float(seed)

    episodes = run(agent, Policy(lambda text: text.split("episode ")[1][:2]), *(task(seed=n + 10) for n in range(20)))
    assert most > 10
    for number, episode in enumerate(episodes):
        assert episode.rewards == {"environment": number + 10.0}
        assert trained(episode) == [[*apart(str(number + 10)), END] * 3]
