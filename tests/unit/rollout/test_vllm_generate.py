"""Fivefold's endpoint inside vLLM's API server, over a stand-in for vLLM's engine, and what `VLLMDialect` reads."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fivefold.rollout.servers import vllm_dialect
from fivefold.rollout.servers.dialect import Answer, Ask
from fivefold.rollout.servers.vllm_dialect import ADAPTERS, BEAT, GO_ON, HOLD, VLLMDialect
from tests.unit.rollout.stand_ins import stand_in

PATH = VLLMDialect.generate_path
COMPLETIONS = [
    ([3, 4, 5], [-0.5, -2.25, -1e-7], "stop"),
    ([], [], "length"),
    ([2**31 - 1, 7], [-0.0, -17.125], "stop"),
]
"""Tokens, log-probs, and why each ended."""


class RequestOutputKind(Enum):
    """vLLM's class of this name."""

    FINAL_ONLY = 2


@dataclass(kw_only=True)
class SamplingParams:
    """Those fields of vLLM's class that matter here."""

    temperature: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    output_kind: RequestOutputKind | None = None
    flat_logprobs: bool = False

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be non-negative, got {self.temperature}.")


@dataclass(frozen=True)
class LoRARequest:
    """vLLM's class of this name."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


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

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, lora_request: LoRARequest | None
    ) -> AsyncIterator[Any]:
        assert lora_request is None, "no adapters have come"
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


class State:
    """What vLLM's API server has of a request that has not ended; its detokenizer is this too."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.detokenizer = self
        self.finals: asyncio.Queue[Any] = asyncio.Queue()

    def num_output_tokens(self) -> int:
        return len(self.token_ids)


class Sampler:
    """A stand-in for vLLM's engine client, whose engine samples a token of each request when it is told to.

    The outputs of the engine wait in a queue, out of which a slow task takes them one after the other.
    """

    def __init__(self) -> None:
        self.output_processor = SimpleNamespace(request_states={}, external_req_ids=defaultdict(list))
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue())
        self.output_handler: asyncio.Task[None] | None = None
        self.lengths: dict[str, int] = {}
        """Tokens that the engine has sampled of each request that is not whole."""
        self.at_pause: Callable[[], None] = lambda: None
        """What the engine still does before it answers a pause."""
        self.is_paused = False
        self.salts: list[str | None] = []
        self.adapters: list[LoRARequest | None] = []
        """Of each request."""
        self.loaded: list[LoRARequest] = []
        self.failure: Exception | None = None
        """Of the next adapters."""
        self.aborted: list[str] = []

    async def get_supported_tasks(self) -> tuple[str, ...]:
        await asyncio.sleep(0.01)
        return ("generate",)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        if self.failure is not None:
            raise self.failure
        self.loaded.append(lora_request)
        return Path(lora_request.lora_path).is_absolute()

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, lora_request: LoRARequest | None
    ) -> AsyncIterator[Any]:
        if self.output_handler is None:
            self.output_handler = asyncio.create_task(self._take_outputs())
        name, state = f"{request_id}-1a2b3c4d", State()
        self.output_processor.request_states[name] = state
        self.output_processor.external_req_ids[request_id].append(name)
        self.salts.append(prompt.get("cache_salt"))
        self.adapters.append(lora_request)
        self.lengths[name] = 0
        try:
            yield await state.finals.get()
        except asyncio.CancelledError:
            self._forget(name)
            self.aborted.append(name)
            raise

    def sample(self, *, ends: bool = False) -> None:
        """Sample a token of each request, and end them."""
        for name in self.lengths:
            self.lengths[name] += 1
        self.engine_core.outputs_queue.put_nowait(SimpleNamespace(outputs=list(self.lengths), ends=ends))
        self.lengths = {} if ends else self.lengths

    async def _take_outputs(self) -> None:
        while True:
            taken = await self.engine_core.outputs_queue.get()
            for name in taken.outputs:
                await asyncio.sleep(0.005)
                if state := self.output_processor.request_states.get(name):
                    state.token_ids.append(7)
                    if taken.ends:
                        output = SimpleNamespace(token_ids=state.token_ids, logprobs=None, finish_reason="stop")
                        state.finals.put_nowait(SimpleNamespace(outputs=[output]))
                        self._forget(name)

    def _forget(self, name: str) -> None:
        self.lengths.pop(name, None)
        self.output_processor.request_states.pop(name)
        external, _, _ = name.rpartition("-")
        self.output_processor.external_req_ids.pop(external)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self.is_paused = True
        self.at_pause()
        await asyncio.sleep(0.001)

    async def resume_generation(self) -> None:
        self.is_paused = False


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
        "vllm.v1.engine": {"EngineCoreOutputs": lambda: SimpleNamespace(outputs=[], ends=False)},
        "vllm.lora": {},
        "vllm.logprobs": {"FlatLogprobs": list},
        "vllm.v1.engine.logprobs": {"LogprobsProcessor": SimpleNamespace(_update_sample_logprobs=None)},
        "vllm.lora.request": {"LoRARequest": LoRARequest},
        "vllm.inputs": {"tokens_input": lambda ids, **salt: {"type": "token", "prompt_token_ids": ids, **salt}},
        "vllm.sampling_params": {"RequestOutputKind": RequestOutputKind, "SamplingParams": SamplingParams},
        "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError, "EngineGenerateError": EngineGenerateError},
    }
    stand_in(monkeypatch, contents)
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


def test_routes_are_of_the_layers_that_are_asked_for(call: Call) -> None:
    routes = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)  # two tokens of the prompt, two of the completion
    made = outputs((3, 4, 5), (-0.5, -1.0, -2.0))
    made[0].routed_experts = routes
    asked = json.dumps({"token_ids": [5, 6], "sampling_params": {"logprobs": 0}, "route_layers": [0, 2]}).encode()
    status, content = call(Engine(made), asked)
    assert status == 200
    answer = read(content, wants_logprobs=True)
    np.testing.assert_array_equal(answer.routes, routes[:, [0, 2]])
    assert answer.logprobs_T is not None
    assert answer.logprobs_T.tolist() == [-0.5, -1.0, -2.0]
    _, content = call(Engine(made), body(logprobs=0))
    assert read(content, wants_logprobs=True).routes is None


def outputs(
    token_ids: Sequence[int] = (3, 4, 5), logprobs: Sequence[float] | None = None, reason: str = "stop"
) -> list[Any]:
    flat = None if logprobs is None else FlatLogprobs(list(token_ids), list(logprobs))
    return [SimpleNamespace(token_ids=token_ids, logprobs=flat, finish_reason=reason)]


def read(content: bytes, *, wants_logprobs: bool) -> Answer:
    return VLLMDialect().answer(content, Ask((5, 6), None, wants_logprobs))


@pytest.mark.parametrize("with_logprobs", [True, False])
@pytest.mark.parametrize(("token_ids", "logprobs", "reason"), COMPLETIONS)
def test_a_completion_arrives_as_the_engine_gave_it(
    call: Call, token_ids: list[int], logprobs: list[float], reason: str, with_logprobs: bool
) -> None:
    engine = Engine(outputs(token_ids, logprobs if with_logprobs else None, reason))
    asked = {"temperature": 0.7, **({"logprobs": 0} if with_logprobs else {})}
    status, content = call(engine, body(**asked))
    assert status == 200
    answer = read(content, wants_logprobs=with_logprobs)
    assert answer.token_ids_T.tolist() == token_ids
    assert answer.finish_reason == reason
    if with_logprobs:
        assert answer.logprobs_T is not None
        assert answer.logprobs_T.tolist() == np.float32(logprobs).tolist()
    else:
        assert answer.logprobs_T is None
    [(prompt, params, _)] = engine.asked
    assert prompt == {"type": "token", "prompt_token_ids": [5, 6]}
    assert params == SamplingParams(**asked, output_kind=RequestOutputKind.FINAL_ONLY, flat_logprobs=True)


def test_a_bias_is_by_number_of_the_token(call: Call) -> None:
    """JSON has texts as keys, and vLLM takes the mapping as it is."""
    engine = Engine(outputs([7], None, "stop"))
    call(engine, body(logit_bias={"7": -2.0, "8": -1e9}))
    [(_, params, _)] = engine.asked
    assert params.logit_bias == {7: -2.0, 8: -1e9}


def test_every_request_has_an_id_of_its_own(call: Call) -> None:
    engine = Engine(outputs())
    for _ in range(2):
        call(engine, body())
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
    output = SimpleNamespace(token_ids=[3, 4, 5], logprobs=flat, finish_reason="stop")
    status, content = call(Engine([output]), body(logprobs=0))
    assert status == 500
    assert b"log-probs for 3 tokens, or gave other tokens' than" in content


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
    _, content = call(Engine(outputs(logprobs=[-0.5, -2.25, -1e-7])), body(logprobs=0))
    with pytest.raises(RuntimeError, match="bytes of numbers where it announces 24"):
        read(content[:-missing], wants_logprobs=True)


@pytest.mark.parametrize("logprob", [np.nan, -np.inf, np.inf, -9999.0])
def test_a_log_prob_that_no_sampled_token_has_is_an_error(call: Call, logprob: float) -> None:
    flat = FlatLogprobs([3, 4, 5], [-1.0, logprob, -1.0])
    output = SimpleNamespace(token_ids=[3, 4, 5], logprobs=flat, finish_reason="stop")
    _, content = call(Engine([output]), body(logprobs=0))
    with pytest.raises(RuntimeError, match="answered 3 tokens with 2 log-probs: every token needs a number"):
        read(content, wants_logprobs=True)


class Server:
    """The endpoints over a `Sampler`."""

    def __init__(self, module: ModuleType) -> None:
        self.engine = Sampler()
        self._app = getattr(module, vllm_dialect.GENERATE.rpartition(".")[2])(None)

    async def post(self, path: str, content: bytes = b"{}") -> tuple[int, bytes]:
        messages, sent = [{"type": "http.request", "body": content}], list[Any]()

        async def receive() -> Any:
            return messages.pop(0) if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        app = SimpleNamespace(state=SimpleNamespace(engine_client=self.engine))
        await self._app({"type": "http", "method": "POST", "path": path, "app": app}, receive, send)
        return sent[0]["status"], sent[1]["body"]

    async def hold(self) -> None:
        assert (await self.post(HOLD))[0] == 200

    async def take_adapters(self, version: int) -> None:
        content = json.dumps({"path": f"/dev/shm/{version}", "version": version}).encode()
        assert (await self.post(ADAPTERS, content))[0] == 200

    async def beats(self) -> bool:
        """Return whether the server says within a moment that it goes on."""
        with suppress(TimeoutError):
            return (await asyncio.wait_for(self.post(BEAT), 0.3))[0] == 200
        return False

    async def go_on(self, version: int) -> None:
        assert (await self.post(GO_ON, json.dumps({"version": version}).encode()))[0] == 200

    async def ask(self, n_running: int) -> asyncio.Task[list[int]]:
        """Begin a request, and wait until the engine has so many; the task returns the versions of its tokens."""

        async def versions() -> list[int]:
            status, content = await self.post(PATH, body())
            assert status == 200
            answer = VLLMDialect().answer(content, Ask((5, 6), None, wants_logprobs=False))
            assert answer.versions_T is not None
            return answer.versions_T.tolist()

        asked = asyncio.create_task(versions())
        while len(self.engine.lengths) < n_running:
            await asyncio.sleep(0.001)
        return asked

    async def sampled(self, n: int) -> None:
        """Let the engine sample so many tokens of each request, and the API server take them over."""
        for _ in range(n):
            self.engine.sample()
        while not self.engine.engine_core.outputs_queue.empty():
            await asyncio.sleep(0.001)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def test_a_held_request_tells_which_weights_sampled_each_token(module: ModuleType) -> None:
    async def scenario() -> None:
        server = Server(module)
        await server.go_on(4)
        asked = await server.ask(1)
        await server.sampled(2)
        # What the engine samples before it stands still is taken over late.
        server.engine.at_pause = server.engine.sample
        await server.hold()
        assert server.engine.is_paused
        await server.go_on(5)
        assert not server.engine.is_paused
        other = await server.ask(2)
        await server.sampled(1)
        await server.hold()
        await server.go_on(6)
        await server.sampled(1)
        server.engine.sample(ends=True)
        assert await asked == [4, 4, 4, 5, 5, 6, 6]
        assert await other == [5, 5, 6, 6]
        assert server.engine.salts == ["weights 4", "weights 5"], "each began on keys and values of its own version"
        assert server.engine.aborted == []

    run(scenario())


def test_a_request_that_ended_before_the_hold_has_the_old_version(module: ModuleType) -> None:
    async def scenario() -> None:
        server = Server(module)
        await server.go_on(1)
        asked = await server.ask(1)
        await server.sampled(1)
        server.engine.at_pause = lambda: server.engine.sample(ends=True)
        await server.hold()
        await server.go_on(2)
        assert await asked == [1, 1]

    run(scenario())


def test_a_request_without_a_token_begins_anew_with_the_new_weights(module: ModuleType) -> None:
    async def scenario() -> None:
        server = Server(module)
        await server.go_on(1)
        asked = await server.ask(1)
        await server.hold()
        [aborted] = server.engine.aborted
        # So does one that comes while the server stands still.
        late = await server.ask(0)
        await asyncio.sleep(0.05)
        assert server.engine.lengths == {}
        await server.go_on(2)
        while len(server.engine.lengths) < 2:
            await asyncio.sleep(0.001)
        assert aborted not in server.engine.lengths
        server.engine.sample(ends=True)
        assert (await asked, await late) == ([2], [2])
        assert server.engine.salts == ["weights 1", "weights 2", "weights 2"]

    run(scenario())


def test_a_server_that_was_never_told_its_version_salts_nothing(module: ModuleType) -> None:
    async def scenario() -> None:
        server = Server(module)
        asked = asyncio.create_task(server.post(PATH, body()))
        while not server.engine.lengths:
            await asyncio.sleep(0.001)
        server.engine.sample(ends=True)
        _, content = await asked
        assert b"versions" not in content
        assert server.engine.salts == [None]

    run(scenario())


def test_requests_are_answered_with_the_adapters_that_came_last_and_not_from_what_was_cached_with_others(
    module: ModuleType,
) -> None:
    async def scenario() -> None:
        server = Server(module)
        for version in (1, 2):
            await server.take_adapters(version)
            asked = asyncio.create_task(server.post(PATH, body()))
            while not server.engine.lengths:
                await asyncio.sleep(0.001)
            server.engine.sample(ends=True)
            assert (await asked)[0] == 200
        assert server.engine.salts == ["adapters 1", "adapters 2"]
        # One number and name: held requests continue with the new ones, and vLLM has room for one set.
        names = {"lora_name": "fivefold", "lora_int_id": 1}
        assert server.engine.loaded == [
            LoRARequest(**names, lora_path=f"/dev/shm/{version}", load_inplace=True) for version in (1, 2)
        ]
        assert server.engine.adapters == [LoRARequest(**names, lora_path=f"/dev/shm/{version}") for version in (1, 2)]

    run(scenario())


def test_held_requests_continue_with_new_adapters_and_later_ones_have_their_own_cache(module: ModuleType) -> None:
    async def scenario() -> None:
        server = Server(module)
        await server.take_adapters(1)
        await server.go_on(1)
        asked = await server.ask(1)
        await server.sampled(1)
        await server.hold()
        await server.take_adapters(2)
        await server.go_on(2)
        other = await server.ask(2)
        server.engine.sample(ends=True)
        assert (await asked, await other) == ([1, 2], [2])
        assert server.engine.salts == ["weights 1", "weights 2"]
        assert {adapters.lora_int_id for adapters in server.engine.adapters if adapters} == {1}

    run(scenario())


@pytest.mark.parametrize(
    ("failure", "path", "says"),
    [
        (Exception("Call to add_lora method failed: rank 64 is above 32"), "/dev/shm/1", "rank 64 is above 32"),
        (None, "relative", "does not say why"),
        (EngineDeadError(), "/dev/shm/1", "EngineDeadError"),
    ],
)
def test_adapters_that_the_engine_does_not_load_are_an_error(
    module: ModuleType, failure: Exception | None, path: str, says: str
) -> None:
    async def scenario() -> None:
        server = Server(module)
        server.engine.failure = failure
        status, content = await server.post(ADAPTERS, json.dumps({"path": path, "version": 1}).encode())
        assert status == 500
        assert says in content.decode()

    run(scenario())


def test_a_server_shows_that_it_goes_on_by_the_next_token_or_without_requests(module: ModuleType) -> None:
    async def scenario() -> None:
        server = Server(module)
        assert await server.beats()
        first, second = [asyncio.create_task(server.post(PATH, body())) for _ in range(2)]
        while len(server.engine.lengths) < 2:
            await asyncio.sleep(0.001)
        await server.sampled(3)
        states = server.engine.output_processor.request_states.values()
        while [len(state.token_ids) for state in states] != [3, 3]:
            await asyncio.sleep(0.001)
        assert not await server.beats(), "the tokens from before say nothing"
        beat = asyncio.create_task(server.post(BEAT))
        await asyncio.sleep(0.01)
        assert not beat.done()
        await server.sampled(1)
        assert (await beat)[0] == 200
        beat = asyncio.create_task(server.post(BEAT))
        await asyncio.sleep(0.01)
        server.engine.sample(ends=True)
        assert (await beat)[0] == (await first)[0] == (await second)[0] == 200

    run(scenario())


def test_versions_of_other_tokens_than_the_sampled_ones_are_an_error() -> None:
    head = {"n_tokens": 1, "finish_reason": "stop", "has_logprobs": False, "versions": [[1, 2]]}
    content = json.dumps(head).encode() + b"\n" + np.array([7], "<i4").tobytes()
    with pytest.raises(RuntimeError, match=r"tells the versions \[\[1, 2\]\] of 1 tokens"):
        VLLMDialect().answer(content, Ask((5,), None, wants_logprobs=False))
