"""Runs programs in a sandbox service with the interface of SandboxFusion's `/run_code`.

https://bytedance.github.io/SandboxFusion
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fivefold.json_text import parsed_object
from fivefold.rewards.http_client import HTTPClient, RequestFailed, shown
from fivefold.rewards.sandbox.runner import Result

QUEUEING_S = 60.0
"""Seconds that a program may wait in the service, beyond its own limit."""
RETRIES = 5
AT_ONCE = 64
"""Responses that are judged at the same time, if the recipe does not say."""
_TESTED = """\
import json as _json, sys as _sys, types as _types
_job = _json.loads({job!r})
_module = _sys.modules["program"] = _types.ModuleType("program")
def _test(write=_sys.stdout.write, dumps=_json.dumps, run=exec, compiled=compile, job=_job, module=_module):
    run(compiled(job["program"], "program.py", "exec"), module.__dict__)
    if job["asks"] == "value":
        owner = module if hasattr(module, job["fn_name"]) else module.Solution()
        report = dumps(getattr(owner, job["fn_name"])(*job["argument"]))
    else:
        for number, text in enumerate(job["argument"]):
            run(compiled(text, f"test {{number}}", "exec"), module.__dict__)
        report = job["token"]
    write("\\n" + job["mark"] + report)
_test()
"""
"""Does in the service what the child of the local sandbox does: runs the program, and then what the test asks for."""


@dataclass(frozen=True)
class RemoteSandbox:
    """A service that runs programs."""

    url: str
    """Address that is asked, such as `http://localhost:8080/run_code`."""
    memory_mb: int
    """Memory of each program in MiB."""
    longest_s: float
    """The largest time limit of a program, in seconds."""
    n_at_once: int

    def run(self, program: str, asks: Mapping[str, Any], stdin: str = "", *, timeout_s: float) -> Result:
        """Run a program; see `fivefold.rewards.sandbox.runner.run`.

        Raises:
            RuntimeError: the service has no answer in all attempts.
        """
        mark = secrets.token_hex(16)
        is_tested = asks["asks"] != "output"
        job = json.dumps({**asks, "program": program, "mark": mark})
        body = {
            "code": _TESTED.format(job=job) if is_tested else program,
            "stdin": stdin,
            "language": "python",
            "run_timeout": timeout_s,
            "compile_timeout": timeout_s,
            "memory_limit_MB": self.memory_mb,
            "files": {},
            "fetch_files": [],
        }
        try:
            ended, output = self._client.ask(body, _read)
        except RequestFailed as error:
            raise RuntimeError(f"the sandbox service failed: {error}") from error
        _, _, report = output.rpartition("\n" + mark) if is_tested else ("", "", "")
        return Result(ended, output.encode(), report.encode())

    @cached_property
    def _client(self) -> HTTPClient:
        return HTTPClient(self.url, None, 2 * self.longest_s + QUEUEING_S, RETRIES, 1.0, self.n_at_once)


def _read(data: bytes) -> tuple[str, str]:
    """Return how a program has ended, as `Result.ended`, and what it has printed.

    Raises:
        RequestFailed: the service has not run it.
    """
    try:
        reply = parsed_object(data)
    except ValueError as error:
        raise RequestFailed(f"the reply is no JSON object: {shown(data)}", again=True) from error
    status, ran = reply.get("status"), reply.get("run_result")
    if status == "Failed" and ran is None:
        return "not started", ""
    if status not in ("Success", "Failed") or not isinstance(ran, Mapping):
        raise RequestFailed(f"the service did not run the program: {shown(data)}", again=True)
    if ran.get("status") != "Finished":
        return "time" if ran.get("status") == "TimeLimitExceeded" else "error", ""
    return f"exit {ran.get('return_code')}", str(ran.get("stdout") or "")
