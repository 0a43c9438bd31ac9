"""The environment of plain prompts: one completion is the whole episode."""

from __future__ import annotations

from fivefold.environments.environment import Client, Task
from fivefold.types import Episode


class SingleTurn:
    """Asks once and stops."""

    async def run(self, task: Task, client: Client) -> Episode:
        """Return the prompt with its completion as an episode of one sequence."""
        completion = await client.complete(task.request.token_ids)
        return Episode.single_turn(task.prompt, completion, task.images)
