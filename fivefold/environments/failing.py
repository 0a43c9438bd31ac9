"""Episodes whose environment fails: the driver plays them again elsewhere, or they leave their group."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.environments.environment import Client, Environment, Task
from fivefold.environments.user_code import EnvironmentFailed
from fivefold.types import Episode


@dataclass(frozen=True)
class Failing:
    """Plays episodes of an environment that may fail (`Environment`)."""

    environment: Environment

    async def run(self, task: Task, client: Client) -> Episode:
        """Play one episode; if its environment fails, it is one that has `failed`, and nothing of it is trained on."""
        try:
            return await self.environment.run(task, client)
        except EnvironmentFailed as failure:
            print(failure, flush=True)
            return Episode.failed(task.prompt, str(failure))
