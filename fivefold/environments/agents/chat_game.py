"""Games in a chat: what a game answers is a message of the user, and each answer of the model a move.

system, user: rules and the first observation ─> assistant: a move ─> user: an observation ─> assistant ...
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.environments.agents.chat import Chat
from fivefold.environments.agents.parsing import load_parser
from fivefold.environments.agents.session import Refused, Session
from fivefold.environments.environment import Client, Task
from fivefold.environments.game import KEY, UserGames
from fivefold.types import Episode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIELD = re.compile(r"\{(observation|turn|turns_left|max_new_tokens)\}")


class ChatGame:
    """Plays games of a user's class in a chat (`Environment`), each episode with a separate object.

    An episode is one sequence: what the model wrote in earlier turns stays as it was sampled.
    """

    def __init__(self, config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Import the game.

        Raises:
            ValueError: there is no such class, it is no game, or the tokenizer has no chat template.
        """
        self._games = UserGames(config)
        self._config = config.model_copy(update={"keep_thinking": True})
        self._tokenizer = tokenizer
        self._parser = load_parser(config.parser, tokenizer)
        check_template(tokenizer)

    async def run(self, task: Task, client: Client) -> Episode:
        """Play one game.

        Raises:
            EnvironmentFailed: the game raised an error, took too long, or returned something of another form.
        """
        prompt = task.prompt
        game, opening = await self._games.opened(task)
        first = self._message(opening, 1, task)
        *before, last = (dict(message) for message in prompt.chat)
        if last.get("role") == "user":
            messages = [*before, {**last, "content": f"{last['content']}\n{first}"}]
        else:
            messages = [*before, last, {"role": "user", "content": first}]
        session = Session(task, client, self._tokenizer, self._config, self._parser)
        chat, rewards = Chat(session), list[Mapping[str, float]]()
        states: list[str] = []
        try:
            while True:
                if (state := await game.state()) is not None:
                    states.append(state)
                reply = await chat.answer({"messages": messages})
                answer = reply["choices"][0]["message"]
                observation, reward, done = await game.step(answer["content"] or "")
                rewards.append(reward)
                if done:
                    break
                shown = self._message(observation, len(rewards) + 1, task)
                messages += [answer, {"role": "user", "content": shown}]
        except Refused as refusal:
            if session.ended_by is None or not session.tree.turns:
                raise ValueError(f"{KEY}, in an episode of prompt {prompt.index + 1}: {refusal}") from refusal
        finally:
            session.close()
        return session.episode("done", rewards, states[: len(rewards)] or None)

    def _message(self, observation: str, turn: int, task: Task) -> str:
        """Return what the model reads before a turn, counted from 1."""
        values: dict[str, Any] = {
            "observation": observation,
            "turn": turn,
            "turns_left": self._config.max_turns - turn + 1,
            "max_new_tokens": task.sampling.max_new_tokens,
        }
        return FIELD.sub(lambda match: str(values[match[1]]), str(self._config.turn_template))


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        ValueError: it has none.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"environment.turn_template needs a chat template, and the tokenizer of {tokenizer.name_or_path!r} has "
            "none: use an instruct model, or drop the key"
        )
