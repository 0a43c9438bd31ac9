"""What a run was started with: the command, versions and the machine of the driver."""

from __future__ import annotations

import platform
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from fivefold.observe.gpu_memory import gpu_names
from fivefold.observe.versions import versions


def about_run(title: str, facts: Mapping[str, object], total_steps: int | None) -> dict[str, Any]:
    """Return the content of `about.json`; `facts` are those that the screen shows before the run starts."""
    return {
        "title": title,
        "steps": total_steps,
        "facts": {name: str(value) for name, value in facts.items()},
        "command": command_line(),
        "folder": str(Path.cwd()),
        "versions": versions(),
        "machine": machine(),
    }


def command_line() -> str:
    """Return the command of this process, without `--overwrite`: the one that goes on with its run."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--overwrite"]
    return shlex.join(["fivefold", *arguments])


def machine() -> dict[str, str]:
    """Return facts about the machine of this process."""
    names = gpu_names()
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(psutil.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "GPUs": gpus,
    }
