"""Tools of MCP servers: calls, errors, late calls, secrets, the end of a server, and what is refused."""

from __future__ import annotations

import gc
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.environments.agents.mcp_tools import _text
from fivefold.environments.agents.tools import Tools, load_tools
from fivefold.environments.build import check_environment
from fivefold.environments.play import Player
from fivefold.types import Episode
from tests.unit.environments.test_agents import Policy, task, texts, tokenizer_of
from tests.unit.environments.test_play import played
from tests.unit.environments.test_tools import call

pytest.importorskip("mcp")

SERVER = '''\
import os
import sys
import time

try:
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
except ImportError:
    from mcp.server.fastmcp import FastMCP as MCPServer
    from mcp.server.fastmcp.exceptions import ToolError

server = MCPServer("numbers")


@server.tool()
def double(x: int) -> int:
    """Double a number."""
    if x < 0:
        raise ToolError("the number is negative")
    return 2 * x


@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "waited"


@server.tool()
async def doze(seconds: float) -> str:
    """Wait, and let others call."""
    import anyio
    await anyio.sleep(seconds)
    return "dozed"


@server.tool()
def variables() -> str:
    """Name the variables of the environment."""
    return " ".join(sorted(os.environ))


@server.tool()
def place() -> str:
    """Say the process and its folder."""
    return f"{os.getpid()} {os.getcwd()}"


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def look() -> list:
    """Look."""
    from mcp.types import ImageContent, TextContent
    image = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
    return [TextContent(type="text", text="a dog"), ImageContent.model_validate(image)]


if sys.argv[1:]:
    import uvicorn
    uvicorn.run(server.streamable_http_app(), port=int(sys.argv[1]), log_level="error")
else:
    server.run()
'''
BARE = """\
import json
import os
import sys

for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    start = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
    start["serverInfo"] = {"name": "bare", "version": "1"}
    page = int((asked.get("params") or {}).get("cursor", "0"))
    tools = [{"name": f"tool{page}", "inputSchema": {"type": "object"}}][:TOOLS]
    pages = {"tools": tools, **({"nextCursor": str(page + 1)} if page + 1 < TOOLS else {})}
    results = {"initialize": start, "tools/list": pages, "ping": {}}
    if asked["method"] in results:
        answer = {"result": results[asked["method"]]}
    else:
        answer = {"error": {"code": -32602, "message": f"process {os.getpid()} takes other arguments"}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""
"""A server with so many tools, one on each page, that refuses all calls."""


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., str]:
    """(arguments, source, name of the file) -> a command that runs a server."""

    def command(*arguments: object, source: str = SERVER, name: str = "my_server.py") -> str:
        (tmp_path / name).write_text(source)
        return shlex.join([sys.executable, str(tmp_path / name), *map(str, arguments)])

    return command


def run(entry: dict[str, str], *says: str, **fields: Any) -> Episode:
    """Return the episode of a model that says this, with the tools of a server."""
    config = EnvironmentConfig(tools=[entry], max_length=9000, **fields)
    left = list(says)
    player = Player(Policy(lambda text: left.pop(0)), Tools(config, tokenizer_of()))
    player.begin(0, [task("Go.")])
    [episode] = played(player)[0]
    return episode


def results(episode: Episode) -> list[str]:
    """Return what the model has read of its tools."""
    parts = texts(episode)[0].split("<|im_end|>\n")
    return [part.removeprefix("<|im_start|>tool\n") for part in parts if part.startswith("<|im_start|>tool\n")]


def runs(process: psutil.Process, file: str) -> bool:
    try:
        return file in process.cmdline()
    except psutil.NoSuchProcess:  # it has just ended, as a zombie has
        return False


def has_ended(process: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_the_model_calls_the_tools_of_a_server(command: Callable[..., str]) -> None:
    says = [call("double", x=21) + call("double", x=4), call("double", x=-1), call("double", y=1), call("look"), "So."]
    episode = run({"mcp": command()}, *says)
    good, better, bad, wrong, seen = results(episode)
    assert (good, better) == ("42", "8")
    assert bad.startswith("Error: ")
    assert "the number is negative" in bad
    assert wrong.startswith("Error: ")
    assert seen == "a dog\n(image left out)"
    system = texts(episode)[0].split("<|im_end|>")[0]
    assert '"description": "Double a number."' in system
    assert '"x": {"title": "X", "type": "integer"}' in system
    assert (episode.finish_reason, episode.rewards) == ("done", {})


@pytest.mark.parametrize("tool", ["wait", "doze"])
def test_a_late_call_answers_the_model(command: Callable[..., str], tool: str) -> None:
    episode = run({"mcp": command()}, call(tool, seconds=1.5), call("double", x=1), "So.", timeout_s=1.0)
    late, _ = results(episode)
    assert late == f"Error: {tool} took longer than 1 s"


def test_the_server_does_not_see_the_secrets_of_the_run(
    command: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "DATABASE_URL"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("LANG", "C.UTF-8")
    [names] = results(run({"mcp": f"env OWN=1 {command()}"}, call("variables"), "So."))
    assert {"LANG", "OWN", "PATH"} <= set(names.split())
    assert {"WANDB_API_KEY", "HF_TOKEN", "DATABASE_URL"}.isdisjoint(names.split())


def test_a_server_that_dies_starts_again(command: Callable[..., str]) -> None:
    says = [call("place"), call("leave"), call("place"), call("double", x=1), "So."]
    before, dying, after, result = results(run({"mcp": command()}, *says))
    assert dying.startswith("Error: ")
    assert before.split()[0] != after.split()[0]
    assert result == "2"


def test_a_server_that_does_not_start_again_answers_with_errors(command: Callable[..., str], tmp_path: Path) -> None:
    command(source=SERVER.replace("import os\n", "import os\nos.remove(__file__)\n", 1), name="once.py")
    says = [call("place"), call("leave"), call("place"), call("place"), "So."]
    place, *errors = results(run({"mcp": f"{sys.executable} once.py", "cwd": str(tmp_path)}, *says))
    assert place.split()[1] == str(tmp_path)
    assert all(error.startswith("Error: ") for error in errors)


def test_a_server_that_refuses_arguments_stays(command: Callable[..., str]) -> None:
    server = command(source=BARE.replace("TOOLS", "1"))
    first, second = results(run({"mcp": server}, call("tool0", x=1), call("tool0"), "So."))
    assert "takes other arguments" in first
    assert first == second


def test_a_server_runs_in_its_folder(command: Callable[..., str], tmp_path: Path) -> None:
    command(name="near.py")
    located = EnvironmentConfig(tools=[{"mcp": "python near.py"}, {"mcp": "x", "cwd": "b"}, {"mcp": "http://h/mcp"}])
    tools: Any = located.located(tmp_path).tools
    assert tools == [
        {"mcp": "python near.py", "cwd": str(tmp_path)},
        {"mcp": "x", "cwd": str(tmp_path / "b")},
        {"mcp": "http://h/mcp"},
    ]
    [place] = results(run({**tools[0], "mcp": f"{sys.executable} near.py"}, call("place"), "So."))
    assert place.split()[1] == str(tmp_path)


def test_a_server_ends_with_its_tools(command: Callable[..., str], tmp_path: Path) -> None:
    functions: Any = load_tools([{"mcp": command()}])
    # Servers of other tests may still end.
    [child] = [each.pid for each in psutil.Process().children() if runs(each, f"{tmp_path}/my_server.py")]
    del functions
    gc.collect()
    assert has_ended(child)


PARENT = """\
import sys, time
from fivefold.environments.agents.mcp_tools import _text
from fivefold.environments.agents.tools import load_tools
tools = load_tools([{"mcp": sys.argv[1]}])
print("ready", flush=True)
if sys.argv[2:]:
    time.sleep(60)
"""


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_server_ends_with_the_process_of_its_run(command: Callable[..., str], is_killed: bool) -> None:
    # `sleep` reads nothing, and so would not see that its input has ended.
    bare = command(source=BARE.replace("TOOLS", "1"))
    server = f"sh -c '{bare}; exec sleep 60'" if not is_killed else bare
    parent = [sys.executable, "-c", PARENT, server, *(["wait"] if is_killed else [])]
    with subprocess.Popen(parent, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        children = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
        if is_killed:
            os.kill(process.pid, signal.SIGKILL)
        assert process.wait(30) == (-signal.SIGKILL if is_killed else 0)
    assert all(has_ended(child) for child in children)


@pytest.fixture
def address(command: Callable[..., str]) -> Iterator[str]:
    """URL of a server that runs already."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with subprocess.Popen(shlex.split(command(port))) as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


def test_a_server_is_reached_by_its_url(address: str) -> None:
    says = [call("double", x=21), call("double", x=-1), call("doze", seconds=1.5), call("double", x=2), "So."]
    good, bad, late, last = results(run({"mcp": address}, *says, timeout_s=1.0))
    assert (good, late, last) == ("42", "Error: doze took longer than 1 s", "4")
    assert "the number is negative" in bad


def test_all_pages_of_tools_are_read_and_two_tools_of_one_name_refused(command: Callable[..., str]) -> None:
    three, one = (command(source=BARE.replace("TOOLS", str(n)), name=f"bare{n}.py") for n in (3, 1))
    tools: Any = load_tools([{"mcp": three}])
    assert [tool.__name__ for tool in tools] == ["tool0", "tool1", "tool2"]
    with pytest.raises(ValueError, match=r"environment\.tools=.*bare3.*bare1.* has two tools 'tool0'.*drop one"):
        check_environment(EnvironmentConfig(tools=[{"mcp": three}, {"mcp": one}]), tokenizer_of())


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("no-such-program --x", "cannot be started: there is no program 'no-such-program'. Install it"),
        ("./no-such-program", "cannot be started: there is no program './no-such-program'"),
        (f"{sys.executable} -c 'print(1)'", "cannot be reached: .*onnection closed"),
        ("http://127.0.0.1:9/mcp", "cannot be reached: "),
    ],
)
def test_a_server_that_does_not_start_is_refused(server: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"environment\.tools: the MCP server .* {message}"):
        check_environment(EnvironmentConfig(tools=[{"mcp": server}]), tokenizer_of())


def test_a_server_without_tools_is_refused(command: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match=r"bare0\.py' has no tool: name one that has"):
        load_tools([{"mcp": command(source=BARE.replace("TOOLS", "0"), name="bare0.py")}])
    with pytest.raises(ValueError, match=r"cwd='/no/such/folder', which is no folder"):
        load_tools([{"mcp": command(), "cwd": "/no/such/folder"}])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ValueError, match=r"needs the package mcp: pip install 'fivefold\[mcp\]'"):
        load_tools([{"mcp": "true"}])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"cwd": "a"}, "is no MCP server: write {mcp: COMMAND}, {mcp: COMMAND, cwd: FOLDER} or {mcp: URL}"),
        ({}, "is no MCP server"),
        ({"mcp": "a", "env": "b"}, "is no MCP server"),
        ({"mcp": "a 'b"}, "is no command, which is split as a shell does: No closing quotation"),
        ({"mcp": "https://h/mcp", "cwd": "a"}, "has cwd, and a server that is reached by a URL runs elsewhere"),
    ],
)
def test_an_entry_names_a_server(entry: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnvironmentConfig(tools=[entry])


def test_what_the_model_reads_of_a_result() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "resource", "resource": {"text": "b"}}, {"type": "audio"}]
    assert _text({"content": parts}) == "a\nb\n(audio left out)"
    assert _text({"content": [], "structuredContent": {"on": True}}) == '{"on": true}'
    assert _text({"content": parts[:1], "isError": True}) == "Error: a"
