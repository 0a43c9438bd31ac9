"""The code that runs inside vLLM's engine and API server, over stand-ins for the parts of vLLM that it uses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from fivefold.rollout.servers import vllm_dialect
from tests.unit.rollout.stand_ins import stand_in

FINAL_ONLY = "final only"


class LogprobsLists(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any
    cu_num_generated_tokens: list[int] | None = None


Tokens = list[tuple[int, float]]
"""The tokens that a request samples in a step, with their log-probs."""


class Scheduler:
    """Gives each request the tokens of a step, and ends those that its plan says."""

    def __init__(self, *, vllm_config: Any, log_stats: bool) -> None:
        self.log_stats = log_stats
        self.requests: dict[str, Any] = {}
        self.routes: dict[str, Any] = {}
        """Routes of the next outputs."""
        self.n_refused = 0
        """Last tokens of each request that it does not take, as if they came after its end."""

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def finish_requests(self, request_ids: list[str] | None, finished_status: str) -> list[str]:
        ended = [name for name in self.requests if request_ids is None or name in request_ids]
        for name in ended:
            del self.requests[name]
        return ended

    def update_from_output(self, scheduler_output: dict[str, str], model_runner_output: Any) -> dict[int, Any]:
        outputs, rows = [], model_runner_output.logprobs
        for name, index in model_runner_output.req_id_to_index.items():
            if name not in self.requests:
                continue
            tokens = model_runner_output.sampled_token_ids[index]
            tokens = tokens[: len(tokens) - self.n_refused]
            begin = (
                index if rows is None or rows.cu_num_generated_tokens is None else rows.cu_num_generated_tokens[index]
            )
            cut = slice(begin, begin + len(tokens))
            wants = rows is not None and self.requests[name].sampling_params.logprobs is not None
            outputs.append(
                SimpleNamespace(
                    request_id=name,
                    new_token_ids=tokens,
                    new_logprobs=LogprobsLists(*(column[cut] for column in rows[:3])) if wants else None,
                    finish_reason=scheduler_output.get(name),
                    routed_experts=self.routes.get(name),
                )
            )
            if name in scheduler_output:
                del self.requests[name]
        return {0: SimpleNamespace(outputs=outputs)}


class AsyncScheduler(Scheduler):
    pass


class EngineCoreProc:
    """Sends the ends of requests from outside, without rows."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.output_queue = scheduler, SimpleQueue[Any]()

    def _send_finish_outputs_to_client(self, req_ids: list[str], client_index: int, finish_reason: str) -> None:
        raise NotImplementedError


def CoreOutput(request_id: str, new_token_ids: list[int], **fields: Any) -> Any:
    return SimpleNamespace(
        **{"request_id": request_id, "new_token_ids": new_token_ids, "new_logprobs": None, "routed_experts": None}
        | fields
    )


@dataclass
class FlatLogprobs:
    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)


@dataclass
class LogprobsProcessor:
    """Adds one row after the other, with its text."""

    tokenizer: Any = None
    num_logprobs: int = 0
    logprobs: Any = field(default_factory=FlatLogprobs)
    cumulative_logprob: float = 0.0

    def _update_sample_logprobs(self, rows: LogprobsLists) -> None:
        for tokens, values, rank in zip(*rows[:3], strict=True):
            flat = self.logprobs
            flat.start_indices.append(len(flat.logprobs))
            for token, value in zip(tokens.tolist(), values.tolist(), strict=True):
                flat.token_ids.append(token)
                flat.logprobs.append(value)
                flat.ranks.append(rank.tolist())
                flat.decoded_tokens.append(self.tokenizer and self.tokenizer(token))
            flat.end_indices.append(len(flat.logprobs))
            self.cumulative_logprob += values.tolist()[0]


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
        "vllm.logprobs": {"FlatLogprobs": FlatLogprobs},
        "vllm.v1.engine": {"EngineCoreOutput": CoreOutput, "EngineCoreOutputs": SimpleNamespace},
        "vllm.v1.engine.core": {"EngineCoreProc": EngineCoreProc},
        "vllm.v1.engine.logprobs": {"LogprobsProcessor": LogprobsProcessor},
        "vllm.v1.outputs": {"LogprobsLists": LogprobsLists},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": AsyncScheduler},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "vllm.v1.engine.exceptions": {"EngineDeadError": OSError, "EngineGenerateError": OSError},
    }  # fmt: skip
    stand_in(monkeypatch, stand_ins)
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


def step(scheduler: Any, tokens: dict[str, Tokens], ends: dict[str, str] | None = None) -> dict[str, Tokens | None]:
    """Return the tokens and log-probs that each request's output has after a step."""
    return {name: rows_of(output) for name, output in outputs_of(scheduler, tokens, ends).items()}


def outputs_of(scheduler: Any, tokens: dict[str, Tokens], ends: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the outputs of a step, in which the model sampled tokens for the requests."""
    sampled = [token for of_one in tokens.values() for token in of_one]
    rows = LogprobsLists(
        np.array([[token, token + 1] for token, _ in sampled], np.int32),
        np.array([[logprob, -9.0] for _, logprob in sampled], np.float32),
        np.arange(len(sampled)),
        np.cumsum([0, *map(len, tokens.values())])[:-1].tolist(),
    )
    if all(len(of_one) == 1 for of_one in tokens.values()):
        rows = rows._replace(cu_num_generated_tokens=None)
    output = SimpleNamespace(
        req_id_to_index={name: index for index, name in enumerate(tokens)},
        sampled_token_ids=[[token for token, _ in of_one] for of_one in tokens.values()],
        logprobs=rows,
    )
    return {o.request_id: o for o in scheduler.update_from_output(ends or {}, output)[0].outputs}


def rows_of(output: Any) -> Tokens | None:
    if (rows := output.new_logprobs) is None:
        return None
    return list(zip(rows.logprob_token_ids[:, 0].tolist(), rows.logprobs[:, 0].tolist(), strict=True))


@pytest.mark.parametrize("per_step", [1, 3])
def test_the_logprobs_of_a_request_arrive_together_when_it_ends(inside: Any, per_step: int) -> None:
    scheduler = start(inside)
    scheduler.add_request(request("none", logprobs=None))
    scheduler.add_request(request("a"))
    scheduler.add_request(request("b"))
    made = {
        name: [[(100 * i + 10 * j + k, -i / 4 - j / 8 - k / 16) for j in range(per_step)] for i in range(5)]
        for k, name in enumerate(("none", "a", "b"))
    }
    for i in range(4):
        rows = step(scheduler, {name: tokens[i] for name, tokens in made.items()})
        assert rows == {"none": None, "a": None, "b": None}
    scheduler.n_refused = per_step - 1  # what was drafted beyond the end
    rows = step(scheduler, {name: tokens[4] for name, tokens in made.items()}, {"a": "stop", "none": "stop"})
    assert rows["none"] is None
    assert rows["b"] is None
    assert rows["a"] == [*(token for tokens in made["a"][:4] for token in tokens), made["a"][4][0]]


@pytest.mark.parametrize(
    "params",
    [{"stop": ["."]}, {"output_kind": "delta"}, {"flat_logprobs": False}],
    ids=["stop", "delta", "dicts"],
)
def test_requests_that_are_read_before_their_end_get_each_row_at_once(inside: Any, params: dict[str, Any]) -> None:
    scheduler = start(inside)
    scheduler.add_request(request("a", **params))
    scheduler.add_request(request("kept"))
    assert step(scheduler, {"a": [(3, -0.5)], "kept": [(4, -1.5)]}) == {"a": [(3, -0.5)], "kept": None}
    assert step(scheduler, {"kept": [(6, -2.5)]}, {"kept": "stop"}) == {"kept": [(4, -1.5), (6, -2.5)]}


@pytest.mark.parametrize("params", [{}, {"logprobs": None}, {"stop": ["."]}])
def test_the_routes_of_a_request_arrive_in_order(inside: Any, params: dict[str, Any]) -> None:
    """The prompt's come with the first token; each later output has those of the token before."""
    scheduler = start(inside)
    scheduler.add_request(request("a", **params))
    made = [np.full((5, 3, 2), 9, np.uint8), *(np.full((1, 3, 2), index, np.uint8) for index in range(19))]
    arrived = []
    for index, routes in enumerate(made):
        scheduler.routes = {"a": routes}
        ends = {"a": "length"} if index == len(made) - 1 else {}
        output = outputs_of(scheduler, {"a": [(index, -1.0)]}, ends)["a"]
        arrived += [] if output.routed_experts is None else [output.routed_experts]
    np.testing.assert_array_equal(np.concatenate(arrived), np.concatenate(made))
    assert len(arrived) == (len(made) if "stop" in params else 1)


def test_requests_that_a_pause_ends_arrive_with_all_that_is_kept(inside: Any) -> None:
    scheduler = start(inside)
    engine = EngineCoreProc(scheduler)
    for name in ("a", "b", "none"):
        scheduler.add_request(request(name, logprobs=None if name == "none" else 0))
    scheduler.routes = {"a": np.full((2, 1, 1), 7, np.uint8)}
    step(scheduler, {"a": [(1, -1.0)], "b": [(2, -2.0)], "none": [(3, -3.0)]})
    names = scheduler.finish_requests(None, "aborted")
    engine._send_finish_outputs_to_client(names, 4, "abort")
    client, sent = engine.output_queue.get_nowait()
    assert (client, sent.finished_requests) == (4, ["a", "b", "none"])
    assert [rows_of(output) for output in sent.outputs] == [[(1, -1.0)], [(2, -2.0)], None]
    assert {output.finish_reason for output in sent.outputs} == {"abort"}
    assert sent.outputs[0].routed_experts.tolist() == [[[7]], [[7]]]
    assert sent.outputs[1].routed_experts is None


def test_nothing_is_kept_of_a_request_that_the_api_server_ends(inside: Any) -> None:
    scheduler = start(inside)
    for name in ("a", "b", "c"):
        scheduler.add_request(request(name, stop=["."] if name == "c" else []))
    step(scheduler, {"a": [(1, -1.0)], "b": [(2, -2.0)], "c": [(3, -3.0)]})
    assert scheduler.finish_requests(["a", "c"], "aborted") == ["a", "c"]
    assert scheduler.take_ended("a") == {}
    scheduler.add_request(request("a"))
    rows = step(scheduler, {"a": [(5, -5.0)], "b": [(6, -6.0)]}, {"a": "stop", "b": "stop"})
    assert rows == {"a": [(5, -5.0)], "b": [(2, -2.0), (6, -6.0)]}
    assert (scheduler._unsent, scheduler._cut_by_vllm, scheduler._cut_off) == ({}, set(), {})


@pytest.mark.parametrize("changes", [{}, {"tokenizer": str}, {"num_logprobs": 1}], ids=["plain", "texts", "top"])
def test_rows_that_come_together_make_the_logprobs_that_vllm_makes(inside: Any, changes: dict[str, Any]) -> None:
    rows = [
        LogprobsLists(np.array([[5, 6], [7, 8]]), np.array([[-0.5, -1.0], [-0.25, -3.0]]), np.array([2, 1])),
        LogprobsLists(np.array([[9, 6]]), np.array([[-2.0, -1.0]]), np.array([4])),
    ]
    if changes != {"num_logprobs": 1}:
        rows = [LogprobsLists(part[0][:, :1], part[1][:, :1], part[2]) for part in rows]
    faster = type("Faster", (LogprobsProcessor,), {})
    inside.fivefold_generate.take_rows_together(faster)
    ours, theirs = faster(**changes), LogprobsProcessor(**deepcopy(changes))
    for part in rows:
        ours._update_sample_logprobs(part)
        theirs._update_sample_logprobs(part)
    assert vars(ours) == vars(theirs)


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
