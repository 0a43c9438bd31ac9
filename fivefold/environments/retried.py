"""Episodes that are played again when their environment has failed."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.environments.environment import Client, Environment, Task
from fivefold.environments.user_code import EnvironmentFailed
from fivefold.types import Episode


@dataclass(frozen=True)
class Retried:
    """Plays each episode of an environment up to `retries` more times."""

    environment: Environment
    retries: int

    async def run(self, task: Task, client: Client) -> Episode:
        """Play one episode; nothing of an attempt that failed is trained on.

        Raises:
            EnvironmentFailed: the last attempt has failed too.
        """
        for attempt in range(1, self.retries + 1):
            try:
                return await self.environment.run(task, client)
            except EnvironmentFailed as failure:
                print(f"{failure}\nThe episode is played again ({attempt} of {self.retries} times)", flush=True)
        return await self.environment.run(task, client)
