"""The environment of plain prompts: one completion is the whole episode."""

from __future__ import annotations

from fivefold.environments.environment import Client, Task
from fivefold.types import Episode


class SingleTurn:
    """Asks once and stops."""

    async def run(self, task: Task, client: Client) -> Episode:
        """Return the prompt with its completion as an episode of one sequence."""
        token_ids = task.request.token_ids
        sampling = None if task.sampling.max_tokens is None else task.sampling.after(len(token_ids))
        completion = await client.complete(token_ids, sampling)
        return Episode.single_turn(task.prompt, completion, task.images)
