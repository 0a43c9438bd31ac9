"""Runs inside vLLM's workers: gives the tower that sees images its weights.

It imports nothing of Fivefold, as `fivefold_weights`, which uses it.

Symptom: completions have nothing to do with the images, in a server whose weights come from a trainer.
Cause: the tower is not trained, so no update brings it. It has the random weights of `--load-format dummy`, and has
    none any more after a sleep of level 2. The buffers in which vLLM passes features to the first layers, zeros between
    two steps, have any values after a sleep.
Instead: the tower's tensors are read once from the model's files, and copied back from host memory after each sleep.
Remove this when vLLM reads the weights of a part with a separate load format, and keeps them asleep.
"""

from __future__ import annotations

from typing import Any

import torch
from fivefold_draft import read_tensors, tensors_of

TOWER = "visual"
"""The tower's name in vLLM's models."""
FEATURES = "deepstack_input_embeds"
"""The list of buffers of features, in models that have some."""


def load_tower(runner: Any, files: dict[str, list[str]]) -> None:
    """Load the tower from files, as vLLM loads weights that arrive.

    Args:
        runner: vLLM's model runner, either of the two.
        files: names of tensors in safetensors files, by the files' paths.

    Raises:
        RuntimeError: the model has no tower, or some of its parameters are not among the tensors.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = runner.get_model()
    tower = getattr(model, TOWER, None)
    if tower is None:
        raise RuntimeError(f"vLLM's {type(model).__name__} has no tower that sees images: use another rollout.backend")
    own = {f"{TOWER}.{name}" for name, _ in tower.named_parameters()}
    with torch.inference_mode():
        initialize_layerwise_reload(tower)
        loaded = model.load_weights(read_tensors(files))
        finalize_layerwise_reload(tower, runner.model_config)
    if missing := sorted(own - set(loaded)):
        raise RuntimeError(
            f"vLLM's {type(model).__name__} got no weights for {missing[0]} and {len(missing) - 1} more parameters of "
            f"its tower from {', '.join(files)}: name a folder with all of them"
        )


def tower_tensors(runner: Any) -> list[torch.Tensor]:
    """Return the tower's tensors, which no update brings."""
    return list(tensors_of(getattr(runner.get_model(), TOWER)))


def features(runner: Any) -> list[torch.Tensor]:
    """Return the buffers of features, which prompts without images read too; none if the model has none."""
    return list(getattr(runner.get_model(), FEATURES, ()))
