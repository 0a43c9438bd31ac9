"""Games: the text of each completion is a move, and what the game answers is read before the next one.

    reset(...)           optional text that goes to the end of the prompt
    step(move)           (observation, reward, done)
    state()              optional: what the next move depends on, for credit by state

As tokens, without a chat template:  prompt  opening | move | observation | move ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.environments.environment import Client, Task
from fivefold.environments.given_rewards import named_rewards
from fivefold.environments.transcript import Transcript
from fivefold.environments.user_code import UserCalls, load_class, row_arguments
from fivefold.rollout.tokenizer import decoded
from fivefold.types import Effort, Episode, Move, Prompt, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "environment.game"
_STEP = "(observation, reward, done), or gymnasium's (observation, reward, terminated, truncated, info)"


def load_game(config: EnvironmentConfig) -> type[Any]:
    """Import the recipe's game.

    Raises:
        ValueError: there is no such class, or it is no game.
    """
    assert config.game is not None
    return load_class(KEY, config.game, {"reset": (), "step": ("a move",)})


@dataclass(frozen=True)
class OpenGame:
    """A game that has begun; each call may raise `EnvironmentFailed`, as `Environment` says."""

    _calls: UserCalls
    _prompt: Prompt
    _game: Any

    async def state(self) -> str | None:
        """Return what the next move depends on; None: the class does not say it."""
        game = self._game
        return str(await self._calls.call(self._prompt, game.state)) if hasattr(game, "state") else None

    async def step(self, move: str) -> tuple[str, Mapping[str, float], bool]:
        """Return the observation after a move, its rewards by name, and whether the game is over."""
        step = self._game.step
        value = await self._calls.call(self._prompt, step, move)
        if not isinstance(value, tuple) or len(value) not in (3, 5) or not isinstance(value[0], str):
            raise self._calls.other_form(self._prompt, step, value, _STEP)
        observation, reward, *ends = value
        rewards = named_rewards(reward)
        if rewards is None:
            raise self._calls.other_form(self._prompt, step, value, "finite rewards: a number, or numbers by name")
        return observation, rewards, any(ends[:2])


class UserGames:
    """Begins games of the recipe's class."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """Import the class.

        Raises:
            ValueError: there is no such class, or it is no game.
        """
        self._make = load_game(config)
        self._calls = UserCalls(KEY, str(config.game), config.timeout_s)

    async def opened(self, task: Task) -> tuple[OpenGame, str]:
        """Return a separate game, and the text with which it begins, alone or as gymnasium gives it.

        Raises:
            EnvironmentFailed: it raised an error, took too long, or gave something else.
        """
        prompt, calls = task.prompt, self._calls
        game = await calls.call(prompt, self._make)
        value = await calls.call(prompt, game.reset, **row_arguments(game.reset, prompt, task.request.seed))
        text = value[0] if isinstance(value, tuple) and len(value) == 2 else value
        if text is not None and not isinstance(text, str):
            raise calls.other_form(prompt, game.reset, value, "a text, (text, info), or nothing")
        return OpenGame(calls, prompt, game), text or ""


class Game:
    """Plays games of a user's class (`Environment`), each episode with a separate object."""

    def __init__(self, config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Import the game.

        Raises:
            ValueError: there is no such class, or it is no game.
        """
        self._games = UserGames(config)
        self._config = config
        self._tokenizer = tokenizer

    async def run(self, task: Task, client: Client) -> Episode:
        """Play one game.

        Raises:
            EnvironmentFailed: the game raised an error, took too long, or returned something of another form.
        """
        prompt = task.prompt
        game, opening = await self._games.opened(task)
        transcript = Transcript(prompt.token_ids)
        transcript.given(self._encoded(opening))
        rewards: Counter[str] = Counter()
        moves: list[Move] = []
        reason: StopReason = "turns"
        for _ in range(self._config.max_turns):
            room = self._config.max_length - len(transcript)
            if room <= 0:
                reason = "context"
                break
            own = await game.state()
            state = transcript.state if own is None else own
            completion = await client.complete(transcript.token_ids, task.sampling.within(room))
            start = len(transcript)
            transcript.sampled(completion)
            [move] = decoded(self._tokenizer, [completion.token_ids])
            observation, reward, done = await game.step(move)
            rewards.update(reward)
            moves.append(Move(start, len(completion.token_ids), reward, state))
            if done:
                reason = "done"
                break
            transcript.given(self._encoded(observation))
        if not transcript.n_turns:
            raise ValueError(
                f"prompt {prompt.index + 1} and its opening have {len(transcript)} tokens, and an episode may have "
                f"environment.max_length={self._config.max_length}: raise it, or lower the data set's max_length"
            )
        trajectory = transcript.trajectory()
        effort = Effort(given=len(trajectory.mask_T) - int(trajectory.mask_T.sum()))
        return Episode((trajectory,), reason, dict(rewards), transcript.n_turns, moves, effort)

    def _encoded(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        return token_ids
