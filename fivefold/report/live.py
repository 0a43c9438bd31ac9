"""The page about runs in progress, from a server on this machine alone.

http://127.0.0.1:<port>/<token>/             the page
                                state        state and number of rows of each run, which the page asks for
                                blocks/<n>-metrics?from=<row>, <n>-samples-index, <n>-samples-chunk-<k>, <n>-timeline

No address names a file. Without the token, which each start draws again, every answer is 404.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.observe.jsonl import finite
from fivefold.report.page import INSTALL, facts, metrics_block, render, sample_facts, samples_of, state
from fivefold.report.run import Run
from fivefold.report.samples import CHUNK
from fivefold.report.series import MetricsFile
from fivefold.report.timeline import EventFiles, timeline_block

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
_BLOCK = re.compile(r"(\d+)-(metrics|timeline|samples-index|samples-chunk)(?:-(\d+))?")
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Watched:
    """A run that is read again when the page asks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._metrics = MetricsFile(path.resolve() / "metrics.jsonl")
        self._events = EventFiles(path.resolve() / "logs")
        self._problem: str | None = None
        """Why the run's files cannot be read at the moment."""
        self.run = Run.read(path, self._metrics)
        self.samples = samples_of(self.run)
        self.lock = threading.Lock()

    def refresh(self) -> None:
        """Read what has changed. What was read before stays as long as files cannot be read: the page says why."""
        try:
            self.run = Run.read(self._path, self._metrics)
            self.samples.refresh()
            self._problem = None
        except (OSError, ValueError) as error:
            self._problem = str(error)

    def facts(self) -> dict[str, Any]:
        """Return what the page says about the run when it opens."""
        return facts(self.run) | self.state()

    def state(self) -> dict[str, Any]:
        """Return what changes while the run is in progress, and how often its numbers and samples became others."""
        now = state(self.run) | {
            "beginnings": self._metrics.beginnings,
            "samples": sample_facts(self.samples) | {"changes": self.samples.changes},
        }
        return now if self._problem is None else now | {"error": self._problem}

    def block(self, kind: str, number: int, first: int) -> bytes | None:
        """Return a block of the page; None: there is none of that kind and number."""
        if kind == "metrics":
            return metrics_block(self.run, first)
        if kind == "timeline":
            return timeline_block(self._events.read())
        if kind == "samples-index":
            return self.samples.index(range(len(self.samples.rows)))
        start = number * CHUNK
        if start >= len(self.samples.rows):
            return None
        return self.samples.chunk(range(start, min(start + CHUNK, len(self.samples.rows))), with_tokens=True)


def application(paths: Sequence[Path], token: str) -> Starlette:
    """Return the server's application for the folders of some runs.

    Raises:
        ValueError: a folder that is not a run's, or the libraries are not installed.
    """
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.responses import HTMLResponse, PlainTextResponse, Response
        from starlette.routing import Route
    except ModuleNotFoundError as error:
        raise ValueError(f"live pages need the package {error.name}, which is not installed: {INSTALL}") from error
    watched = [Watched(path) for path in paths]

    def page(request: Request) -> Response:
        for each in watched:
            with each.lock:
                each.refresh()
        return HTMLResponse(render([each.facts() for each in watched], {}, live=True), headers=HEADERS)

    def states(request: Request) -> Response:
        for each in watched:
            with each.lock:
                each.refresh()
        states = json.dumps(finite([each.state() for each in watched]))
        return Response(states, media_type="application/json", headers=HEADERS)

    def block(request: Request) -> Response:
        match = _BLOCK.fullmatch(request.path_params["name"])
        first = request.query_params.get("from", "0")
        if match is None or int(match[1]) >= len(watched) or not first.isdecimal():
            return PlainTextResponse("there is no such block", 404, headers=HEADERS)
        each = watched[int(match[1])]
        try:
            with each.lock:
                content = each.block(match[2], int(match[3] or 0), int(first))
        except (OSError, ValueError) as error:  # the run has replaced a file since it was last refreshed
            return PlainTextResponse(f"it cannot be read now: {error}", 503, headers=HEADERS)
        if content is None:
            return PlainTextResponse("there is no such block", 404, headers=HEADERS)
        return Response(content, media_type="application/gzip", headers=HEADERS)

    def guarded(answer: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
        async def check(request: Request) -> Response:
            if not secrets.compare_digest(request.path_params["token"].encode(), token.encode()):
                return PlainTextResponse("not found", 404, headers=HEADERS)
            return await run_in_threadpool(answer, request)

        return check

    routes = [
        Route("/{token}/", guarded(page)),
        Route("/{token}/state", guarded(states)),
        Route("/{token}/blocks/{name}", guarded(block)),
    ]
    # A page of another site must not reach the server under its own name that resolves to this machine.
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])])


def watch(paths: Sequence[Path], port: int, tell: Callable[[str], None]) -> None:
    """Serve the page until the process is interrupted; `tell` gets its address.

    Raises:
        ValueError: the runs, the port or the libraries cannot be used.
    """
    token = secrets.token_urlsafe(16)
    app = application(paths, token)
    try:
        import uvicorn
    except ModuleNotFoundError as error:
        raise ValueError(f"live pages need the package {error.name}, which is not installed: {INSTALL}") from error
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen()
    except OSError as error:
        raise ValueError(f"--port {port} cannot be used ({error.strerror}): take another one, or 0") from error
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    with listener, suppress(KeyboardInterrupt):  # the server has ended by then, and raises the signal again
        tell(f"http://{HOST}:{listener.getsockname()[1]}/{token}/")
        uvicorn.Server(config).run(sockets=[listener])
