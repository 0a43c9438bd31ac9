"""Runs inside vLLM's API server, and answers a group of completions with packed numbers.

It is on vLLM's path and its class is vLLM's `--middleware`, so it imports nothing of Fivefold, which need not be
installed beside vLLM. vLLM's own endpoint makes two objects and about 140 bytes of JSON for every log-prob, in one
thread, which takes longer than to compute the log-probs.

    POST /fivefold/generate     {"token_ids": [5, 6], "sampling_params": {"n": 2, "logprobs": 0, ...}}

    200     one line of JSON with the list of the completions, each as
                {"index": 0, "n_tokens": 3, "finish_reason": "stop", "has_logprobs": true}
            then for each completion, in the order of the list, without anything in between:
                its token ids        n_tokens little-endian int32
                their log-probs      n_tokens little-endian float32, if it has them
    400     the request cannot be answered, for the reason in the text
    500     the engine failed, or gave other log-probs than those of the sampled tokens
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

PATH = "/fivefold/generate"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Reply = tuple[int, bytes]
"""Status and content."""


class WrongLogprobs(Exception):
    """The engine gave log-probs that are not those of the sampled tokens."""


class Generate:
    """ASGI middleware that answers POST requests to `PATH`, and hands all others on."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request. A client that goes before its answer ends the request in the engine."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            return
        reply = await _unless_gone(_reply(scope["app"].state.engine_client, body), receive)
        if reply is not None:
            await _send(send, *reply)


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


async def _reply(engine: Any, body: bytes) -> Reply:
    try:
        token_ids, params = _request(body)
        outputs = await _outputs(engine, token_ids, params)
    except ValueError as error:  # vLLM's own class for what it refuses is a ValueError
        return 400, str(error).encode()
    except (EngineDeadError, EngineGenerateError) as error:
        return 500, repr(error.__cause__ or error).encode()
    try:
        return 200, _packed(outputs)
    except WrongLogprobs as error:
        return 500, str(error).encode()


def _request(body: bytes) -> tuple[list[int], SamplingParams]:
    """Return prompt and sampling parameters of a request.

    Raises:
        ValueError: it has another form, or parameters that vLLM does not know or take.
    """
    try:
        request = json.loads(body)
        token_ids = request["token_ids"]
        params = SamplingParams(
            **request["sampling_params"],
            # Otherwise vLLM makes an output after every token, and an object for every log-prob.
            output_kind=RequestOutputKind.FINAL_ONLY,
            flat_logprobs=True,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"a request is token_ids and sampling_params of vLLM's names and types: {error!r}") from error
    if not isinstance(token_ids, list) or not all(isinstance(token, int) for token in token_ids):
        raise ValueError("token_ids must be a list of integers")
    return token_ids, params


async def _outputs(engine: Any, token_ids: list[int], params: SamplingParams) -> Sequence[Any]:
    """Return the finished completions, in the engine's form."""
    final = None
    async for output in engine.generate(tokens_input(token_ids), params, f"fivefold-{uuid4().hex}"):
        final = output
    assert final is not None
    return final.outputs


def _packed(outputs: Sequence[Any]) -> bytes:
    rows, parts = [], []
    for output in outputs:
        token_ids_T = np.asarray(output.token_ids, dtype="<i4")
        if output.finish_reason == "abort" and output.logprobs is not None:
            # The scheduler has kept the last log-probs. What is before their tokens is the beginning of a completion.
            token_ids_T = token_ids_T[: len(output.logprobs)]
        rows.append(
            {
                "index": output.index,
                "n_tokens": len(token_ids_T),
                "finish_reason": output.finish_reason,
                "has_logprobs": output.logprobs is not None,
            }
        )
        parts.append(token_ids_T.tobytes())
        if output.logprobs is not None:
            parts.append(_logprobs(output.logprobs, token_ids_T).tobytes())
    return b"".join([json.dumps(rows).encode(), b"\n", *parts])


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
            f"vLLM gave {len(entries)} log-probs for {len(token_ids_T)} tokens, or gave those of other tokens than it "
            "sampled: ask for them with logprobs=0"
        )
    return np.asarray(flat.logprobs, dtype="<f4")


async def _send(send: Send, status: int, content: bytes) -> None:
    kind = b"application/octet-stream" if status == 200 else b"text/plain; charset=utf-8"
    headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
