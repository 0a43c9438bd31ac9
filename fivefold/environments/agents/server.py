"""The HTTP server of the sessions of one replica, on the loopback interface.

    agent ──POST /s/<secret>/v1/chat/completions──> server's thread ──> the player's loop: session ──> engine

A session is in its URL, so that any client works that takes a base URL. The secret keeps other users of the machine
out, who could otherwise write what is trained on.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fivefold.environments.agents.chat import Chat, complete_text, events
from fivefold.environments.agents.messages import answer_messages, message_events
from fivefold.environments.agents.responses import answer_response, response_events
from fivefold.environments.agents.session import MODEL, Refused, Session
from fivefold.environments.agents.token_routes import generate_as_sglang, generate_as_vllm, sglang_events
from fivefold.environments.own_time import OwnTime
from fivefold.json_text import parsed

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
START_S = 30.0
"""Seconds that the server has to listen."""
MOST_BYTES = 64 * 2**20
"""Largest body of a request."""
INSTALL = "pip install 'fivefold[agents]'"


@dataclass(frozen=True)
class Open:
    """An open session, and the loop in which it answers."""

    session: Session
    chat: Chat
    loop: asyncio.AbstractEventLoop
    own: OwnTime
    """The agent's time, without the time that it waits for answers."""


class SessionServer:
    """Serves sessions until the process ends."""

    def __init__(self) -> None:
        """Listen in a thread.

        Raises:
            ValueError: a package is missing.
        """
        try:
            import uvicorn
        except ImportError as error:
            raise ValueError(f"environment.agent needs the package {error.name}: {INSTALL}") from error
        self._open: dict[str, Open] = {}
        listener = socket.create_server((HOST, 0))
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(self._app(), log_level="warning", access_log=False, timeout_keep_alive=86_400)
        server = uvicorn.Server(config)
        threading.Thread(target=server.run, args=([listener],), name="sessions", daemon=True).start()
        deadline = time.monotonic() + START_S
        while not server.started:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server of sessions does not listen within {START_S:g} s")
            time.sleep(0.005)

    def open(self, session: Session, own: OwnTime) -> str:
        """Let clients reach a session; return its base URL. Call this in the loop in which the session answers."""
        secret = secrets.token_urlsafe(24)
        self._open[secret] = Open(session, Chat(session), asyncio.get_running_loop(), own)
        return f"http://{HOST}:{self._port}/s/{secret}/v1"

    def close(self, base_url: str) -> None:
        """Let no client reach a session any more."""
        del self._open[base_url.split("/")[-2]]

    def _app(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.routing import Route

        async def chat(request: Request) -> Response:
            return await self._answered(request, lambda found, body: found.chat.answer(body))

        async def completions(request: Request) -> Response:
            return await self._answered(request, lambda found, body: complete_text(found.session, body))

        async def messages(request: Request) -> Response:
            return await self._answered(request, lambda found, body: answer_messages(found.chat, body), message_events)

        async def responses(request: Request) -> Response:
            return await self._answered(request, lambda found, body: answer_response(found.chat, body), response_events)

        async def of_vllm(request: Request) -> Response:
            return await self._answered(request, lambda found, body: generate_as_vllm(found.session, body))

        async def of_sglang(request: Request) -> Response:
            return await self._answered(
                request, lambda found, body: generate_as_sglang(found.session, body), sglang_events
            )

        async def models(request: Request) -> Response:
            most = self._found(request).session.max_length
            model = {"id": MODEL, "object": "model", "owned_by": "fivefold", "max_model_len": most}
            return _json({"object": "list", "data": [model]})

        async def refused(request: Request, error: Exception) -> Response:
            assert isinstance(error, Refused)
            content = {"message": str(error), "type": "invalid_request_error", "code": error.code}
            return _json({"type": "error", "error": content}, error.status)

        root = "/s/{secret}/v1"
        return Starlette(
            routes=[
                Route(f"{root}/chat/completions", chat, methods=["POST"]),
                Route(f"{root}/completions", completions, methods=["POST"]),
                Route(f"{root}/messages", messages, methods=["POST"]),
                Route(f"{root}/responses", responses, methods=["POST"]),
                Route("/s/{secret}/inference/v1/generate", of_vllm, methods=["POST"]),
                Route("/s/{secret}/generate", of_sglang, methods=["POST"]),
                Route(f"{root}/models", models),
            ],
            exception_handlers={Refused: refused},
        )

    def _found(self, request: Request) -> Open:
        found = self._open.get(request.path_params["secret"])
        if found is None:
            raise Refused("there is no such session, or its episode has ended", "no_session", 404)
        return found

    async def _answered(
        self,
        request: Request,
        answer: Callable[[Open, Mapping[str, Any]], Awaitable[dict[str, Any]]],
        streamed: Callable[[Mapping[str, Any]], str] = events,
    ) -> Response:
        """Answer a request in the session's loop; `streamed` writes the answer as events."""
        found, body = self._found(request), await _body(request)
        # The loop does not run while the replica sleeps or takes weights, so the wait begins here.
        with found.own.waiting():
            work = asyncio.run_coroutine_threadsafe(_awaited(answer(found, body)), found.loop)
            reply = await asyncio.wrap_future(work)
        if body.get("stream"):
            from starlette.responses import Response

            return Response(streamed(reply), media_type="text/event-stream")
        return _json(reply)


async def _awaited(answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    return await answer


async def _body(request: Request) -> Mapping[str, Any]:
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > MOST_BYTES:
            raise Refused(f"the body has more than {MOST_BYTES:,} bytes", status=413)
    try:
        body = parsed(content)
    except ValueError as error:
        raise Refused(f"the body is no JSON: {error}") from error
    if not isinstance(body, Mapping):
        raise Refused("the body must be an object of JSON")
    return body


def _json(content: Mapping[str, Any], status: int = 200) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(content, status)
