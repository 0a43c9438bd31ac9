"""Runs inside vLLM's workers: loads in place what an update would lose, and ends a first update that loses something.

It imports nothing of Fivefold, as `fivefold_weights`, which uses it.

Symptom: an update of MiniMax-M2 ends with "'functools.partial' object has no attribute '__name__'".
Cause: vLLM 0.25 recognizes its own loaders by their names, and the norms over all heads have partials, which have none.
Instead: loaders without a name get one.
Remove this when an update of MiniMax-M2 in vLLM works without it.

Symptom: the experts, their biases and the attention sinks of GPT-OSS keep the random weights of `--load-format dummy`.
    vLLM 0.25 warns "Failed to load weights", and generates with them.
Cause: an update puts parameters on the meta device until their loaders have seen every tensor. GPT-OSS's model copies
    some tensors without a loader, so that they are lost.
Instead: those layers get their tensors back before anything arrives. A layer of any model that a server with random
    weights has got no weights for is an error.
Remove the first part when the oldest release that is admitted loads in place (`LayerReloadingInfo.runtime_bound`), and
    the second when vLLM raises.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

COPIED = ("GptOssForCausalLM",)
"""Models that copy tensors into parameters."""
NOT_SENT = ("indexer", "visual")
"""Parts of the names of layers that no trainer sends: they change nothing as long as attention is dense, or a server
gets no images; `fivefold_tower` loads what sees them."""


def guard_updates(engine: Any, model: Any, layerwise: Any, *, is_random: bool) -> None:
    """Make vLLM's updates keep all weights.

    Args:
        engine: what receives weights in vLLM's worker.
        model: vLLM's model.
        layerwise: vLLM's module `model_loader.reload.layerwise`.
        is_random: whether the model's weights were random at the start, so that the first update brings all.
    """
    if hasattr(engine, "fivefold_start"):
        return
    engine.fivefold_start, engine.fivefold_finish = engine.start_weight_update, engine.finish_weight_update
    layerwise._get_weight_loader = partial(_named, layerwise._get_weight_loader)
    is_first = is_random

    def start_weight_update(*args: Any, **kwargs: Any) -> None:
        engine.fivefold_start(*args, **kwargs)
        if type(model).__name__ in COPIED:
            for layer in filter(_is_copied_into, model.modules()):
                info = layerwise.get_layerwise_info(layer)
                if info.can_load():
                    layerwise._place_kernel_tensors(layer, info)
                    info.reset()

    def finish_weight_update(*args: Any, **kwargs: Any) -> None:
        nonlocal is_first
        lost = lost_layers(model, layerwise) if is_first else []
        engine.fivefold_finish(*args, **kwargs)
        if lost:
            raise RuntimeError(
                f"vLLM's {type(model).__name__} took none of the weights of {lost[0]}"
                + (f" and {len(lost) - 1} more layers" if len(lost) > 1 else "")
                + ", which stay random: use another rollout.backend for this model"
            )
        is_first = False

    engine.start_weight_update, engine.finish_weight_update = start_weight_update, finish_weight_update


def lost_layers(model: Any, layerwise: Any) -> list[str]:
    """Return the names of the layers with parameters for which an update that ends now has brought nothing."""
    waiting, loaded = {}, set()
    for name, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        parameters = info.kernel_tensors[0] if info.can_load() else dict(layer.named_parameters(recurse=False))
        places = {parameter.data_ptr() for parameter in parameters.values()}
        if info.can_load() and info.load_numel == 0:
            waiting[name] = places
        else:
            loaded |= places
    # The output layer may have the embedding's parameter.
    return [name for name, places in waiting.items() if places - loaded and not any(part in name for part in NOT_SENT)]


def _named(loader_of: Callable[[Any], Any], parameter: Any) -> Any:
    loader = loader_of(parameter)
    if not hasattr(loader, "__name__"):
        loader.__name__ = type(loader).__name__
    return loader


def _is_copied_into(layer: Any) -> bool:
    experts = type(getattr(layer, "quant_method", None)).__name__ == "UnquantizedFusedMoEMethod"
    return experts or "sinks" in layer._parameters
