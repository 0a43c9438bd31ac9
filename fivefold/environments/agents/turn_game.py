"""Games whose turns are separate chats: the model reads the last turns as a text, and no others.

turn 3:  system, user: rules, turns 1 and 2, the observation ─> assistant: a move
turn 4:  system, user: rules, turns 2 and 3, the observation ─> assistant: a move
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.environments.agents.chat_game import check_template
from fivefold.environments.agents.tree import Continuation, Tree
from fivefold.environments.environment import Client, Task
from fivefold.environments.game import UserGames
from fivefold.types import Episode, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIELD = re.compile(r"\{(prompt|history|observation|turn|turns_done|turns_shown|turns_left|max_new_tokens)\}")


@dataclass(frozen=True)
class Past:
    """A turn that is over."""

    observation: str
    answer: str

    def shown(self, number: int) -> str:
        """Return it as later turns read it; turns are counted from 1."""
        return f"(turn {number}, observation: {self.observation}, answer: {self.answer})"


class TurnGame:
    """Plays games of a user's class (`Environment`) with the last `environment.memory` turns in each prompt.

    Each turn is a sequence. An episode has the same object of the game in all its turns.
    """

    def __init__(self, config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Import the game.

        Raises:
            ValueError: there is no such class, it is no game, or the tokenizer has no chat template.
        """
        self._games = UserGames(config)
        self._config = config
        self._tokenizer = tokenizer
        check_template(tokenizer)

    async def run(self, task: Task, client: Client) -> Episode:
        """Play one game.

        Raises:
            EnvironmentFailed: the game raised an error, took too long, or returned something of another form.
        """
        prompt = task.prompt
        game, observation = await self._games.opened(task)
        tree = Tree(self._tokenizer, prompt.text, prompt.token_ids)
        past: list[Past] = []
        states: list[str] = []
        rewards: list[Mapping[str, float]] = []
        reason: StopReason = "turns"
        while len(past) < self._config.max_turns:
            text = self._text(task, past, observation)
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
            room = self._config.max_length - len(token_ids)
            if room <= 0:
                reason = "context"
                break
            state = await game.state()
            states.append(text if state is None else state)
            completion = await client.complete(token_ids, task.sampling.within(room))
            turn = tree.add(Continuation(text, None, tuple(token_ids)), completion)
            past.append(Past(observation, turn.visible_text))
            observation, reward, done = await game.step(turn.visible_text)
            rewards.append(reward)
            if done:
                reason = "done"
                break
        if not past:
            raise ValueError(
                f"the first turn of prompt {prompt.index + 1} has {len(token_ids)} tokens, and a turn may have "
                f"environment.max_length={self._config.max_length}: raise it, or lower the data set's max_length"
            )
        return tree.episode(reason, rewards, states)

    def _text(self, task: Task, past: Sequence[Past], observation: str) -> str:
        """Return the chat of a turn, as the chat template writes it."""
        *before, last = (dict(message) for message in task.prompt.chat)
        own = last["content"] if last.get("role") == "user" else ""
        if last.get("role") != "user":
            before.append(last)
        shown = self._message(task, past, observation, str(own))
        if own and "{prompt}" not in str(self._config.turn_template):
            shown = f"{own}\n{shown}"
        messages = [*before, {"role": "user", "content": shown}]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _message(self, task: Task, past: Sequence[Past], observation: str, own: str) -> str:
        done, kept = len(past), min(len(past), self._config.memory or 0)
        remembered = [past[place].shown(place + 1) for place in range(done - kept, done)]
        values: dict[str, Any] = {
            "prompt": own,
            "history": "\n".join(remembered),
            "observation": observation,
            "turn": done + 1,
            "turns_done": done,
            "turns_shown": kept,
            "turns_left": self._config.max_turns - done,
            "max_new_tokens": task.sampling.max_new_tokens,
        }
        return FIELD.sub(lambda match: str(values[match[1]]), str(self._config.turn_template))
