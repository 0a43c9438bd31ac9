"""Runs inside vLLM's engine: sends the log-probs and routes of a request to the API server once, when it ends.

It is on vLLM's path and `scheduler` is vLLM's `--scheduler-cls`, so it imports nothing of Fivefold, which need not be
installed next to vLLM.

Symptom: log-probs of the sampled tokens take 15 to 40% of the speed of vLLM 0.25 with 256 sequences on an H200, by the
    processor of the host: 7 ms of its time for each step.
Cause: every step, three arrays for each sequence are cut out, encoded, sent and decoded, for one number in each.
    Routes are one more array.
Instead: the numbers of a step become lists once, a request's are kept until it ends, and go together. vLLM's code in
    the API server adds however many rows come to the request's.
Remove this when vLLM with log-probs of the sampled tokens is at most a tenth slower than without.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

WORKER = "fivefold_capture.Worker"
"""vLLM's `--worker-cls` if routes come from Fivefold's worker."""


@dataclass(frozen=True, eq=False)
class Unsent:
    """What the API server has not got of a request. Log-probs are empty if it asks for none."""

    wants_logprobs: bool
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    routes: list[Any] = field(default_factory=list)
    """Arrays [tokens, layers, top_k]."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of vLLM's output that take all of it."""
        fields: dict[str, Any] = {}
        if self.token_ids:
            columns = (np.array(self.token_ids), np.array(self.logprobs, np.float32))
            fields["new_logprobs"] = LogprobsLists(*(column[:, None] for column in columns), np.array(self.ranks))
        if self.routes:
            fields["routed_experts"] = np.concatenate(self.routes)
        return fields


class EndsWhole:
    """What is added to vLLM's scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unsent: dict[str, Unsent] = {}
        """What has not gone yet, of each running request that is read at its end."""
        self._cut_by_vllm: set[str] = set()
        """The other requests with log-probs."""
        self._cut_off: dict[str, Unsent] = {}
        """What has not gone yet, of requests that have just been ended from outside."""

    def add_request(self, request: Any) -> None:
        """Take a request."""
        super().add_request(request)  # type: ignore[misc]
        params = request.sampling_params
        wants_logprobs = params is not None and params.logprobs is not None
        keeps_logprobs = wants_logprobs and params.flat_logprobs and params.logprobs == 0
        if is_read_at_its_end(params):
            self._unsent[request.request_id] = Unsent(keeps_logprobs)
        if wants_logprobs and not (keeps_logprobs and request.request_id in self._unsent):
            self._cut_by_vllm.add(request.request_id)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """End requests from outside. All of them end when the engine pauses; `take_ended` has what is kept of them."""
        ended = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        requests = cast(dict[str, Any], self.requests)  # type: ignore[attr-defined]
        gone = {name: self._unsent.pop(name) for name in self._unsent.keys() - requests.keys()}
        # Nobody reads what the API server ends.
        self._cut_off = gone if request_ids is None else {}
        self._cut_by_vllm &= requests.keys()
        return ended

    def take_ended(self, name: str) -> dict[str, Any]:
        """Return the further fields of the output with which a request ends that was ended from outside."""
        unsent = self._cut_off.pop(name, None)
        return {} if unsent is None else unsent.fields()

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Return the outputs of a step, by client of the engine."""
        rows = model_runner_output.logprobs
        if rows is not None and not self._cut_by_vllm:
            model_runner_output.logprobs = None
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        made = [output for of_client in outputs.values() for output in of_client.outputs]
        if rows is not None:
            self._keep_logprobs(made, rows, model_runner_output.req_id_to_index)
        for output in made:
            self._keep_or_send(output)
        return outputs

    def _keep_logprobs(self, outputs: list[Any], rows: Any, places: dict[str, int]) -> None:
        """Keep the log-probs of a step's tokens.

        Args:
            outputs: vLLM's.
            rows: vLLM's `LogprobsLists` of all requests of the step.
            places: where each request is among them.
        """
        values, ranks, begins = (
            rows.logprobs[:, 0].tolist(),
            rows.sampled_token_ranks.tolist(),
            rows.cu_num_generated_tokens,
        )
        for output in outputs:
            unsent = self._unsent.get(output.request_id)
            if unsent is None or not unsent.wants_logprobs:
                continue
            place = places[output.request_id]
            begin = place if begins is None else begins[place]
            end = begin + len(output.new_token_ids)
            unsent.token_ids.extend(output.new_token_ids)
            unsent.logprobs.extend(values[begin:end])
            unsent.ranks.extend(ranks[begin:end])
            output.new_logprobs = None

    def _keep_or_send(self, output: Any) -> None:
        """Keep the routes of an output, or give it all that is kept if it is the request's last one."""
        unsent, is_last = self._unsent.get(output.request_id), output.finish_reason is not None
        if unsent is not None and output.routed_experts is not None:
            unsent.routes.append(output.routed_experts)
            output.routed_experts = None
        if unsent is not None and is_last:
            for key, value in self._unsent.pop(output.request_id).fields().items():
                setattr(output, key, value)
        if is_last:
            self._cut_by_vllm.discard(output.request_id)


def is_read_at_its_end(params: Any) -> bool:
    """Return whether nobody looks at log-probs and routes of a request before it has ended.

    Stop strings are found by the API server, which ends the request: the engine would keep the last rows.
    """
    return params is not None and params.output_kind == RequestOutputKind.FINAL_ONLY and not params.stop


def _send_ended(self: Any, req_ids: list[str], client_index: int, finish_reason: Any) -> None:
    """Send the ends of requests that were ended from outside, with what is kept of them; vLLM's own sends no rows."""
    outputs = [
        EngineCoreOutput(name, [], finish_reason=finish_reason, **self.scheduler.take_ended(name)) for name in req_ids
    ]
    self.output_queue.put_nowait((client_index, EngineCoreOutputs(finished_requests=req_ids, outputs=outputs)))


def scheduler(*, vllm_config: Any, **kwargs: Any) -> Any:
    """Return vLLM's own scheduler for a configuration, with all that goes at a request's end."""
    from vllm.v1.engine.core import EngineCoreProc  # which imports schedulers

    EngineCoreProc._send_finish_outputs_to_client = _send_ended
    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    bases: tuple[type, ...] = (EndsWhole, base)
    if vllm_config.parallel_config.worker_cls == WORKER:
        from fivefold_routes import RoutesBySlot  # by servers that tell routes this way

        bases = (RoutesBySlot, *bases)
    return type(f"EndsWhole{base.__name__}", bases, {})(vllm_config=vllm_config, **kwargs)
