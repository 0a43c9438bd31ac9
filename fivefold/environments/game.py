"""Games: the text of each completion is a move, and what the game answers is read before the next one.

    reset(...)           optional text that goes to the end of the prompt
    step(move)           (observation, reward, done)
    state()              optional: what the next move depends on, for credit by state

As tokens, without a chat template:  prompt  opening | move | observation | move ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.environments.environment import Client, Task
from fivefold.environments.given_rewards import named_rewards
from fivefold.environments.transcript import Transcript
from fivefold.environments.user_code import UserCalls, load_class, row_arguments
from fivefold.rollout.tokenizer import decoded
from fivefold.types import Episode, Move, Prompt, StopReason

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


class Game:
    """Plays games of a user's class (`Environment`), each episode with a separate object."""

    def __init__(self, config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Import the game.

        Raises:
            ValueError: there is no such class, or it is no game.
        """
        self._make = load_game(config)
        self._config = config
        self._tokenizer = tokenizer
        self._calls = UserCalls(KEY, str(config.game), config.timeout_s)

    async def run(self, task: Task, client: Client) -> Episode:
        """Play one game.

        Raises:
            EnvironmentFailed: the game raised an error, took too long, or returned something of another form.
        """
        prompt, call = task.prompt, self._calls.call
        game = await call(prompt, self._make)
        opening = await call(prompt, game.reset, **row_arguments(game.reset, prompt, task.request.seed))
        transcript = Transcript(prompt.token_ids)
        transcript.given(self._encoded(opening_of(self._calls, prompt, game.reset, opening)))
        rewards: Counter[str] = Counter()
        moves: list[Move] = []
        reason: StopReason = "turns"
        for _ in range(self._config.max_turns):
            room = self._config.max_length - len(transcript)
            if room <= 0:
                reason = "context"
                break
            state = str(await call(prompt, game.state)) if hasattr(game, "state") else transcript.state
            completion = await client.complete(transcript.token_ids, task.sampling.within(room))
            start = len(transcript)
            transcript.sampled(completion)
            [move] = decoded(self._tokenizer, [completion.token_ids])
            answer = await call(prompt, game.step, move)
            observation, reward, done = step_of(self._calls, prompt, game.step, answer)
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
        return Episode((transcript.trajectory(),), reason, dict(rewards), transcript.n_turns, moves)

    def _encoded(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        return token_ids


def opening_of(calls: UserCalls, prompt: Prompt, reset: Callable[..., Any], value: object) -> str:
    """Return the text that `reset` gives, alone or as gymnasium does.

    Raises:
        EnvironmentFailed: it gave something else.
    """
    text = value[0] if isinstance(value, tuple) and len(value) == 2 else value
    if text is not None and not isinstance(text, str):
        raise calls.other_form(prompt, reset, value, "a text, (text, info), or nothing")
    return text or ""


def step_of(
    calls: UserCalls, prompt: Prompt, step: Callable[..., Any], value: Any
) -> tuple[str, Mapping[str, float], bool]:
    """Return the observation of a step, its rewards by name, and whether the game is over.

    Raises:
        EnvironmentFailed: it returned something else.
    """
    if not isinstance(value, tuple) or len(value) not in (3, 5) or not isinstance(value[0], str):
        raise calls.other_form(prompt, step, value, _STEP)
    observation, reward, *ends = value
    rewards = named_rewards(reward)
    if rewards is None:
        raise calls.other_form(prompt, step, value, "finite rewards: a number, or numbers by name")
    return observation, rewards, any(ends[:2])
