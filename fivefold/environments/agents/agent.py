"""Agents: a user's function that asks the model through a URL, and returns the reward of its episode."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.config.user_code import load_user_object
from fivefold.environments.agents.parsing import load_parser
from fivefold.environments.agents.server import SessionServer
from fivefold.environments.agents.session import MODEL, Session
from fivefold.environments.environment import Client, Task
from fivefold.environments.given_rewards import in_the_end, named_rewards
from fivefold.environments.own_time import OwnTime
from fivefold.environments.user_code import EnvironmentFailed, UserCalls, row_arguments
from fivefold.types import ENVIRONMENT, Episode, Prompt, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "environment.agent"


def load_agent(name: str) -> Callable[..., Any]:
    """Import the recipe's agent.

    Raises:
        ValueError: there is no such function, or it does not take `base_url`.
    """
    found = load_user_object(KEY, name)
    if not callable(found) or inspect.isclass(found):
        raise ValueError(f"{KEY}={name!r} is a {type(found).__name__}: name a function")
    agent: Callable[..., Any] = found
    arguments = {**row_arguments(agent, Prompt(0, "", (0,), ""), 0), **_address(agent, "")}
    try:
        inspect.signature(agent).bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"{KEY}={name!r} has the signature {inspect.signature(agent)}, and cannot be called with base_url, "
            f"api_key, model and the values of a row: {error}. See docs/agents.md"
        ) from error
    if "base_url" not in arguments:
        raise ValueError(f"{KEY}={name!r} must take base_url, the address of the model")
    return agent


def _address(agent: Callable[..., Any], base_url: str) -> dict[str, str]:
    """Return where the agent finds the model, as far as it has arguments for that."""
    parameters = inspect.signature(agent).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    # The URL is the secret; clients refuse to be without a key.
    values = {"base_url": base_url, "api_key": "in-the-url", "model": MODEL}
    return {name: value for name, value in values.items() if takes_all or name in parameters}


class Agent:
    """Runs a user's agent (`Environment`), each episode with a separate session."""

    def __init__(self, config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Import the agent, and start the server of sessions.

        Raises:
            ValueError: there is no such function, or a package is missing.
        """
        assert config.agent is not None
        self._agent = load_agent(config.agent)
        self._config = config
        self._tokenizer = tokenizer
        self._parser = load_parser(config.parser, tokenizer)
        self._calls = UserCalls(KEY, config.agent, config.timeout_s)
        self._server = SessionServer()
        # Not the player's loop, which runs between two slices of the engine: clients would wait for it.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()

    async def run(self, task: Task, client: Client) -> Episode:
        """Run the agent once.

        Raises:
            EnvironmentFailed: the agent raised an error though no limit was reached, asked nothing, or returned
                something else than rewards.
        """
        own = OwnTime(self._config.timeout_s)
        session = Session(task, client, self._tokenizer, self._config, self._parser)
        base_url = self._server.open(session, own)
        reason: StopReason = "done"
        arguments = row_arguments(self._agent, task.prompt, task.request.seed) | _address(self._agent, base_url)
        try:
            rewards = self._rewards(task.prompt, await self._result(own, task.prompt, arguments), session)
        except EnvironmentFailed as failure:
            if failure.is_late:
                reason = "time"
            elif session.ended_by is None:
                raise
            rewards = [{ENVIRONMENT: 0.0}]
        finally:
            self._server.close(base_url)
            session.close()
        if not session.tree.turns:
            raise self._calls.failed(task.prompt, self._agent, "asked the model for nothing that was answered")
        return session.episode(reason, in_the_end(rewards, len(session.tree.turns)))

    async def _result(self, own: OwnTime, prompt: Prompt, arguments: Mapping[str, Any]) -> Any:
        """Return what the agent returns; a coroutine runs in the agents' own loop."""
        call = self._calls.timed(own, prompt, self._agent, **arguments)
        work = asyncio.run_coroutine_threadsafe(call, self._loop)
        return await asyncio.wrap_future(work)

    def _rewards(self, prompt: Prompt, value: Any, session: Session) -> list[Mapping[str, float]]:
        """Return what the agent returned as the rewards of its last turns."""
        n, given = len(session.tree.turns), value if isinstance(value, list) else [value]
        found = [named_rewards(each) for each in given]
        if not all(found) or (isinstance(value, list) and len(value) != n):
            wanted = f"a finite reward, finite rewards by name, or a list of these for each of its {n} turns"
            raise self._calls.other_form(prompt, self._agent, value, wanted)
        return [each for each in found if each]
