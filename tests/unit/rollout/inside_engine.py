"""Stand-ins for vLLM's engine and worker, over which the code inside vLLM tells routes.

The one for the device knows the row of each place of the cache at each time. A request's routes must be the rows that
its tokens had when it first sampled a token after them.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fivefold.rollout.servers import vllm_dialect
from tests.unit.rollout.stand_ins import stand_in

BLOCK, N_BLOCKS, LAYERS, TOP_K = 4, 12, 3, 2
FINAL_ONLY = "final only"


class FullAttention:
    block_size = BLOCK


class Uniform:
    def __init__(self, *specs: Any) -> None:
        self.kv_cache_specs = dict(enumerate(specs))


@dataclass(eq=False)
class Request:
    request_id: str
    num_prompt: int
    most: int
    sampling_params: Any
    num_output_tokens: int = 0
    computed: int = 0
    """Tokens that the device has computed since the request last began."""
    told: list[Any] = field(default_factory=list)
    truth: dict[int, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_output_tokens


class Scheduler:
    """Keeps blocks as vLLM does, and gives those first that were freed last."""

    def __init__(self, *, vllm_config: Any, kv_cache_config: Any) -> None:
        self.requests: dict[str, Request] = {}
        self.held: dict[str, list[int]] = {}
        self.users: Counter[int] = Counter()
        self.free = list(range(N_BLOCKS))
        self.kv_cache_manager = SimpleNamespace(get_block_ids=lambda name: ([], self.held.get(name, [])))

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request

    def hold(self, name: str, blocks: list[int]) -> None:
        self.held.setdefault(name, []).extend(blocks)
        self.users.update(blocks)

    def _release(self, name: str) -> None:
        for block in self.held.pop(name, []):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        pass

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        assert model_runner_output.routed_experts is None
        outputs = []
        for name, sampled in model_runner_output.sampled.items():
            request = self.requests.get(name)
            if request is None or not sampled:
                continue
            request.num_output_tokens += 1
            reason = "length" if request.num_output_tokens == request.most else None
            if reason is not None:
                self._free_request(request)
            outputs.append(
                SimpleNamespace(request_id=name, finish_reason=reason, new_logprobs=None, routed_experts=None)
            )
        return {0: SimpleNamespace(outputs=outputs)}

    def _free_request(self, request: Request) -> None:
        self._release(request.request_id)
        del self.requests[request.request_id]

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        self._release(request.request_id)

    def finish_requests(self, request_ids: list[str] | None, finished_status: str) -> list[str]:
        names = [name for name in self.requests if request_ids is None or name in request_ids]
        for name in names:
            self._free_request(self.requests[name])
        return names


class Runner:
    """Stands in for the worker."""

    initialized = False

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self.initialized = True

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.model_runner: Any
        self.model_runner.log.append("vLLM copies")
        output = SimpleNamespace(routed_experts=None, grammar=grammar_output)
        return SimpleNamespace(get_output=lambda: output)


class MoERunner(torch.nn.Module):
    def __init__(self, layer_id: int, n_experts: int = 8, *, is_monolithic: bool = False) -> None:
        super().__init__()
        self.layer_id, self.layer_name, self.is_monolithic = layer_id, f"layers.{layer_id}.experts", is_monolithic
        self.router = SimpleNamespace(top_k=TOP_K, global_num_experts=n_experts)
        self.router.set_capture_fn = lambda function: setattr(self.router, "capture", function)


RANK = SimpleNamespace(rank_in_group=0)
CONFIG = SimpleNamespace(
    num_blocks=N_BLOCKS,
    kv_cache_groups=[SimpleNamespace(kv_cache_spec=object()), SimpleNamespace(kv_cache_spec=FullAttention())],
)


def open_inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the modules inside vLLM, as attributes of one."""
    core = SimpleNamespace(EngineCoreProc=type("EngineCoreProc", (), {}))
    stand_ins: dict[str, dict[str, Any]] = {
        "vllm": {}, "vllm.v1": {}, "vllm.v1.core": {}, "vllm.v1.core.sched": {}, "vllm.distributed": {},
        "vllm.model_executor": {}, "vllm.model_executor.layers": {}, "vllm.model_executor.layers.fused_moe": {},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=FINAL_ONLY)},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": type("AsyncScheduler", (Scheduler,), {})},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "vllm.v1.engine": {
            "EngineCoreOutput": lambda name, tokens, routed_experts=None, **rest: SimpleNamespace(
                request_id=name, routed_experts=routed_experts, **rest
            ),
            "EngineCoreOutputs": SimpleNamespace,
        },
        "vllm.v1.engine.core": vars(core),
        "vllm.v1.kv_cache_interface": {"FullAttentionSpec": FullAttention, "UniformTypeKVCacheSpecs": Uniform},
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: RANK},
        "vllm.model_executor.layers.fused_moe.layer": {"MoERunner": MoERunner},
        "vllm.v1.outputs": {"AsyncModelRunnerOutput": object, "LogprobsLists": tuple},
        "vllm.v1.worker": {"gpu_worker": SimpleNamespace(Worker=Runner)},
    }  # fmt: skip
    stand_in(monkeypatch, stand_ins)
    monkeypatch.syspath_prepend(vllm_dialect.INSIDE)
    names = ("fivefold_scheduler", "fivefold_routes", "fivefold_capture")
    yield SimpleNamespace(**{name: __import__(name) for name in names}, core=core)
    for name in names:
        del sys.modules[name]


def config_of(**changes: Any) -> Any:
    parallel = {
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "worker_cls": vllm_dialect.CAPTURE,
    }
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=True),
        kv_transfer_config=changes.pop("kv_transfer_config", None),
        parallel_config=SimpleNamespace(**parallel | changes),
    )


class Engine:
    """vLLM's engine: schedules steps, perhaps one more before the last has arrived, and knows what the device has."""

    def __init__(self, inside: Any) -> None:
        self.scheduler = inside.fivefold_scheduler.scheduler(vllm_config=config_of(), kv_cache_config=CONFIG)
        self.by_slot = np.zeros((N_BLOCKS * BLOCK, LAYERS, TOP_K), np.uint8)
        self.on_the_way: deque[Any] = deque()
        self.n_rows = 0

    def add(self, name: str, n_prompt: int, most: int, *, cached_of: str | None = None, **params: Any) -> Request:
        """Add a request, which finds its first block in the cache of prefixes, as that of another request."""
        common = {"output_kind": FINAL_ONLY, "stop": [], "logprobs": None, "routed_experts_prompt_start": 0}
        request = Request(name, n_prompt, most, SimpleNamespace(**common | params))
        self.scheduler.add_request(request)
        if cached_of is not None:
            self.scheduler.hold(name, self.scheduler.held[cached_of][:1])
            request.computed = BLOCK
        return request

    def schedule(self, *asked: tuple[Request, int]) -> None:
        """Schedule a step of so many tokens of each request, which the device computes at once."""
        slots: list[int] = []
        sampled: dict[str, bool] = {}
        after: dict[str, Any] = {}
        for request, n in asked:
            name, end = request.request_id, request.computed + n
            blocks = self.scheduler.held.setdefault(name, [])
            self.scheduler.hold(name, [self.scheduler.free.pop() for _ in range(-(-end // BLOCK) - len(blocks))])
            slots += [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(request.computed, end)]
            request.computed = end
        rows = np.arange(self.n_rows, self.n_rows + len(slots)).repeat(LAYERS * TOP_K).astype(np.uint8)
        self.n_rows += len(slots)
        self.by_slot[slots] = rows = rows.reshape(-1, LAYERS, TOP_K)
        for request, _ in asked:
            name, end = request.request_id, request.computed
            # A token that is on its way is computed after it too.
            sampled[name] = end >= request.num_tokens
            blocks = self.scheduler.held[name]
            after[name] = [self.by_slot[blocks[p // BLOCK] * BLOCK + p % BLOCK].copy() for p in range(end)]
        scheduled = SimpleNamespace(total_num_scheduled_tokens=len(slots))
        self.scheduler._update_after_schedule(scheduled)
        output = SimpleNamespace(
            sampled=sampled, routed_experts=(rows, np.array(slots)), logprobs=None, req_id_to_index={}
        )
        self.on_the_way.append((scheduled, output, after))

    def arrive(self) -> None:
        """Take over the step that was scheduled first."""
        scheduled, output, after = self.on_the_way.popleft()
        requests = dict(self.scheduler.requests)
        for sent in self.scheduler.update_from_output(scheduled, output)[0].outputs:
            request = requests[sent.request_id]
            for position, row in enumerate(after[sent.request_id]):
                request.truth.setdefault(position, row)
            if sent.routed_experts is not None:
                request.told.append(sent.routed_experts)

    def run(self, *asked: tuple[Request, int]) -> None:
        self.schedule(*asked)
        self.arrive()

    def preempt(self, request: Request) -> None:
        self.scheduler._preempt_request(request, 0.0)
        request.computed = 0


def check(request: Request, *, first: int = 0) -> None:
    """Compare what a request was told with the truth, for all tokens but its last."""
    told = np.concatenate(request.told)
    np.testing.assert_array_equal(told, [request.truth[p] for p in range(first, request.num_tokens - 1)])
