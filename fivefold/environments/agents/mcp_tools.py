"""Tools of MCP servers: a replica connects to each server once, and all its episodes call its tools.

episode ──call──> the player's loop ──> the server's thread and loop: session ──> child process, or URL
        <─ text ─
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fivefold.config.paths import user_path
from fivefold.config.schema.environment import McpEntry, is_url

if TYPE_CHECKING:
    from mcp import ClientSession

T = TypeVar("T")

KEY = "environment.tools"
INSTALL = "pip install 'fivefold[mcp]'"
START_S = 120.0
"""Seconds that a server has to start and to list its tools; some install themselves first."""
END_S = 10.0
"""Seconds that a server has to end; after some of them, its client kills it."""
PING_S = 10.0
"""Seconds that a server has to show that it is there, after a call has failed."""
PASSED = (
    *("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER"),
    *("CUDA_VISIBLE_DEVICES", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "TMPDIR", "TZ", "XDG_CACHE_HOME"),
)
"""Variables that a child process gets. All others stay here, because they may be secrets of the run."""
_CHILD = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Becomes the server, which the kernel then ends with this process, however that ends."""


class McpServer:
    """One MCP server. It ends when nothing refers to this object or to one of its tools, or with this process."""

    def __init__(self, entry: McpEntry) -> None:
        """Start the server, or connect to it.

        Args:
            entry: its mapping in the recipe.

        Raises:
            ValueError: a package is missing, the server does not start or answer, or it has no tool.
        """
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise ValueError(f"{KEY} has an MCP server, which needs the package {error.name}: {INSTALL}") from error
        what = f"{KEY}: the MCP server {entry['mcp']!r}"
        if not is_url(entry["mcp"]):
            _check_command(what, entry)
        # A session must stay in one loop, and the player's runs between two slices of the engine only.
        self._link = _Link(entry, asyncio.new_event_loop())
        thread = threading.Thread(target=self._link.run, name="mcp", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._link, thread)
        try:
            self._tools = self._in_loop(self._link.connected()).result().tools
        except Exception as error:  # a transport may raise anything
            raise ValueError(
                f"{what} {_failure(error)}. It must answer `initialize` and `tools/list`; what it has printed stands "
                "above: try it with another client"
            ) from error
        if not self._tools:
            raise ValueError(f"{what} has no tool: name one that has, or leave it out")

    def tools(self) -> list[Callable[..., Any]]:
        """Return the server's tools as functions with the attribute `tool_schema`."""
        return [self._tool(each) for each in self._tools]

    def _tool(self, tool: Mapping[str, Any]) -> Callable[..., Any]:
        async def call(**arguments: Any) -> str:
            return await asyncio.wrap_future(self._in_loop(self._link.answer(tool["name"], arguments)))

        call.__name__ = tool["name"]
        named = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["inputSchema"]}
        call.tool_schema = {"type": "function", "function": named}  # type: ignore[attr-defined]
        return call

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._link.loop)


@dataclass(frozen=True)
class _Connection:
    """An open session with a server."""

    session: ClientSession
    tools: list[dict[str, Any]]
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    """Closes the session, when it is set."""


@dataclass
class _Link:
    """The connections to a server, one after another: a server that has died starts again. It lives in its loop."""

    entry: McpEntry
    loop: asyncio.AbstractEventLoop
    opening: asyncio.Task[_Connection] | None = None
    """Opens, or has opened, the last connection."""
    serving: asyncio.Task[None] | None = None
    """Keeps it open."""

    def run(self) -> None:
        """Run the loop until it is stopped."""
        with closing(self.loop):
            self.loop.run_forever()

    async def answer(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool; return what the model reads.

        Raises:
            Exception: whatever the session raises, as for a server that is gone or refuses the arguments.
        """
        connection, serving = await self.connected(), self.serving
        assert serving is not None
        call = self.loop.create_task(connection.session.call_tool(name, arguments))
        try:
            # Some versions of the package leave calls unanswered when a connection breaks.
            await asyncio.wait([call, serving], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise ConnectionError("the connection to the server is closed")
            result = call.result()
        except Exception:
            # If this call is late, the next ones still need to know.
            await asyncio.shield(self.loop.create_task(_check(connection)))
            raise
        finally:
            call.cancel()
        return _text(result.model_dump(mode="json", by_alias=True, exclude_none=True))

    async def connected(self) -> _Connection:
        """Return the connection; open another one if it could not be opened, or is over."""
        if self.opening is None or (self.opening.done() and self._is_over()):
            if self.opening is not None:
                print(f"The MCP server {self.entry['mcp']!r} is gone, and is started again", flush=True)
            self.opening = self.loop.create_task(self._open())
        # The next calls need it too, if this one is late.
        return await asyncio.shield(self.opening)

    async def close(self) -> None:
        """Close the connection, and with it the child process."""
        if self.opening is not None and self.serving is not None:
            with suppress(Exception):  # it was reported when it was raised
                (await self.opening).is_over.set()
                await self.serving

    def _is_over(self) -> bool:
        """Return whether the last connection, which is open or has failed, serves no call any more."""
        assert self.opening is not None
        assert self.serving is not None
        return self.serving.done() or self.opening.result().is_over.is_set()

    async def _open(self) -> _Connection:
        if self.serving is not None:
            await asyncio.gather(self.serving, return_exceptions=True)
        opened: asyncio.Future[_Connection] = self.loop.create_future()
        self.serving = self.loop.create_task(_serve(self.entry, opened))
        either: list[asyncio.Future[Any]] = [opened, self.serving]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            self.serving.result()
        return await opened


async def _serve(entry: McpEntry, opened: asyncio.Future[_Connection]) -> None:
    """Keep a session open until it is over."""
    from mcp import ClientSession

    async with AsyncExitStack() as stack:
        async with asyncio.timeout(START_S):
            streams = await stack.enter_async_context(_transport(entry))
            session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
            await session.initialize()
            connection = _Connection(session, await _listed(session))
        opened.set_result(connection)
        await connection.is_over.wait()


async def _check(connection: _Connection) -> None:
    """Close a connection whose server is gone. After a call that failed it may be there, and refuse the arguments."""
    try:
        async with asyncio.timeout(PING_S):
            await connection.session.send_ping()
    except Exception:  # noqa: BLE001 - a transport may raise anything
        connection.is_over.set()


def _transport(entry: McpEntry) -> AbstractAsyncContextManager[Any]:
    """Return what opens the streams to a server."""
    if is_url(entry["mcp"]):
        from mcp.client.streamable_http import streamable_http_client

        return streamable_http_client(entry["mcp"])
    from mcp import StdioServerParameters, stdio_client

    server = StdioServerParameters(
        command=sys.executable,
        args=["-I", "-S", "-c", _CHILD, str(os.getpid()), *shlex.split(entry["mcp"])],
        env={name: os.environ[name] for name in PASSED if name in os.environ},
        cwd=_folder(entry),
    )
    # sys.stderr may be no file.
    return stdio_client(server, sys.__stderr__ or sys.stderr)


async def _listed(session: ClientSession) -> list[dict[str, Any]]:
    """Return all tools of a server, which may list them in pages."""
    from mcp.types import PaginatedRequestParams

    tools: list[dict[str, Any]] = []
    params = None
    while True:
        result = await session.list_tools(params=params)
        page = result.model_dump(mode="json", by_alias=True, exclude_none=True)
        tools += page["tools"]
        if not page.get("nextCursor"):
            return tools
        params = PaginatedRequestParams(cursor=page["nextCursor"])


def _text(result: Mapping[str, Any]) -> str:
    """Return what the model reads of a result: its texts, and the kind of anything else."""
    parts = []
    for part in result.get("content", []):
        text = part.get("text", part.get("resource", {}).get("text"))
        parts.append(f"({part['type']} left out)" if text is None else text)
    if not parts and "structuredContent" in result:
        parts = [json.dumps(result["structuredContent"])]
    return ("Error: " if result.get("isError") else "") + "\n".join(parts)


def _failure(error: BaseException) -> str:
    """Say what went wrong when a server was opened."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"has not answered within {START_S:g} s"
    return f"cannot be reached: {error!r}"


def _check_command(what: str, entry: McpEntry) -> None:
    folder, program = _folder(entry), shlex.split(entry["mcp"])[0]
    if not folder.is_dir():
        raise ValueError(f"{what} has cwd={str(folder)!r}, which is no folder: make it, or name another")
    if shutil.which(folder / program if "/" in program else program) is None:
        raise ValueError(f"{what} cannot be started: there is no program {program!r}. Install it, or write its path")


def _folder(entry: McpEntry) -> Path:
    """Return the folder in which a command starts."""
    return user_path(entry.get("cwd", ".")).resolve()


def _end(link: _Link, thread: threading.Thread) -> None:
    """End a server and its thread."""
    work = asyncio.run_coroutine_threadsafe(link.close(), link.loop)
    work.add_done_callback(lambda _: link.loop.stop())
    # The garbage collector may come by in that very thread.
    if threading.current_thread() is not thread:
        thread.join(END_S)
