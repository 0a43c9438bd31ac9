"""Runs inside vLLM's workers: loads weights in few steps, and tells a checksum of those that arrive.

It also tells which adapters have no layer.

It is on vLLM's path and its class is vLLM's `--worker-extension-cls`. It imports nothing of Fivefold, which vLLM's
environment may lack. The checksum is the same as `fivefold.weights.device_buckets.checksum`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from fivefold_draft import keep_asleep, load_draft, own_tensors
from fivefold_reload import guard_updates
from fivefold_tower import features, load_tower, tower_tensors

_EXPERT = re.compile(r"(.+)\.(\d+)\.(\w+)\.weight")
"""Name of an expert's tensor: the layer's, the expert's number, the projection's."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Weights = Iterable[tuple[str, torch.Tensor]]
Held = dict[tuple[str, str], dict[str, torch.Tensor]]
"""Tensors of experts by their layer and projection, and by the expert's number."""


class WorkerWeights:
    """Methods that vLLM adds to its worker's own."""

    model_runner: Any
    weight_transfer_engine: Any
    vllm_config: Any

    def fivefold_guard_updates(self) -> None:
        """Keep what vLLM would lose of an update, and end a first update that leaves random weights."""
        from vllm.model_executor.model_loader.reload import layerwise

        is_random = self.vllm_config.load_config.load_format == "dummy"
        guard_updates(self.weight_transfer_engine, self.model_runner.get_model(), layerwise, is_random=is_random)

    def fivefold_load_faster(self) -> None:
        """Spend little time on each tensor of an update from now on."""
        from vllm.distributed.weight_transfer import ipc_engine
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        load_experts_together(self.model_runner.get_model(), RoutedExperts)
        open_whole_buffers(ipc_engine)

    def fivefold_unused_adapters(self) -> list[str]:
        """Return the names of the adapters, of those that came last, for which this worker has no layer.

        vLLM drops them and says nothing.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        return [name for adapters in manager.list_adapters().values() for name in unused(adapters.loras, manager)]

    def fivefold_load_draft(self, files: dict[str, list[str]]) -> None:
        """Load the weights that draft tokens, and keep them from now on.

        Args:
            files: names of tensors in safetensors files, by the files' paths.
        """
        load_draft(self.model_runner, files)
        keep_asleep(self, own_tensors)

    def fivefold_load_tower(self, files: dict[str, list[str]]) -> None:
        """Load the weights of the tower that sees images, and keep them from now on.

        Args:
            files: names of tensors in safetensors files, by the files' paths.
        """
        load_tower(self.model_runner, files)
        keep_asleep(self, tower_tensors)

    def fivefold_keep_features(self) -> None:
        """Keep the buffers of features of images, zeros without any, while the server sleeps."""
        if features(self.model_runner):
            keep_asleep(self, features)

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


def load_experts_together(model: Any, layer_class: Any) -> None:
    """Make the model's loader give all experts' tensors of one projection to vLLM's parameter at once.

    Symptom: vLLM 0.25 takes 0.35 ms for each tensor of an update, 7 s for the 18,867 of Qwen3-30B-A3B.
    Cause: it passes each through five generators, compares its name with all experts' tensors, binds the
        arguments of each parameter's loader to its signature, and runs the loader twice, once to count what it copies.
    Instead: a projection's tensors are collected, stacked, and loaded as one of shape [experts, rows, columns], which
        the loader takes as well. Layers that hold some of the experts only, or quantized ones, load as before.
    Remove this when vLLM's own update of such a model takes no more than twice as long as this one.

    Args:
        model: vLLM's model.
        layer_class: the class of its layers of experts, whose `layer_name` begins their tensors' names in files.
    """
    if hasattr(model, "fivefold_load_others"):
        return
    layers = {
        layer.layer_name: layer for layer in model.modules() if isinstance(layer, layer_class) and _is_plain(layer)
    }
    held: Held = {}
    model.fivefold_load_others = model.load_weights

    def load_weights(weights: Weights, *args: Any, **kwargs: Any) -> set[str]:
        loaded = set(model.fivefold_load_others(_without_experts(layers, held, weights), *args, **kwargs))
        return loaded.union(_load_stacked(layers, held))

    model.load_weights = load_weights


def _is_plain(layer: Any) -> bool:
    """Return whether the layer holds every expert once, as the trainer has it."""
    config = layer.moe_config
    return (
        type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod"
        and not config.moe_parallel_config.use_ep
        and config.num_experts == config.num_logical_experts
        and layer.expert_map_manager.num_fused_shared_experts == 0
    )


def _without_experts(layers: dict[str, Any], held: Held, weights: Weights) -> Weights:
    """Keep the experts' tensors, between which buckets may end, by layer and projection; yield what else there is."""
    for name, tensor in weights:
        expert = _EXPERT.fullmatch(name)
        if expert is None or expert[1] not in layers:
            yield name, tensor
        else:
            layer, number, projection = expert.groups()
            # What an update left that ended early is overwritten, because all have one order.
            held.setdefault((layer, projection), {})[number] = tensor


def _load_stacked(layers: dict[str, Any], held: Held) -> Iterator[str]:
    """Load each projection whose experts have all arrived. Yields the parameter's name."""
    for name, projection in list(held):
        layer, tensors = layers[name], held[name, projection]
        n_experts = layer.moe_config.num_logical_experts
        if len(tensors) < n_experts:
            continue
        stacked = torch.stack([tensors[str(expert)] for expert in range(n_experts)])
        del held[name, projection], tensors
        names = {layer.ckpt_gate_proj_name: "w1", layer.ckpt_down_proj_name: "w2", layer.ckpt_up_proj_name: "w3"}
        shard = names[projection]
        kind = "w2_weight" if shard == "w2" else "w13_weight"
        parameter = getattr(layer, kind)
        parameter.weight_loader(
            param=parameter,
            loaded_weight=stacked,
            weight_name=f"{name}.{kind}",
            shard_id=shard,
            expert_id=0,
            return_success=True,
        )
        yield f"{name}.{kind}"


def open_whole_buffers(engine: Any) -> None:
    """Make vLLM copy a buffer that it opens by CUDA IPC at once.

    Symptom: vLLM 0.25 takes 40 us for each tensor of a buffer before its model sees them.
    Cause: it copies each tensor into separate memory.
    Instead: one copy of the buffer, whose parts are the tensors.
    Remove this as `load_experts_together`.

    Args:
        engine: vLLM's module that opens such buffers.
    """
    if hasattr(engine, "fivefold_open"):
        return
    engine.fivefold_open = engine.packed_ipc_consumer

    def opened(
        ipc_handle: Any, names: list[str], shapes: list[list[int]], dtype_names: list[str], tensor_sizes: list[int],
        device_index: int,
    ) -> list[tuple[str, torch.Tensor]]:  # fmt: skip
        total = sum(tensor_sizes)
        [(_, flat)] = engine.fivefold_open(ipc_handle, ["buffer"], [[total]], ["uint8"], [total], device_index)
        parts = flat.split(tensor_sizes)
        dtypes = [getattr(torch, dtype) for dtype in dtype_names]
        return [
            (name, part.view(dtype).view(shape))
            for name, shape, dtype, part in zip(names, shapes, dtypes, parts, strict=True)
        ]

    engine.packed_ipc_consumer = opened


def unused(adapters: Iterable[str], manager: Any) -> list[str]:
    """Return which names of adapters belong to no layer.

    Args:
        adapters: names as vLLM keeps them: of a layer, or of the layer in which vLLM computes several.
        manager: vLLM's manager of the adapters in its model.
    """
    return [name for name in adapters if name not in manager.modules]
