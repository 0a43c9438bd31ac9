"""Runs inside vLLM's workers: gives layers that draft tokens their weights, and keeps these while the server sleeps.

It imports nothing of Fivefold, as `fivefold_weights`, which uses it.

Symptom: no drafted token is accepted in a server whose weights come from a trainer.
Cause: vLLM 0.25 gives weights that arrive to its model alone. The model that drafts has the random weights of
    `--load-format dummy`, and has none any more after a sleep of level 2.
Instead: its tensors are read once from the model's files, and copied back from host memory after each sleep.
Remove this when both model runners of vLLM read them with a separate load format, and keep them asleep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def load_draft(runner: Any, files: dict[str, list[str]]) -> None:
    """Load the model that drafts tokens from files, as vLLM loads weights that arrive.

    The embedding and the output layer, which are the target model's, stay as they are.

    Args:
        runner: vLLM's model runner, either of the two.
        files: names of tensors in safetensors files, by the files' paths.

    Raises:
        RuntimeError: some of its parameters are not among the tensors.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    draft = draft_of(runner)
    if draft is None:
        return
    shared = _places(runner.get_model())
    own = {name for name, parameter in draft.named_parameters() if _place(parameter) not in shared}
    with torch.inference_mode():
        initialize_layerwise_reload(draft)
        loaded = draft.load_weights(read_tensors(files))
        finalize_layerwise_reload(draft, runner.speculative_config.draft_model_config)
    if missing := sorted(own - loaded):
        raise RuntimeError(
            f"vLLM's {type(draft).__name__} got no weights for {missing[0]} and {len(missing) - 1} more parameters "
            f"from {', '.join(files)}: drop rollout.speculative, or name a folder with all of them"
        )


def read_tensors(files: dict[str, list[str]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of safetensors files, whose names are by the files' paths."""
    from safetensors import safe_open

    for path, names in files.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                yield name, file.get_tensor(name)


def draft_of(runner: Any) -> Any:
    """Return the model that drafts tokens; None: another pipeline stage has it."""
    # The first model runner calls what holds it a drafter, and the second one a speculator.
    holder = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    if holder is None:
        return None
    # CUDA graphs that can be broken wrap the model.
    return getattr(holder.model, "runnable", holder.model)


def keep_asleep(worker: Any, find: Callable[[Any], list[torch.Tensor]]) -> None:
    """Make vLLM's worker copy tensors to host memory at its first sleep, and back when it wakes.

    Args:
        worker: vLLM's worker.
        find: returns tensors of its model runner. Several calls keep several functions' tensors.
    """
    if hasattr(worker, "fivefold_kept"):
        worker.fivefold_kept[find] = None
        return
    worker.fivefold_kept = {find: None}
    worker.fivefold_sleep, worker.fivefold_wake_up = worker.sleep, worker.wake_up
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def sleep(level: int = 1) -> None:
        if not copies:
            kept = [tensor for find in worker.fivefold_kept for tensor in find(worker.model_runner)]
            copies.extend((tensor, tensor.to("cpu", copy=True)) for tensor in kept)
        worker.fivefold_sleep(level)

    def wake_up(tags: list[str] | None = None) -> None:
        worker.fivefold_wake_up(tags)
        if tags is None or "weights" in tags:
            with torch.inference_mode():
                for tensor, copy in copies:
                    tensor.copy_(copy)

    worker.sleep, worker.wake_up = sleep, wake_up


def own_tensors(runner: Any) -> list[torch.Tensor]:
    """Return the tensors of the draft model that are not the target model's, each once.

    Some modules keep tensors that are neither parameters nor buffers, such as the matrices of latent attention.
    """
    draft, shared = draft_of(runner), _places(runner.get_model())
    own = {} if draft is None else {_place(tensor): tensor for tensor in tensors_of(draft)}
    return [tensor for place, tensor in own.items() if place not in shared]


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _places(model: Any) -> set[tuple[int, int]]:
    return {_place(tensor) for tensor in tensors_of(model)}


def tensors_of(model: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model and its modules."""
    for module in model.modules():
        own = {**vars(module), **module._buffers, **module._parameters}
        own.pop("kv_cache", None)  # vLLM frees it asleep and maps it again later than the weights
        yield from (value for value in own.values() if isinstance(value, torch.Tensor) and value.numel())
