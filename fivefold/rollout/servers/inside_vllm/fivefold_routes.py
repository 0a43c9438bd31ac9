"""Runs inside vLLM's engine: keeps the routes that `fivefold_capture` sends, and gives each request its own.

It is on vLLM's path, so it imports nothing of Fivefold, which need not be installed next to vLLM.

    step's rows ──> by place in the cache of keys and values ──> a request's rows, once, when it ends

A place's row is as valid as its keys and values: blocks that requests share, or find in the cache of prefixes, have the
routes with which they were computed. A request that is preempted loses its blocks, and keeps what is known by then,
because a token has the experts with which it was computed first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from fivefold_scheduler import is_read_at_its_end
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

Rows = npt.NDArray[Any]
"""Routes [tokens, layers, top_k]."""


class RoutesBySlot:
    """What is added to vLLM's scheduler, before `EndsWhole`."""

    requests: dict[str, Any]
    kv_cache_manager: Any

    def __init__(self, *, vllm_config: Any, kv_cache_config: Any, **kwargs: Any) -> None:
        check_options(vllm_config)
        super().__init__(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **kwargs)  # type: ignore[call-arg]
        self._group = attention_group(kv_cache_config)
        self._block_size = kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.block_size
        self._n_slots = kv_cache_config.num_blocks * self._block_size
        self._by_slot: npt.NDArray[np.void] | None = None
        """The row of each place, as bytes, which numpy copies ten times as fast; None: before the first step."""
        self._form: tuple[np.dtype[Any], tuple[int, ...]] = (np.dtype(np.uint8), ())
        """Dtype and shape of a row."""
        self._next: dict[str, int] = {}
        """The first token of each request whose routes it has not been given."""
        self._early: dict[str, Any] = {}
        """The requests whose outputs are read before they have ended."""
        self._kept: dict[str, list[Rows]] = {}
        """Routes of each request that was preempted, up to the one of `_next`."""
        self._lost: dict[str, list[int]] = {}
        """The former blocks of requests that were preempted while a step was on its way, until that has arrived."""
        self._ended: dict[str, Rows] = {}
        """Routes of requests that have just ended."""
        self._n_ahead = 0
        """Steps that have been scheduled and have not arrived."""

    def add_request(self, request: Any) -> None:
        """Take a request."""
        super().add_request(request)  # type: ignore[misc]
        if (params := request.sampling_params) is not None:
            self._next[request.request_id] = params.routed_experts_prompt_start
            if not is_read_at_its_end(params):
                self._early[request.request_id] = request

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        self._n_ahead += scheduler_output.total_num_scheduled_tokens > 0

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Return the outputs of a step, by client of the engine.

        Raises:
            RuntimeError: a step came without routes.
        """
        if scheduler_output.total_num_scheduled_tokens:
            self._n_ahead -= 1
            if model_runner_output.routed_experts is None:
                raise RuntimeError(
                    "vLLM's worker sent no routes with a step: drop --distributed-executor-backend from "
                    "rollout.server_args, or set actor.router_replay to old_logprobs"
                )
            rows, slots = model_runner_output.routed_experts
            model_runner_output.routed_experts = None  # vLLM would look for its own form of them
            row = np.dtype((np.void, rows[0].nbytes))
            if self._by_slot is None:
                self._by_slot, self._form = np.zeros(self._n_slots, row), (rows.dtype, rows.shape[1:])
            # Before anything is read: requests may end with this step.
            self._by_slot[slots] = rows.reshape(len(rows), -1).view(row)[:, 0]
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for name in self._lost.keys() & self.requests.keys():
            self._keep(self.requests[name])
        # The next step may write to their places.
        self._lost.clear()
        if self._ended or self._early:
            for of_client in outputs.values():
                for output in of_client.outputs:
                    output.routed_experts = self._routes_of(output.request_id)
        return outputs

    def _routes_of(self, name: str) -> Rows | None:
        """Return the routes that go with an output of a request: all that are left if it has ended."""
        # The API server ends a request with a stop string, and then has no more than what came until then.
        return self._take(self._early[name]) if name in self._early else self._ended.pop(name, None)

    def take_ended(self, name: str) -> dict[str, Any]:
        """Return the further fields of the output with which a request ends that was ended from outside."""
        fields: dict[str, Any] = super().take_ended(name)  # type: ignore[misc]
        return fields | ({"routed_experts": self._ended.pop(name)} if name in self._ended else {})

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """End requests from outside. All of them end when the engine pauses, and are then asked for their routes."""
        self._ended.clear()
        ended = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        if request_ids is not None:
            self._ended.clear()
        return ended

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        name = request.request_id
        if name in self._next:
            rows = self._take(request)
            if rows is not None:
                self._ended[name] = rows
            del self._next[name]
            self._early.pop(name, None)
            self._kept.pop(name, None)
            self._lost.pop(name, None)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        name = request.request_id
        if name in self._next:
            self._keep(request)
            if self._n_ahead:
                self._lost[name] = self._blocks(request)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _keep(self, request: Any) -> None:
        if (rows := self._read(request)) is not None:
            self._kept.setdefault(request.request_id, []).append(rows)

    def _take(self, request: Any) -> Rows | None:
        """Return the routes of a request that it has not been given; None: there are none."""
        parts = self._kept.pop(request.request_id, [])
        if (rows := self._read(request)) is not None:
            parts.append(rows)
        return np.concatenate(parts) if len(parts) > 1 else next(iter(parts), None)

    def _read(self, request: Any) -> Rows | None:
        """Return the routes of the tokens from `_next` up to the last but one, and go behind them; None: of none.

        The last token has not been fed to the model. A request without a sampled token is computed again if it comes
        again, and only that has an effect.
        """
        begin, end = self._next[request.request_id], request.num_tokens - 1
        if self._by_slot is None or not request.num_output_tokens or begin >= end:
            return None
        blocks = np.asarray(self._lost.get(request.request_id) or self._blocks(request))
        places = np.arange(begin, end)
        self._next[request.request_id] = end
        taken = self._by_slot[blocks[places // self._block_size] * self._block_size + places % self._block_size]
        dtype, shape = self._form
        return taken.view(dtype).reshape(len(taken), *shape)

    def _blocks(self, request: Any) -> list[int]:
        blocks: Sequence[list[int]] = self.kv_cache_manager.get_block_ids(request.request_id)
        return blocks[self._group]


def attention_group(kv_cache_config: Any) -> int:
    """Return the index of the group of layers that keep the keys and values of all tokens.

    Raises:
        ValueError: there is none.
    """
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        specs = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
        if all(isinstance(each, FullAttentionSpec) for each in specs):
            return index
    raise ValueError(
        "no layer of vLLM's model keeps all of its keys and values, by whose places routes are kept: set "
        "actor.router_replay to old_logprobs"
    )


def check_options(vllm_config: Any) -> None:
    """Refuse options of vLLM with which places do not tell tokens apart.

    Raises:
        ValueError: naming the option.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    taken = {
        "--kv-transfer-config": transfer is not None and transfer.is_kv_transfer_instance,
        "--decode-context-parallel-size": parallel.decode_context_parallel_size > 1,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
    }
    for option, is_taken in taken.items():
        if is_taken:
            raise ValueError(
                f"vLLM tells no routes with {option}: drop it from rollout.server_args, or set actor.router_replay to "
                "old_logprobs"
            )
