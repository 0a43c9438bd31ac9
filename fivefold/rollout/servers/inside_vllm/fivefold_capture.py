"""Runs inside vLLM's workers: records the experts of tokens in vLLM's second model runner.

It is on vLLM's path and `Worker` is vLLM's `--worker-cls`, so it imports nothing of Fivefold, which need not be
installed next to vLLM. `fivefold_routes` is the scheduler's part.

Symptom: with routes, a rollout of vLLM 0.25 takes half as long again.
Cause: vLLM before 0.28 records routes in its first model runner alone, whose tokens take more of the host's time. Its
    scheduler copies the blocks of each request before every step, and its routes after it.
Instead: the routers write the experts into a buffer on the device, in CUDA graphs too. Each step sends its rows with
    the places of its tokens in the cache of keys and values.
Remove this when vLLM 0.28 is the oldest that is supported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from fivefold_routes import attention_group
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker import gpu_worker

BYTE = 256
"""Experts that a byte tells apart."""


class Worker(gpu_worker.Worker):
    """vLLM's worker, whose outputs tell routes."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make room for keys and values, and watch the routers before CUDA graphs are captured.

        Raises:
            ValueError: a layer's routes cannot be recorded.
        """
        super().initialize_from_config(kv_cache_config)
        runner = self.model_runner
        layers = [module for module in runner.get_model().modules() if isinstance(module, MoERunner)]
        self.fivefold_rows = watch_routers(layers, runner.max_num_tokens, runner.device)
        self.fivefold_group = attention_group(kv_cache_config)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample the tokens of the step whose forward pass came last."""
        runner = self.model_runner
        step = runner.execute_model_state
        # All ranks of tensor parallelism choose the same experts; vLLM takes the first one's output.
        if step is None or get_tp_group().rank_in_group:
            return super().sample_tokens(grammar_output)
        n_tokens = step.input_batch.num_tokens
        slots = runner.block_tables.slot_mappings[self.fivefold_group, :n_tokens]
        # The next step overwrites them, perhaps before they are copied.
        tensors = [self.fivefold_rows[:n_tokens].clone(), slots.clone()]
        # vLLM takes the current stream for its main one when it is asked first, so ask before another is current.
        runner.output_copy_stream.wait_stream(runner.main_stream)
        with torch.cuda.stream(runner.output_copy_stream):
            copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        # What it copies on the same stream comes later, so that all have arrived once its own have.
        return WithRoutes(super().sample_tokens(grammar_output), tensors, copies)


class WithRoutes(AsyncModelRunnerOutput):
    """vLLM's output of a step, with the routes of its tokens."""

    def __init__(self, output: Any, tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
        """Hold vLLM's output.

        Args:
            output: vLLM's, which waits until its tensors are on the host.
            tensors: the rows [tokens, layers, top_k] and places [tokens], which must live until they are copied.
            copies: where they are copied to.
        """
        self._output, self._tensors, self._copies = output, tensors, copies

    def get_output(self) -> Any:
        """Wait for the output, and return it."""
        output = self._output.get_output()
        output.routed_experts = tuple(copy.numpy() for copy in self._copies)
        del self._tensors
        return output


def watch_routers(layers: Sequence[Any], most_tokens: int, device: torch.device) -> torch.Tensor:
    """Make the routers of a model write the experts of each forward pass into a buffer.

    Args:
        layers: vLLM's layers of experts.
        most_tokens: most tokens of a forward pass.
        device: the model's.

    Returns:
        The buffer, uint8 or int16 [most_tokens, layers up to the last one of experts, top_k].

    Raises:
        ValueError: there is no such layer, or a kernel chooses the experts itself.
    """
    if not layers:
        raise ValueError("vLLM's model has no layers of experts: set actor.router_replay to none")
    for layer in layers:
        if layer.is_monolithic:
            raise ValueError(
                f"vLLM computes {layer.layer_name} with a kernel that also chooses the experts, and tells no routes: "
                "give rollout.server_args another --moe-backend such as triton, or set actor.router_replay to "
                "old_logprobs"
            )
    routers = {layer.layer_id: layer.router for layer in layers}
    top_k = max(router.top_k for router in routers.values())
    dtype = torch.uint8 if max(router.global_num_experts for router in routers.values()) <= BYTE else torch.int16
    rows = torch.zeros((most_tokens, max(routers) + 1, top_k), dtype=dtype, device=device)
    for layer_id, router in routers.items():
        router.set_capture_fn(_writer(rows[:, layer_id]))
    return rows


def _writer(rows_NK: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def write(chosen_TK: torch.Tensor) -> None:
        rows_NK[: len(chosen_TK)] = chosen_TK

    return write
