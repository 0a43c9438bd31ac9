"""SGLang's key: it asks for one, and no other user of the machine can read it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import urllib3

from fivefold.rollout.servers import sglang_dialect
from fivefold.rollout.servers.client import HOST
from tests.unit.rollout.served import Served

SERVER = """
import json, os, sys
print(json.dumps({"name": __name__, "arguments": sys.argv[1:], "variables": list(os.environ)}), flush=True)
sys.stdin.read()
"""


def test_the_key_joins_the_arguments_without_being_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "launch_server.py").write_text(SERVER)
    path = os.pathsep.join([str(sglang_dialect.INSIDE), str(tmp_path)])
    for key, further in ((None, []), ("5e", ["--api-key", "5e"])):
        environment = {**os.environ, "PYTHONPATH": path, **({} if key is None else {"FIVEFOLD_SERVER_KEY": key})}
        command = [sys.executable, "-m", "fivefold_sglang", "--tp-size", "2"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as server:
            assert server.stdout is not None
            told = json.loads(server.stdout.readline())
            shown = Path(f"/proc/{server.pid}/cmdline").read_bytes().split(b"\0")
            server.communicate()
        assert told["name"] == "__main__"
        assert told["arguments"] == ["--tp-size", "2", *further]
        assert "FIVEFOLD_SERVER_KEY" not in told["variables"], "its own children do not inherit it"
        assert b"--api-key" not in shown


@pytest.mark.parametrize("server", ["sglang"], indirect=True)
def test_a_request_without_the_key_is_refused(server: Served) -> None:
    [started] = server.log.rows("start")
    command = started["command"]
    assert "--api-key" not in command
    port = command[command.index("--port") + 1]
    url = f"http://{HOST}:{port}/update_weights_from_tensor"
    assert urllib3.request("POST", url, json={}).status == 401
