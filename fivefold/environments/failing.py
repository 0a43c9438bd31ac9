"""Episodes whose environment fails: they are played again, and leave their group if that does not help."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.environments.environment import Client, Environment, Task
from fivefold.environments.user_code import EnvironmentFailed
from fivefold.types import Episode


@dataclass(frozen=True)
class Failing:
    """Plays each episode of an environment up to `retries` more times (`Environment`)."""

    environment: Environment
    retries: int

    async def run(self, task: Task, client: Client) -> Episode:
        """Play one episode; nothing of an attempt that failed is trained on.

        If the last attempt fails too, the episode is one that has `failed`.
        """
        attempt = 0
        while True:
            try:
                return await self.environment.run(task, client)
            except EnvironmentFailed as failure:
                if attempt == self.retries:
                    print(f"{failure}\nThe episode has failed, and leaves its group", flush=True)
                    return Episode.failed(task.prompt, str(failure))
                attempt += 1
                print(f"{failure}\nThe episode is played again ({attempt} of {self.retries} times)", flush=True)
