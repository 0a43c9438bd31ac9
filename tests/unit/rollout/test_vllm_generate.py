"""Fivefold's endpoint inside vLLM's API server, over a stand-in for vLLM's engine, and what `VLLMDialect` reads."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fivefold.rollout.servers import vllm_dialect
from fivefold.rollout.servers.dialect import Answer, Ask
from fivefold.rollout.servers.vllm_dialect import VLLMDialect

PATH = VLLMDialect.generate_path
TOKENS = [[3, 4, 5], [], [2**31 - 1, 7]]
LOGPROBS = [[-0.5, -2.25, -1e-7], [], [-0.0, -17.125]]
REASONS = ["stop", "length", "stop"]


class RequestOutputKind(Enum):
    """vLLM's class of this name."""

    FINAL_ONLY = 2


@dataclass(kw_only=True)
class SamplingParams:
    """Those fields of vLLM's class that matter here."""

    n: int = 1
    temperature: float = 1.0
    logprobs: int | None = None
    output_kind: RequestOutputKind | None = None
    flat_logprobs: bool = False

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be non-negative, got {self.temperature}.")


@dataclass
class FlatLogprobs:
    """vLLM's class of this name: the entries of all positions in a row, the sampled token's first at each position."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass
class Engine:
    """A stand-in for vLLM's engine client."""

    outputs: Sequence[Any] = ()
    failure: Exception | None = None
    hangs: bool = False
    asked: list[Any] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str) -> AsyncIterator[Any]:
        self.asked.append((prompt, params, request_id))
        self.events.append("began")
        try:
            if self.hangs:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            if self.failure is not None:
                raise self.failure
        except asyncio.CancelledError:
            self.events.append("aborted")
            raise
        yield SimpleNamespace(outputs=self.outputs)


class EngineDeadError(Exception):
    """vLLM's class of this name."""


class EngineGenerateError(Exception):
    """vLLM's class of this name."""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that runs inside vLLM, beside a stand-in for vLLM."""
    contents = {
        "vllm": {},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.inputs": {"tokens_input": lambda token_ids: {"type": "token", "prompt_token_ids": token_ids}},
        "vllm.sampling_params": {"RequestOutputKind": RequestOutputKind, "SamplingParams": SamplingParams},
        "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError, "EngineGenerateError": EngineGenerateError},
    }
    for name, attributes in contents.items():
        stub = ModuleType(name)
        vars(stub).update(attributes)
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.syspath_prepend(vllm_dialect.INSIDE)
    name, _, _ = vllm_dialect.GENERATE.rpartition(".")
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


Call = Callable[..., tuple[int, bytes]]


@pytest.fixture
def call(module: ModuleType) -> Call:
    """(engine, body) -> status and content of the reply, (0, b"") without a reply."""

    def call(engine: Engine, body: bytes, *, disconnects: bool = False, **changes: Any) -> tuple[int, bytes]:
        sent: list[Any] = []
        half = len(body) // 2
        messages = [
            {"type": "http.request", "body": body[:half], "more_body": True},
            {"type": "http.request", "body": body[half:], "more_body": False},
        ]

        async def receive() -> Any:
            if messages:
                return messages.pop(0)
            while not (disconnects and engine.events):
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        async def other(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 299, "headers": []})
            await send({"type": "http.response.body", "body": scope["path"].encode()})

        async def run() -> None:
            app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
            scope = {"type": "http", "method": "POST", "path": PATH, "app": app, **changes}
            await getattr(module, vllm_dialect.GENERATE.rpartition(".")[2])(other)(scope, receive, send)
            await asyncio.sleep(0.01)  # a request that was cancelled ends after the call

        asyncio.run(run())
        if not sent:
            return 0, b""
        start, content = sent
        if headers := dict(start["headers"]):
            assert int(headers[b"content-length"]) == len(content["body"])
        return start["status"], content["body"]

    return call


def body(**sampling: Any) -> bytes:
    return json.dumps({"token_ids": [5, 6], "sampling_params": sampling}).encode()


def outputs(*, with_logprobs: bool) -> list[Any]:
    flat = [
        FlatLogprobs(ids, logprobs) if with_logprobs else None for ids, logprobs in zip(TOKENS, LOGPROBS, strict=True)
    ]
    rows = zip(TOKENS, flat, REASONS, strict=True)
    made = [
        SimpleNamespace(index=index, token_ids=token_ids, logprobs=logprobs, finish_reason=reason)
        for index, (token_ids, logprobs, reason) in enumerate(rows)
    ]
    return made[::-1]


def read(content: bytes, *, wants_logprobs: bool) -> list[Answer]:
    return VLLMDialect().answers(content, Ask((5, 6), 3, None, wants_logprobs))


@pytest.mark.parametrize("with_logprobs", [True, False])
def test_a_group_of_completions_arrives_as_the_engine_gave_it(call: Call, with_logprobs: bool) -> None:
    engine = Engine(outputs(with_logprobs=with_logprobs))
    asked = {"n": 3, "temperature": 0.7, **({"logprobs": 0} if with_logprobs else {})}
    status, content = call(engine, body(**asked))
    assert status == 200
    answers = read(content, wants_logprobs=with_logprobs)
    assert [answer.token_ids_T.tolist() for answer in answers] == TOKENS
    assert [answer.finish_reason for answer in answers] == REASONS
    for answer, logprobs in zip(answers, LOGPROBS, strict=True):
        if with_logprobs:
            assert answer.logprobs_T is not None
            assert answer.logprobs_T.tolist() == np.float32(logprobs).tolist()
        else:
            assert answer.logprobs_T is None
    [(prompt, params, _)] = engine.asked
    assert prompt == {"type": "token", "prompt_token_ids": [5, 6]}
    assert params == SamplingParams(**asked, output_kind=RequestOutputKind.FINAL_ONLY, flat_logprobs=True)


def test_every_request_has_an_id_of_its_own(call: Call) -> None:
    engine = Engine(outputs(with_logprobs=False))
    for _ in range(2):
        call(engine, body(n=3))
    assert len({request_id for _, _, request_id in engine.asked}) == 2


@pytest.mark.parametrize(
    "flat",
    [
        FlatLogprobs([3, 4, 6], [-1.0, -1.0, -1.0]),
        FlatLogprobs([3, 4], [-1.0, -1.0]),
        FlatLogprobs([3, 9, 4, 9, 5, 9], [-1.0] * 6),
    ],
    ids=["another token's", "too few", "several at each position"],
)
def test_log_probs_of_other_tokens_than_the_sampled_ones_are_an_error(call: Call, flat: FlatLogprobs) -> None:
    output = SimpleNamespace(index=0, token_ids=[3, 4, 5], logprobs=flat, finish_reason="stop")
    status, content = call(Engine([output]), body(logprobs=0))
    assert status == 500
    assert b"log-probs for 3 tokens, or gave those of other tokens" in content


@pytest.mark.parametrize(
    ("failure", "status", "text"),
    [
        (EngineDeadError("EngineCore encountered an issue"), 500, "EngineCore encountered an issue"),
        (ValueError("The decoder prompt (length 9) is longer than the maximum model length"), 400, "prompt (length 9)"),
    ],
)
def test_a_failure_of_the_engine_is_told(call: Call, failure: Exception, status: int, text: str) -> None:
    assert_refused(call(Engine(failure=failure), body()), status, text)


def test_an_engine_that_fails_in_one_request_is_answered_with_the_cause(call: Call) -> None:
    failure = EngineGenerateError()
    failure.__cause__ = OverflowError("can't serialize ints >= 2**64")
    assert_refused(call(Engine(failure=failure), body()), 500, "can't serialize ints")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "Expecting property name"),
        (b'{"token_ids": [5]}', "KeyError('sampling_params')"),
        (b'[5]', "TypeError"),
        (body(top_q=1), "unexpected keyword argument 'top_q'"),
        (body(temperature=-1), "temperature must be non-negative, got -1."),
        (b'{"token_ids": "ab", "sampling_params": {}}', "token_ids must be a list of integers"),
        (b'{"token_ids": [1, 2.5], "sampling_params": {}}', "token_ids must be a list of integers"),
    ],
)  # fmt: skip
def test_a_request_of_another_form_is_refused(call: Call, content: bytes, text: str) -> None:
    engine = Engine()
    assert_refused(call(engine, content), 400, text)
    assert engine.asked == []


def assert_refused(reply: tuple[int, bytes], status: int, text: str) -> None:
    assert reply[0] == status
    assert text in reply[1].decode()


@pytest.mark.parametrize("change", [{"path": "/health"}, {"method": "GET"}, {"type": "websocket"}])
def test_other_requests_are_handed_on(call: Call, change: dict[str, str]) -> None:
    engine = Engine()
    assert call(engine, body(), **change) == (299, change.get("path", PATH).encode())
    assert engine.asked == []


def test_a_client_that_goes_ends_its_request_in_the_engine(call: Call) -> None:
    engine = Engine(hangs=True)
    assert call(engine, body(), disconnects=True) == (0, b"")
    assert engine.events == ["began", "aborted"]


@pytest.mark.parametrize("missing", [1, 4])
def test_an_answer_that_is_cut_off_is_an_error(call: Call, missing: int) -> None:
    _, content = call(Engine(outputs(with_logprobs=True)), body(n=3, logprobs=0))
    with pytest.raises(RuntimeError, match="bytes of numbers where it announces 40"):
        read(content[:-missing], wants_logprobs=True)


@pytest.mark.parametrize("logprob", [np.nan, -np.inf, np.inf, -9999.0])
def test_a_log_prob_that_no_sampled_token_has_is_an_error(call: Call, logprob: float) -> None:
    flat = FlatLogprobs([3, 4, 5], [-1.0, logprob, -1.0])
    output = SimpleNamespace(index=0, token_ids=[3, 4, 5], logprobs=flat, finish_reason="stop")
    _, content = call(Engine([output]), body(logprobs=0))
    with pytest.raises(RuntimeError, match="answered 3 tokens with 2 log-probs: every token needs a number"):
        read(content, wants_logprobs=True)
