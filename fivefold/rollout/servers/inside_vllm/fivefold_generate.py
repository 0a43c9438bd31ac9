"""Runs inside vLLM's API server, and answers a completion with packed numbers.

It is on vLLM's path and its class is vLLM's `--middleware`, so it imports nothing of Fivefold, which need not be
installed next to vLLM. vLLM's own endpoint makes two objects and about 140 bytes of JSON for every log-prob, in one
thread, which takes longer than to compute the log-probs.

    POST /fivefold/generate     {"token_ids": [5, 6], "sampling_params": {"logprobs": 0, ...}}
                                with "images" among the tokens as `fivefold_images` describes

    200     one line of JSON,
                {"n_tokens": 3, "finish_reason": "stop", "has_logprobs": true, "versions": [[4, 2], [5, 1]]}
            then, without anything in between:
                the token ids        n_tokens little-endian int32
                their log-probs      n_tokens little-endian float32, if there are any
                routes               the experts of the prompt's and the completion's tokens but for the last one, by
                                     layer of "route_layers": [tokens, layers, top_k], if the request names layers.
                                     "routes": ["uint8", 8, 4, 2] in the line is their dtype and shape
            versions says which weights sampled how many tokens, one after the other. It is missing where they were
            never told
    400     the request cannot be answered, for the reason in the text
    500     the engine failed, or gave log-probs of other tokens than the sampled ones

New weights may come between two tokens of a request, which keeps its keys and values:

    POST /fivefold/hold         {}                  pause
    POST /fivefold/go_on        {"version": 5}      continue, with weights of this version

Blocks of vLLM's cache of prefixes are salted with the version with which a request began, so that none begins on those
of other weights. What has no token when the server pauses is therefore restarted once it continues.

Low-rank adapters may be next to the weights, which then never change. All requests are answered with those that came
last, and blocks are salted with their version:

    POST /fivefold/adapters     {"path": "/dev/shm/...", "version": 5}      a folder of PEFT, which may go afterwards

    POST /fivefold/beat         {}                  answered once a token has been sampled, or if none is to be
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.logprobs import LogprobsProcessor

PATH, BEAT = "/fivefold/generate", "/fivefold/beat"
HOLD, GO_ON = "/fivefold/hold", "/fivefold/go_on"
ADAPTERS = "/fivefold/adapters"
ADAPTERS_NAME, ADAPTERS_ID = "fivefold", 1
"""What vLLM knows all versions of the adapters by. Requests that are held continue with the newest, and it counts
each name in a batch as further adapters."""
BEAT_S = 0.05
"""Seconds between two looks at how many tokens there are."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Reply = tuple[int, bytes]
"""Status and content."""


class WrongLogprobs(Exception):
    """The engine gave log-probs that are not the sampled tokens'."""


class AdaptersRefused(Exception):
    """The engine did not take adapters."""


class OtherPrompt(Exception):
    """The engine completed other tokens than the request's."""


@dataclass(frozen=True)
class Asked:
    """What a request asks for."""

    token_ids: list[int]
    """The prompt's."""
    params: SamplingParams
    layers: list[int] | None
    """Layers whose routes it asks for; None: of none."""
    images: list[dict[str, Any]]
    """The images among its tokens."""


@dataclass(eq=False)
class Running:
    """A request that the engine has."""

    name: str
    work: asyncio.Task[Any]
    """Waits for the completion, in the engine's form."""
    version: int | None
    """Version of the weights that sample its next token; None: it was never told."""
    held: list[tuple[int | None, int]] = field(default_factory=list)
    """For each time that the server stood still: the version until then, and the tokens so far."""


class Generate:
    """ASGI middleware that answers POST requests to its own paths, and hands all others on."""

    def __init__(self, app: App) -> None:
        take_rows_together(LogprobsProcessor)
        self._app = app
        self._running: set[Running] = set()
        self._version: int | None = None
        self._adapters: LoRARequest | None = None
        """The adapters that answer requests; None: there are none."""
        self._adapters_version: int | None = None
        self._goes_on = asyncio.Event()
        self._goes_on.set()
        self._n_answered = 0
        """Tokens of the requests that are answered."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request. A client that goes before its answer ends the request in the engine."""
        own = {
            PATH: self._generate,
            BEAT: self._beat,
            HOLD: self._hold,
            GO_ON: self._go_on,
            ADAPTERS: self._take_adapters,
        }
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in own:
            await self._app(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            return
        work = own[scope["path"]](scope["app"].state.engine_client, body)
        reply = await _unless_gone(_reply(work), receive)
        if reply is not None:
            await _send(send, *reply)

    async def _generate(self, engine: Any, body: bytes) -> bytes:
        asked = _request(body)
        if self._version is not None:
            # vLLM looks these up before it takes its first request. With them, it takes one without waiting, so that a
            # hold finds it there.
            await engine.get_supported_tasks()
        while True:
            await self._goes_on.wait()
            name = f"fivefold-{uuid4().hex}"
            work = asyncio.create_task(_output(engine, self._prompt(asked), asked, name, self._adapters))
            running = Running(name, work, self._version)
            self._running.add(running)
            try:
                await asyncio.wait({work})
            finally:
                self._running.discard(running)
                work.cancel()
            if not work.cancelled():  # only `_hold` has cancelled it
                output = work.result()
                self._n_answered += len(output.token_ids)
                return _packed(output, running, asked.layers)

    async def _beat(self, engine: Any, body: bytes) -> bytes:
        """Return once the engine has sampled a token of a request, or if it has none."""
        n_tokens = self._n_sampled(engine)
        while self._running and self._n_sampled(engine) == n_tokens:
            await asyncio.sleep(BEAT_S)
        return b"{}"

    def _n_sampled(self, engine: Any) -> int:
        """Return how many tokens have been sampled since the start. One whose answer is on the way may be missing."""
        return self._n_answered + sum(_n_tokens(engine, running) or 0 for running in self._running)

    def _prompt(self, asked: Asked) -> Any:
        salt = {}
        if self._version is not None:
            salt = {"cache_salt": f"weights {self._version}"}
        elif self._adapters_version is not None:
            salt = {"cache_salt": f"adapters {self._adapters_version}"}
        if not asked.images:
            return tokens_input(asked.token_ids, **salt)
        from fivefold_images import prompt_with  # by requests with images

        return prompt_with(asked.images, asked.token_ids, salt)

    async def _take_adapters(self, engine: Any, body: bytes) -> bytes:
        """Let the engine read adapters, in place of the last ones.

        Raises:
            AdaptersRefused: it cannot.
        """
        asked = json.loads(body)
        names = {"lora_name": ADAPTERS_NAME, "lora_int_id": ADAPTERS_ID, "lora_path": asked["path"]}
        try:
            is_loaded = await engine.add_lora(LoRARequest(**names, load_inplace=True))
        except Exception as error:
            # vLLM's client raises this very class for all that fails in its engine, which lives on.
            if type(error) is not Exception:
                raise
            raise AdaptersRefused(f"vLLM cannot load the adapters: {error}") from error
        if not is_loaded:
            raise AdaptersRefused("vLLM did not load the adapters, and does not say why")
        # With `load_inplace`, every step of the engine would read them again.
        self._adapters, self._adapters_version = LoRARequest(**names), asked["version"]
        return b"{}"

    async def _hold(self, engine: Any, body: bytes) -> bytes:
        """Let the engine pause, and note how many tokens each of its requests has."""
        self._goes_on.clear()
        await engine.pause_generation(mode="keep", clear_cache=False)
        await _all_taken_over(engine)
        begun_anew = []
        for running in list(self._running):
            sampled = _n_tokens(engine, running)
            if sampled is None:  # it has ended, and its answer is on the way
                self._running.discard(running)
                continue
            running.held.append((running.version, sampled))
            if not sampled:
                running.work.cancel()
                begun_anew.append(running.work)
        if begun_anew:
            await asyncio.wait(begun_anew)
        return b"{}"

    async def _go_on(self, engine: Any, body: bytes) -> bytes:
        """Let the engine continue, with weights of the version that the request names."""
        version = json.loads(body)["version"]
        self._version = version
        for running in self._running:
            running.version = version
        await engine.resume_generation()
        self._goes_on.set()
        return b"{}"


def take_rows_together(processor: Any) -> None:
    """Make vLLM add the log-probs of all tokens of a request at once.

    Symptom: the answers of 512 requests that end together come seconds late.
    Cause: vLLM turns each token's arrays into lists, and appends their one entry to six lists.
    Instead: the lists of a request without texts grow by all of its rows, which `fivefold_scheduler` sends together.
    Remove this together with that scheduler.

    Args:
        processor: vLLM's class of what holds the log-probs of one request.
    """
    one_by_one = processor._update_sample_logprobs

    def update(self: Any, rows: Any) -> None:
        flat = self.logprobs
        if not isinstance(flat, FlatLogprobs) or self.tokenizer is not None or self.num_logprobs != 0:
            one_by_one(self, rows)
            return
        begin, values = len(flat.logprobs), rows.logprobs[:, 0].tolist()
        end = begin + len(values)
        flat.start_indices.extend(range(begin, end))
        flat.end_indices.extend(range(begin + 1, end + 1))
        flat.token_ids.extend(rows.logprob_token_ids[:, 0].tolist())
        flat.logprobs.extend(values)
        flat.ranks.extend(rows.sampled_token_ranks.tolist())
        flat.decoded_tokens.extend([None] * len(values))
        self.cumulative_logprob += sum(values)

    processor._update_sample_logprobs = update


async def _body(receive: Receive) -> bytes | None:
    """Return the content of a request; None: the client is gone."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _unless_gone(work: Coroutine[Any, Any, Reply], receive: Receive) -> Reply | None:
    """Return the result of `work`; None: the client has gone, and `work` is cancelled."""
    working, going = asyncio.create_task(work), asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({working, going}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        # vLLM aborts a request whose generator is cancelled.
        working.cancel()
        going.cancel()


async def _disconnect(receive: Receive) -> None:
    """Return once the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _reply(work: Awaitable[bytes]) -> Reply:
    try:
        return 200, await work
    except ValueError as error:  # vLLM's own class for what it refuses is a ValueError
        return 400, str(error).encode()
    except (EngineDeadError, EngineGenerateError) as error:
        return 500, repr(error.__cause__ or error).encode()
    except (WrongLogprobs, AdaptersRefused, OtherPrompt) as error:
        return 500, str(error).encode()


def _request(body: bytes) -> Asked:
    """Return what a request asks for.

    Raises:
        ValueError: it has another form, or parameters that vLLM does not know or take.
    """
    try:
        request = json.loads(body)
        token_ids = request["token_ids"]
        asked = request["sampling_params"]
        if "logit_bias" in asked:  # JSON has texts as keys
            asked["logit_bias"] = {int(token): bias for token, bias in asked["logit_bias"].items()}
        params = SamplingParams(
            **asked,
            # Otherwise vLLM makes an output after every token, and an object for every log-prob.
            output_kind=RequestOutputKind.FINAL_ONLY,
            flat_logprobs=True,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"a request is token_ids and sampling_params of vLLM's names and types: {error!r}") from error
    if not isinstance(token_ids, list) or not all(isinstance(token, int) for token in token_ids):
        raise ValueError("token_ids must be a list of integers")
    return Asked(token_ids, params, request.get("route_layers"), request.get("images", []))


async def _output(engine: Any, prompt: Any, asked: Asked, name: str, adapters: LoRARequest | None) -> Any:
    """Return the finished completion, in the engine's form.

    Raises:
        OtherPrompt: it completes other tokens than the request's, among which there are images.
    """
    final = None
    async for output in engine.generate(prompt, asked.params, name, lora_request=adapters):
        final = output
    assert final is not None
    if asked.images and list(final.prompt_token_ids) != asked.token_ids:
        raise OtherPrompt(
            f"vLLM made {len(final.prompt_token_ids)} tokens of a prompt with images that has {len(asked.token_ids)}, "
            "or has changed some: its completions would not be the trainer's, so use rollout.backend=transformers:d1"
        )
    return final.outputs[0]


async def _all_taken_over(engine: Any) -> None:
    """Return once this process has taken over all that the engine sampled before it stood still.

    The engine's outputs come before its answer to the pause, into a queue. vLLM's task takes the next ones out when it
    is done with those before. So it is done with all of them when it has taken a last one, which has nothing in it.
    """
    if engine.output_handler is None:  # the task begins with the first request
        return
    outputs = engine.engine_core.outputs_queue
    outputs.put_nowait(EngineCoreOutputs())
    while not outputs.empty():
        await asyncio.sleep(0.001)


def _n_tokens(engine: Any, running: Running) -> int | None:
    """Return how many tokens vLLM's API server has of a request's completion; None: it has ended."""
    processor = engine.output_processor
    for name in processor.external_req_ids.get(running.name, ()):
        n_tokens: int = processor.request_states[name].detokenizer.num_output_tokens()
        return n_tokens
    return None


def _packed(output: Any, running: Running, layers: list[int] | None = None) -> bytes:
    token_ids_T = np.asarray(output.token_ids, dtype="<i4")
    if output.finish_reason == "abort" and output.logprobs is not None:
        # The scheduler has kept the last log-probs. What is before their tokens is the beginning of a completion.
        token_ids_T = token_ids_T[: len(output.logprobs)]
    head = {
        "n_tokens": len(token_ids_T),
        "finish_reason": output.finish_reason,
        "has_logprobs": output.logprobs is not None,
        **({} if running.version is None else {"versions": _versions(running, len(token_ids_T))}),
    }
    routes = b""
    if layers is not None and output.routed_experts is not None:
        chosen = np.ascontiguousarray(output.routed_experts[:, layers])
        routes = chosen.tobytes()
        head["routes"] = [chosen.dtype.name, *chosen.shape]
    logprobs = b"" if output.logprobs is None else _logprobs(output.logprobs, token_ids_T).tobytes()
    return b"".join([json.dumps(head).encode(), b"\n", token_ids_T.tobytes(), logprobs, routes])


def _versions(running: Running, n_tokens: int) -> list[tuple[int | None, int]]:
    """Return which weights sampled how many of a completion's tokens, one after the other."""
    spans, begin = [], 0
    for version, sampled in [*running.held, (running.version, n_tokens)]:
        end = min(sampled, n_tokens)
        spans.append((version, end - begin))
        begin = end
    return spans


def _logprobs(flat: Any, token_ids_T: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Return the log-probs [T] of the sampled tokens.

    Args:
        flat: vLLM's `FlatLogprobs`. With `logprobs: 0` it has one entry for each position, the sampled token's.
        token_ids_T: the sampled tokens.

    Raises:
        WrongLogprobs: it has other entries.
    """
    entries = np.asarray(flat.token_ids, dtype=np.int32)
    if not np.array_equal(entries, token_ids_T):
        raise WrongLogprobs(
            f"vLLM gave {len(entries)} log-probs for {len(token_ids_T)} tokens, or gave other tokens' than it "
            "sampled: ask for them with logprobs=0"
        )
    return np.asarray(flat.logprobs, dtype="<f4")


async def _send(send: Send, status: int, content: bytes) -> None:
    kind = b"application/octet-stream" if status == 200 else b"text/plain; charset=utf-8"
    headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
