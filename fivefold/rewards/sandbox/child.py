"""The process that runs one program: it restricts itself for good, and then runs the program.

It is started by its file name, in an interpreter that knows neither the environment nor installed packages. What it
tells the runner goes to a separate pipe: "ready", and then what the test asks for.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[3])
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
"""Shared libraries of the standard library's modules."""
OTHERS = ("/usr/share/zoneinfo", "/etc/localtime", "/dev/urandom", "/dev/random", "/dev/zero")
READY = "ready\n"


def main() -> None:
    """Read the job, restrict this process, and run the job's program."""
    job_file, report = int(sys.argv[1]), int(sys.argv[2])
    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    os.chdir(job["folder"])
    try:
        _restrict(job)
    except (OSError, ValueError) as error:
        os.write(report, f"the sandbox cannot be closed: {error}".encode())
        os._exit(1)
    os.write(report, READY.encode())
    _run(job, report)


def _restrict(job: dict[str, Any]) -> None:
    standard = list(sys.path)
    # Last, so that no installed package takes the place of a module of the standard library.
    sys.path.append(ROOT)
    from fivefold.rewards.sandbox import landlock, limits, seccomp

    sys.path.remove(ROOT)
    limits.drop_privileges()
    if os.getppid() != job["parent"]:  # it died before this process asked to die with it
        os._exit(1)
    limits.limit_resources(job["timeout_s"], job["memory_mb"], counts_tasks=not job["seccomp"])
    if job["landlock"]:
        reading = [*standard, f"{sys.base_exec_prefix}/lib", *LIBRARIES, *OTHERS]
        rules = dict.fromkeys(reading, landlock.READING)
        rules |= {"/dev/null": landlock.READING | landlock.WRITE_FILE, job["folder"]: landlock.OWN_FOLDER}
        landlock.restrict(job["landlock"], rules)
    if job["seccomp"]:
        seccomp.restrict()


def _run(job: dict[str, Any], report: int) -> None:
    """Run the program, and then what the test asks for. An exception ends the process with a status other than 0."""
    # The program may replace what is in modules, so what is needed after it is taken before.
    write, dumps, run, compiled = os.write, json.dumps, exec, compile
    asks, argument = job["asks"], job.get("argument", [])
    name = "__main__" if asks == "output" else "program"
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv = ["program.py"]
    # Programs end with these too; the module that would define them is left out with the installed packages.
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    run(compiled(job["program"], "program.py", "exec"), module.__dict__)
    if asks == "value":
        value = _function(module, job["fn_name"])(*argument)
        message = dumps(value)
    elif asks == "asserts":
        for number, text in enumerate(argument):
            run(compiled(text, f"test {number}", "exec"), module.__dict__)
        message = job["token"]
    else:
        return
    data = message.encode()
    while data:
        data = data[write(report, data) :]


def _function(module: types.ModuleType, name: str) -> Any:
    """Return a function of the program, or a method of its class Solution, as LeetCode has it."""
    if hasattr(module, name):
        return getattr(module, name)
    return getattr(module.Solution(), name)


if __name__ == "__main__":
    main()
