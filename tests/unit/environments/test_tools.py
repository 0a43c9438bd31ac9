"""Tools that the model calls in a chat: their results, their errors, rewards, and what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.environments.agents import tools as tools_module
from fivefold.environments.agents.tools import Tools, check_template, load_tools
from fivefold.environments.play import Player
from fivefold.environments.user_code import EnvironmentFailed
from fivefold.rewards.sandbox.runner import missing
from fivefold.rollout.tokenizer import load_tokenizer
from fivefold.types import Episode
from tests.unit.environments.test_agents import CHATML, TEMPLATE, Policy, ids, task, texts, tokenizer_of, trained
from tests.unit.environments.test_play import played

ROOT = Path(__file__).parents[3]


class Lamp:
    """A lamp that is on after it was switched three times."""

    def reset(self, ground_truth: str) -> str:
        """Begin with the lamp off."""
        self.n_switched, self.wanted = 0, int(ground_truth)
        return " Please."

    def switch(self, times: int = 1) -> str:
        """Switch the lamp.

        Args:
            times: how often
        """
        if times > 3:
            raise ValueError("the switch is hot")
        self.n_switched += times
        return f"switched {self.n_switched} times"

    async def look(self) -> dict[str, bool]:
        """Look at the lamp."""
        return {"on": self.n_switched % 2 == 1}

    def reward(self) -> dict[str, float]:
        """Say whether it was switched as often as wanted."""
        return {"right": float(self.n_switched == self.wanted), "switched": float(self.n_switched)}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Episode]:
    """(tools, what the model says in each turn, fields of the section) -> the episode."""

    def run(tools: Any, /, *says: str, template: str = TEMPLATE, **fields: Any) -> Episode:
        monkeypatch.setattr(tools_module, "load_tools", lambda _: tools)
        config = EnvironmentConfig(**{"tools": "tests.unit.environments.test_tools:Lamp", "max_length": 4000, **fields})
        left = list(says)
        player = Player(Policy(lambda text: left.pop(0)), Tools(config, tokenizer_of(template)))
        player.begin(0, [task("Switch it on.")])
        [episode] = played(player)[0]
        return episode

    return run


def test_the_model_calls_methods_of_an_object_until_it_answers(run: Callable[..., Episode]) -> None:
    says = [call("switch", times=3) + call("switch"), call("look"), "It is off."]
    episode = run(Lamp, *says)
    [text] = texts(episode)
    system, first, *_ = text.split("<|im_end|>\n")
    assert first == "<|im_start|>user\nSwitch it on. Please."
    assert system.count('"name": "switch"') == system.count('"description": "how often"') == 1
    assert "reset" not in system
    assert "reward" not in system
    results = [part.split("\n", 1)[1] for part in text.split("<|im_end|>\n") if part.startswith("<|im_start|>tool")]
    assert results == ["switched 3 times", "switched 4 times", '{"on": false}']
    assert [CHATML.decode(tokens) for tokens in trained(episode)] == ["".join(f"{said}<|im_end|>" for said in says)]
    assert episode.rewards == {"right": 1.0, "switched": 4.0}
    assert (episode.n_turns, episode.finish_reason) == (3, "done")


@pytest.mark.parametrize(
    ("said", "result"),
    [
        (call("turn"), "Error: there is no tool 'turn': use look, switch"),
        (call("switch", times=9), "Error: ValueError('the switch is hot')"),
        (call("switch", way="up"), "Error: TypeError(\"Lamp.switch() got an unexpected keyword argument 'way'\")"),
    ],
)
def test_a_tool_that_fails_answers_the_model(run: Callable[..., Episode], said: str, result: str) -> None:
    episode = run(Lamp, said, "Oh.")
    assert f"<|im_start|>tool\n{result}<|im_end|>" in texts(episode)[0]
    assert episode.rewards["right"] == 0.0


BROKEN = [
    ('<tool_call>\n{"name": "switch", "arguments": {\n</tool_call>', "a call is no object of JSON: "),
    ('<tool_call>\n["switch"]\n</tool_call>', "a call is no object of JSON: "),
    ('<tool_call>\n{"name": "switch", "argu', "a call has no end, </tool_call>"),
    (
        '<tool_call>\n{"name": "switch", "arguments": 3}\n</tool_call>',
        'must be {"name": a text, "arguments": an object}',
    ),
    (call("switch") + "<tool_call>switch</tool_call>", "a call is no object of JSON"),
]


@pytest.mark.parametrize(("said", "problem"), BROKEN)
def test_a_call_that_cannot_be_read_ends_the_episode_or_is_answered(
    run: Callable[..., Episode], said: str, problem: str
) -> None:
    ended = run(Lamp, call("switch", times=3), said, "never said")
    assert (ended.finish_reason, ended.n_turns, ended.effort.calls) == ("parse", 2, 1)
    assert ended.rewards == {"right": 0.0, "switched": 3.0}
    answered = run(Lamp, said, call("switch", times=3), call("switch"), "It is off.", parse_errors="answer")
    assert (answered.finish_reason, answered.rewards["right"], answered.effort.calls) == ("done", 1.0, 2)
    [text] = texts(answered)
    [told] = [part for part in text.split("<|im_end|>\n") if part.startswith("<|im_start|>tool\nError: ")]
    assert problem in told


def test_what_an_episode_took_is_counted(run: Callable[..., Episode]) -> None:
    class Slow(Lamp):
        def look(self) -> str:
            """Look at the lamp for a while."""
            time.sleep(0.2)
            return "it is off"

    says = [call("look") + call("look"), call("look"), "It is off."]
    episode = run(Slow, *says)
    [text] = texts(episode)
    written = ["Switch it on. Please.", *["it is off"] * 3]
    n_given = len(episode.trajectories[0].mask_T) - sum(map(len, trained(episode)))
    template = text
    for part in (*says, *written):
        template = template.replace(part, "", 1)
    n_ends = len(says)  # end tokens that the model has sampled
    assert episode.effort.calls == 3
    assert episode.effort.given == n_given
    assert episode.effort.template == n_given - sum(len(ids(part)) for part in written)
    assert episode.effort.template == len(ids(template)) - n_ends


def test_an_episode_that_reaches_a_limit_has_the_reward_of_what_it_did(run: Callable[..., Episode]) -> None:
    episode = run(Lamp, call("switch", times=2), call("switch", times=2), "never said", max_turns=2)
    assert (episode.finish_reason, episode.rewards["right"]) == ("turns", 1.0)
    with pytest.raises(
        ValueError, match=r"prompt 4: the prompt has \d+ tokens, and an episode may have .*max_length=9"
    ):
        run(Lamp, "x", max_length=9)


def double(x: int) -> int:
    """Double a number.

    Args:
        x: the number
    """
    return 2 * x


def test_functions_are_tools_without_rewards(run: Callable[..., Episode]) -> None:
    episode = run([double], call("double", x=21), "42", tools=["tests.unit.environments.test_tools:double"])
    assert "<|im_start|>tool\n42<|im_end|>" in texts(episode)[0]
    assert episode.rewards == {}


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("x = 6 * 7\nprint('x is', x)", "x is 42"),
        ("def f(n):\n    return n * f(n - 1) if n else 1\nprint(f(20))", "2432902008176640000"),
        ("print(1)\n1 / 0", '1\nTraceback (most recent call last):\n  File "<program>", line 2, in <module>'),
        ("import sys\nsys.exit(3)", "The program has printed nothing."),
        ("print('x' * 5000)", "and 1,001 characters more"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9))", "Error"),
        ("open('/etc/passwd').read()", "PermissionError"),
    ],
)
@pytest.mark.skipif(bool(missing()), reason="the kernel has no sandbox")
def test_programs_of_the_model_run_in_a_sandbox(run: Callable[..., Episode], code: str, answer: str) -> None:
    functions = load_tools(["python"])
    episode = run(functions, call("python", code=code), "So.", tools=["python"], max_length=9000)
    [result] = [part for part in texts(episode)[0].split("<|im_start|>") if part.startswith("tool\n")]
    assert answer in result
    assert episode.rewards == {}


class Greedy(Lamp):
    """A lamp with a reward of another form."""

    def reward(self) -> Any:
        return None


def test_a_reward_of_another_form_names_the_prompt(run: Callable[..., Episode]) -> None:
    with pytest.raises(EnvironmentFailed, match=r"reward, in an episode of prompt 4, returned None: it must return"):
        run(Greedy, "x")


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("def f(x: int):\n  '''Do it.'''", ["f"], "no description for the argument 'x'"),
        ("def f(x):\n  '''Do it.\n\n  Args:\n    x: what\n  '''", ["f"], "missing a type hint"),
        ("f = 3", ["f"], "is a int: name a function"),
        ("class C:\n def reset(self): ...\n def reward(self): ...", "C", "has no tool"),
        ("class C:\n def reset(self): ...\n def go(self):\n  '''Go.'''", "C", "has no method 'reward'"),
    ],
)
def test_what_is_no_tool_is_refused(source: str, name: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(source)
    place = f"{tmp_path}/my_tools.py:"
    with pytest.raises(ValueError, match=rf"(?is)environment\.tools.*{message}"):
        load_tools(place + name if isinstance(name, str) else [place + each for each in name])


def test_a_template_without_tools_is_refused() -> None:
    with pytest.raises(ValueError, match="has one that leaves them out"):
        check_template(tokenizer_of(TEMPLATE.replace("{{ tool | tojson }}", "")), EnvironmentConfig(tools=["a:b"]))
    with pytest.raises(ValueError, match="has none: use an instruct model"):
        check_template(load_tokenizer(str(ROOT / "fivefold" / "models" / "tiny-moe")), EnvironmentConfig(tools=["a:b"]))
    refusing = TEMPLATE.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no id') }}{% endif %}",
    )
    check_template(tokenizer_of(refusing), EnvironmentConfig(tools=["a:b"]))
    with pytest.raises(ValueError, match=r"no id.* set environment\.parse_errors=end"):
        check_template(tokenizer_of(refusing), EnvironmentConfig(tools=["a:b"], parse_errors="answer"))


def test_one_key_says_what_plays() -> None:
    with pytest.raises(ValueError, match="set one of game, tools and agent, and not game and tools"):
        EnvironmentConfig(game="a:B", tools=["c:d"])
    with pytest.raises(ValueError, match="not none of them"):
        EnvironmentConfig(max_turns=3)
    with pytest.raises(ValueError, match=r"'pythn' must have the form module:name or file\.py:name"):
        EnvironmentConfig(tools=["pythn"])
    with pytest.raises(ValueError, match=r"write tools=\[python\]"):
        EnvironmentConfig(tools="python")
    located = EnvironmentConfig(tools=["c.py:d", "e:f"]).located(Path("/runs"))
    assert located.tools == ["/runs/c.py:d", "e:f"]
