"""Runs inside vLLM's engine: sends log-probs and routes of sampled tokens to the API server several at a time.

It is on vLLM's path and `scheduler` is vLLM's `--scheduler-cls`, so it imports nothing of Fivefold, which need not be
installed next to vLLM.

Symptom: log-probs of the sampled tokens take 15 to 40% of the speed of vLLM 0.25 with 256 sequences on an H200, by the
    processor of the host: 7 ms of its time for each step.
Cause: every step, three arrays for each sequence are encoded, sent and decoded, for one number in each.
    Routes are one more array.
Instead: the rows of a request are kept until there are `BUNDLE` of them or it has ended, and go as one. vLLM's code in
    the API server adds however many rows come to the request's.
Remove this when vLLM with log-probs of the sampled tokens is at most a tenth slower than without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

WORKER = "fivefold_capture.Worker"
"""vLLM's `--worker-cls` if routes come from Fivefold's worker."""
BUNDLE = 16
"""Rows that go together. A request that is aborted loses the last ones, fewer than so many."""


class Bundles:
    """What is added to vLLM's scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rows: dict[str, list[Any]] = {}
        """vLLM's `LogprobsLists` that have not gone yet, of each request whose rows are bundled."""
        self._routes: dict[str, list[Any]] = {}
        """Arrays [tokens, layers, top_k] that have not gone yet, of each request whose routes are bundled."""

    def add_request(self, request: Any) -> None:
        """Take a request."""
        super().add_request(request)  # type: ignore[misc]
        params = request.sampling_params
        if is_read_at_its_end(params):
            self._routes[request.request_id] = []
            if params.logprobs is not None and params.flat_logprobs:
                self._rows[request.request_id] = []

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """End requests from outside; what is kept of them is dropped."""
        ended = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        requests = cast(dict[str, Any], self.requests)  # type: ignore[attr-defined]
        self._rows = {name: rows for name, rows in self._rows.items() if name in requests}
        self._routes = {name: parts for name, parts in self._routes.items() if name in requests}
        return ended

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Return the outputs of a step, by client of the engine."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        for of_client in outputs.values():
            for output in of_client.outputs:
                _bundle(output, "new_logprobs", self._rows, _joined_rows)
                # The prompt's routes come with the first ones.
                _bundle(output, "routed_experts", self._routes, np.concatenate)
        return outputs


def _bundle(output: Any, name: str, kept: dict[str, list[Any]], join: Callable[[list[Any]], Any]) -> None:
    """Replace a field of an output: by all that is kept of it, or by nothing until there is enough.

    Args:
        output: vLLM's.
        name: the field's.
        kept: what has not gone yet, of each request whose field is bundled.
        join: makes the field of several.
    """
    parts = kept.get(output.request_id)
    if parts is None:
        return
    if (part := getattr(output, name, None)) is not None:
        parts.append(part)
        setattr(output, name, None)
    if parts and (len(parts) >= BUNDLE or output.finish_reason is not None):
        setattr(output, name, join(parts))
        parts.clear()
    if output.finish_reason is not None:
        del kept[output.request_id]


def _joined_rows(rows: list[Any]) -> Any:
    columns = zip(*(row[:3] for row in rows), strict=True)
    return type(rows[0])(*(np.concatenate(column) for column in columns))


def is_read_at_its_end(params: Any) -> bool:
    """Return whether nobody looks at log-probs and routes of a request before it has ended.

    Stop strings are found by the API server, which ends the request: the engine would keep the last rows.
    """
    return params is not None and params.output_kind == RequestOutputKind.FINAL_ONLY and not params.stop


def scheduler(*, vllm_config: Any, **kwargs: Any) -> Any:
    """Return vLLM's own scheduler for a configuration, with bundles, and with routes if the workers send them."""
    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    bases: tuple[type, ...] = (Bundles, base)
    if vllm_config.parallel_config.worker_cls == WORKER:
        from fivefold_routes import RoutesBySlot, send_ends_with_routes  # by servers that tell routes this way

        send_ends_with_routes()
        bases = (Bundles, RoutesBySlot, base)
    return type(f"Bundling{base.__name__}", bases, {})(vllm_config=vllm_config, **kwargs)
