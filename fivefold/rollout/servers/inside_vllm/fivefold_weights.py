"""Runs inside vLLM's workers: loads the weights of experts together, and tells a checksum of the weights that arrive.

It is on vLLM's path and its class is vLLM's `--worker-extension-cls`, so it imports nothing of Fivefold, which need not
be installed beside vLLM. The checksum is that of `fivefold.sync.device_buckets.checksum`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Weights = Iterable[tuple[str, torch.Tensor]]


class WorkerWeights:
    """Methods that vLLM adds to its worker's own."""

    model_runner: Any

    def fivefold_stack_experts(self) -> None:
        """Load the weights of experts together from now on."""
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        stack_experts(RoutedExperts)

    def fivefold_watch_weights(self) -> None:
        """Begin to look at the weights that the model loads."""
        model, self.fivefold_checksum = self.model_runner.get_model(), 0
        if hasattr(model, "fivefold_load_weights"):
            return
        model.fivefold_load_weights = model.load_weights

        def load_weights(weights: Weights, *args: Any, **kwargs: Any) -> Any:
            return model.fivefold_load_weights(self._fivefold_seen(weights), *args, **kwargs)

        model.load_weights = load_weights

    def _fivefold_seen(self, weights: Weights) -> Weights:
        for name, tensor in weights:
            whole = tensor.reshape(-1).view(INTEGERS[tensor.dtype.itemsize]).sum(dtype=torch.int64)
            self.fivefold_checksum += (1 + zlib.crc32(name.encode())) * int(whole)
            yield name, tensor

    def fivefold_weight_checksum(self) -> str:
        """Return the checksum of what arrived since `fivefold_watch_weights`."""
        return str(self.fivefold_checksum % 2**61)


def stack_experts(layer_class: Any) -> None:
    """Make vLLM's class of expert layers give all experts' tensors of one projection to its loader at once.

    Symptom: vLLM 0.25 takes 0.35 ms for each tensor of an update, 7 s for the 18,867 of Qwen3-30B-A3B.
    Cause: it compares each name with those of all experts' tensors, binds the arguments of each parameter's loader to
        its signature, and runs the loader twice, once to count what it copies.
    Instead: a projection's tensors are collected, stacked, and loaded as one of shape [experts, rows, columns], which
        the loader takes as well. Layers that hold some of the experts only, or quantized ones, load as before.
    Remove this when vLLM's own update of such a model takes no more than twice as long as this one.
    """
    if hasattr(layer_class, "fivefold_load_weights"):
        return
    layer_class.fivefold_load_weights = layer_class.load_weights

    def load_weights(layer: Any, weights: Weights) -> Iterator[str]:
        if not _is_plain(layer):
            yield from layer.fivefold_load_weights(weights)
            return
        yield from layer.fivefold_load_weights(_without_experts(layer, weights))
        yield from _load_stacked(layer)

    layer_class.load_weights = load_weights


def _is_plain(layer: Any) -> bool:
    """Return whether the layer holds every expert once, as the trainer has it."""
    config = layer.moe_config
    return (
        type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod"
        and not config.moe_parallel_config.use_ep
        and config.num_experts == config.num_logical_experts
        and layer.expert_map_manager.num_fused_shared_experts == 0
    )


def _without_experts(layer: Any, weights: Weights) -> Weights:
    """Keep the experts' tensors, which buckets may end between, with the layer, and yield what else there is."""
    shards = {layer.ckpt_gate_proj_name: "w1", layer.ckpt_down_proj_name: "w2", layer.ckpt_up_proj_name: "w3"}
    held = layer.__dict__.setdefault("fivefold_held", {"w1": {}, "w2": {}, "w3": {}})
    for name, tensor in weights:
        expert = re.fullmatch(r"(\d+)\.(\w+)\.weight", name)
        if expert is None or expert[2] not in shards:
            yield name, tensor
        else:
            held[shards[expert[2]]][int(expert[1])] = tensor


def _load_stacked(layer: Any) -> Iterator[str]:
    """Load each projection of which all experts have arrived. Yields the parameter's name."""
    n_experts = layer.moe_config.num_logical_experts
    for shard, tensors in layer.fivefold_held.items():
        if len(tensors) < n_experts:
            continue
        stacked = torch.stack([tensors[expert] for expert in range(n_experts)])
        tensors.clear()
        name = "w2_weight" if shard == "w2" else "w13_weight"
        parameter = getattr(layer, name)
        parameter.weight_loader(
            param=parameter,
            loaded_weight=stacked,
            weight_name=f"{layer.layer_name}.{name}",
            shard_id=shard,
            expert_id=0,
            return_success=True,
        )
        yield name
