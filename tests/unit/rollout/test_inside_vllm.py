"""The code that runs inside vLLM's engine and API server, over stand-ins for the parts of vLLM that it uses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from fivefold.rollout.servers import vllm_dialect

FINAL_ONLY = "final only"


class LogprobsLists(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any
    cu_num_generated_tokens: None = None


class Scheduler:
    """Gives each request of a step one token, and ends it when `ends` says so."""

    def __init__(self, *, vllm_config: Any, log_stats: bool) -> None:
        self.log_stats = log_stats
        self.requests: dict[str, Any] = {}
        self.routes: dict[str, Any] = {}
        """Routes of the next outputs."""

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def finish_requests(self, request_ids: list[str] | None, finished_status: str) -> list[str]:
        ended = [name for name in self.requests if request_ids is None or name in request_ids]
        for name in ended:
            del self.requests[name]
        return ended

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        outputs = []
        for name, (token, logprob, reason) in model_runner_output.items():
            wants = self.requests[name].sampling_params.logprobs is not None
            row = LogprobsLists(
                np.array([[token]], np.int32), np.array([[logprob]], np.float32), np.array([1], np.int32)
            )
            outputs.append(
                SimpleNamespace(
                    request_id=name,
                    new_logprobs=row if wants else None,
                    finish_reason=reason,
                    routed_experts=self.routes.get(name),
                )
            )
            if reason is not None:
                del self.requests[name]
        return {0: SimpleNamespace(outputs=outputs)}


class AsyncScheduler(Scheduler):
    pass


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The modules inside vLLM, as attributes of one."""
    stand_ins: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.inputs": {"tokens_input": None},
        "vllm.sampling_params": {
            "RequestOutputKind": SimpleNamespace(FINAL_ONLY=FINAL_ONLY), "SamplingParams": SimpleNamespace
        },
        "vllm.lora": {}, "vllm.lora.request": {"LoRARequest": SimpleNamespace},
        "vllm.v1": {}, "vllm.v1.core": {}, "vllm.v1.core.sched": {},
        "vllm.v1.engine": {"EngineCoreOutputs": SimpleNamespace},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": AsyncScheduler},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "vllm.v1.engine.exceptions": {"EngineDeadError": OSError, "EngineGenerateError": OSError},
    }  # fmt: skip
    for name, contents in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(vllm_dialect.INSIDE)
    names = ("fivefold_scheduler", "fivefold_generate")
    yield SimpleNamespace(**{name: __import__(name) for name in names})  # type: ignore[misc]
    for name in names:
        del sys.modules[name]


def request(name: str, **params: Any) -> Any:
    common: dict[str, Any] = {"logprobs": 0, "flat_logprobs": True, "output_kind": FINAL_ONLY, "stop": []}
    return SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(**common | params))


def start(inside: Any, *, is_async: bool = True) -> Any:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=is_async), parallel_config=SimpleNamespace(worker_cls="auto")
    )
    return inside.fivefold_scheduler.scheduler(vllm_config=config, log_stats=False)


def step(scheduler: Any, tokens: dict[str, tuple[int, float, str | None]]) -> dict[str, list[tuple[int, float]] | None]:
    """Return the rows that each request's output has after a step, as pairs of token and log-prob."""
    return {
        output.request_id: None
        if (rows := output.new_logprobs) is None
        else list(zip(rows.logprob_token_ids[:, 0].tolist(), rows.logprobs[:, 0].tolist(), strict=True))
        for output in scheduler.update_from_output(None, tokens)[0].outputs
    }


@pytest.mark.parametrize("n_tokens", [1, 15, 16, 17, 40])
def test_the_logprobs_of_a_request_arrive_in_order_and_few_at_a_time(inside: Any, n_tokens: int) -> None:
    scheduler, bundle = start(inside), inside.fivefold_scheduler.BUNDLE
    scheduler.add_request(request("a"))
    scheduler.add_request(request("none", logprobs=None))
    arrived, n_messages = [], 0
    for index in range(n_tokens):
        reason = "length" if index == n_tokens - 1 else None
        rows = step(scheduler, {"a": (index, -index / 4, reason), "none": (7, -1.0, None)})
        assert rows["none"] is None
        arrived += rows["a"] or []
        n_messages += rows["a"] is not None
        assert len(arrived) >= index + 1 - (bundle - 1)
    assert arrived == [(index, -index / 4) for index in range(n_tokens)]
    assert n_messages == -(-n_tokens // bundle)


@pytest.mark.parametrize(
    "params",
    [{"stop": ["."]}, {"output_kind": "delta"}, {"flat_logprobs": False}],
    ids=["stop", "delta", "dicts"],
)
def test_requests_that_are_read_before_their_end_get_each_row_at_once(inside: Any, params: dict[str, Any]) -> None:
    scheduler = start(inside)
    scheduler.add_request(request("a", **params))
    assert step(scheduler, {"a": (3, -0.5, None)}) == {"a": [(3, -0.5)]}


@pytest.mark.parametrize("params", [{}, {"logprobs": None}, {"stop": ["."]}])
def test_the_routes_of_a_request_arrive_in_order(inside: Any, params: dict[str, Any]) -> None:
    """The prompt's come with the first token; each later output has those of the token before."""
    scheduler, bundle = start(inside), inside.fivefold_scheduler.BUNDLE
    scheduler.add_request(request("a", **params))
    made = [np.full((5, 3, 2), 9, np.uint8), *(np.full((1, 3, 2), index, np.uint8) for index in range(19))]
    arrived, n_messages = [], 0
    for index, routes in enumerate(made):
        scheduler.routes = {"a": routes}
        reason = "length" if index == len(made) - 1 else None
        [output] = scheduler.update_from_output(None, {"a": (index, -1.0, reason)})[0].outputs
        arrived += [] if output.routed_experts is None else [output.routed_experts]
        n_messages += output.routed_experts is not None
    np.testing.assert_array_equal(np.concatenate(arrived), np.concatenate(made))
    assert n_messages == (len(made) if "stop" in params else -(-len(made) // bundle))


def test_what_is_kept_of_a_request_goes_with_it(inside: Any) -> None:
    scheduler = start(inside)
    for name in ("a", "b"):
        scheduler.add_request(request(name))
    step(scheduler, {"a": (1, -1.0, None), "b": (2, -2.0, None)})
    assert scheduler.finish_requests(["a"], "aborted") == ["a"]
    scheduler.add_request(request("a"))
    rows = step(scheduler, {"a": (5, -5.0, "stop"), "b": (6, -6.0, "stop")})
    assert rows == {"a": [(5, -5.0)], "b": [(2, -2.0), (6, -6.0)]}
    assert scheduler._rows == {}


@pytest.mark.parametrize(("is_async", "base"), [(True, AsyncScheduler), (False, Scheduler)])
def test_the_scheduler_is_the_one_that_vllm_would_take(inside: Any, is_async: bool, base: type) -> None:
    scheduler = start(inside, is_async=is_async)
    assert base in type(scheduler).__mro__
    assert isinstance(scheduler, AsyncScheduler) == is_async
    assert scheduler.log_stats is False


class Flat(list[Any]):
    """vLLM's log-probs of a completion: the length is that of the positions."""

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__(token_ids)
        self.token_ids, self.logprobs = token_ids, [-float(token) for token in token_ids]


NEVER_HELD = SimpleNamespace(version=None, held=[])
"""A request of a server that keeps no caches."""


@pytest.mark.parametrize("kept", [0, 2])
def test_an_aborted_completion_ends_where_its_logprobs_end(inside: Any, kept: int) -> None:
    token_ids = [4, 5, 6]
    output = SimpleNamespace(
        token_ids=token_ids, finish_reason="abort", logprobs=Flat(token_ids[: len(token_ids) - kept])
    )
    line, _, numbers = inside.fivefold_generate._packed(output, NEVER_HELD).partition(b"\n")
    n_tokens = 3 - kept
    assert f'"n_tokens": {n_tokens}'.encode() in line
    assert np.frombuffer(numbers, "<i4", n_tokens).tolist() == token_ids[:n_tokens]
    assert np.frombuffer(numbers[4 * n_tokens :], "<f4").tolist() == [-4.0, -5.0, -6.0][:n_tokens]


def test_a_whole_completion_without_all_its_logprobs_is_an_error(inside: Any) -> None:
    output = SimpleNamespace(token_ids=[4, 5], finish_reason="stop", logprobs=Flat([4]))
    with pytest.raises(inside.fivefold_generate.WrongLogprobs, match="1 log-probs for 2 tokens"):
        inside.fivefold_generate._packed(output, NEVER_HELD)


def test_a_worker_names_the_adapters_for_which_it_has_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's manager keeps adapters under the names of its own layers, those it computes in one under one name."""
    monkeypatch.syspath_prepend(vllm_dialect.INSIDE)
    module = __import__("fivefold_weights")
    worker = module.WorkerWeights()
    adapters = SimpleNamespace(loras=dict.fromkeys(["0.qkv_proj", "0.experts", "1.experts.3.up_proj"]))
    manager = SimpleNamespace(modules=dict.fromkeys(["0.qkv_proj", "0.experts"]), list_adapters=lambda: {1: adapters})
    worker.model_runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    assert worker.fivefold_unused_adapters() == ["1.experts.3.up_proj"]
    del sys.modules["fivefold_weights"]
