"""verifiers: tasks of its tasksets, each run by a harness that asks the model.

{"prompt": "2+3?", "extra_info": {"taskset": "my-sums", "options": "{}", "task": "{...}", "harness": "my-harness"}, ...}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from fivefold.environments.others.package import imported

vf = imported("verifiers.v1", "verifiers")


def rows(taskset: str, n: int, *, harness: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Yield tasks as rows in verl's schema.

    Args:
        taskset: package of a taskset, installed or in the working folder.
        n: most rows; a taskset may have fewer tasks.
        harness: package of the harness that runs the tasks.
        options: fields of the taskset's configuration.
    """
    for index, task in enumerate(islice(vf.load_taskset(_config(taskset, options)), n)):
        data = task.data
        # The harness asks for what the task says; this prompt only names it, in samples and messages.
        prompt = data.prompt if isinstance(data.prompt, str) and data.prompt else f"{taskset}, task {index + 1}"
        yield {
            "data_source": taskset,
            "prompt": prompt,
            "ability": "agent",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {
                "taskset": taskset,
                "options": json.dumps(options, sort_keys=True),
                "task": data.model_dump_json(exclude_none=True),
                "harness": harness,
            },
        }


async def solve(base_url: str, model: str, extra_info: Mapping[str, Any]) -> dict[str, float]:
    """Run the task of the row, and return its rewards by name, each times its weight.

    Raises:
        RuntimeError: the harness or the task failed.
    """
    trace = await vf.make_agent(_agent(base_url, model, extra_info["harness"])).run(_task(extra_info))
    if not trace.ok:
        raise RuntimeError("\n".join(f"{error.type}: {error.message}" for error in trace.errors))
    return {name: float(reward.value) for name, reward in trace.rewards.items() if reward is not None}


def _agent(base_url: str, model: str, harness: str) -> Any:
    return vf.AgentConfig(
        model=model,
        # The address is the secret. The key of the default would be one of another service.
        client=vf.EvalClientConfig(base_url=base_url, api_key_var="FIVEFOLD_NEEDS_NO_KEY"),
        harness={"id": harness},
        runtime=vf.SubprocessConfig(),
    )


def _task(extra_info: Mapping[str, Any]) -> Any:
    """Return the task of a row; its taskset is not loaded again."""
    kind = vf.task_type(extra_info["taskset"])
    config = _config(extra_info["taskset"], json.loads(extra_info["options"]))
    return kind(kind.data_type().model_validate_json(extra_info["task"]), config.task)


def _config(taskset: str, options: Mapping[str, Any]) -> Any:
    return vf.taskset_config_type(taskset)(id=taskset, **options)
