"""Episodes whose environment fails: the driver plays them again elsewhere, or they leave their group."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fivefold.environments.environment import Client, Environment, Task
from fivefold.environments.own_time import SPENT, Spent
from fivefold.environments.user_code import EnvironmentFailed
from fivefold.types import Episode


@dataclass(frozen=True)
class Failing:
    """Plays episodes of an environment that may fail (`Environment`)."""

    environment: Environment

    async def run(self, task: Task, client: Client) -> Episode:
        """Play one episode; if its environment fails, it is one that has `failed`, and nothing of it is trained on."""
        spent = Spent()
        SPENT.set(spent)  # an episode is a separate task of the event loop
        try:
            episode = await self.environment.run(task, client)
        except EnvironmentFailed as failure:
            print(failure, flush=True)
            return Episode.failed(task.prompt, str(failure))
        return replace(episode, effort=replace(episode.effort, seconds=spent.seconds))
