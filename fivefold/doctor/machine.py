"""Cores, memory, disks, shared memory and limits, as this process gets them (containers included)."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from fivefold.doctor.finding import GIB, NOTHING_TO_DO, Finding, gib

CGROUP = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")
LITTLE_MEMORY = 4 * GIB
LITTLE_SHARED_MEMORY = 1 * GIB
LITTLE_DISK = 20 * GIB
NO_DISK = 1 * GIB
FEW_FILES = 4096
"""Ray's processes hold a few hundred descriptors each, and one for each object and connection besides."""
BYTES_PER_PARAMETER = 2
"""Of saved weights in bfloat16."""


@dataclass(frozen=True)
class Place:
    """A folder that something is written to."""

    title: str
    path: Path
    """It, or the nearest folder above it that exists."""
    free: int
    writable: bool
    setting: str
    """What moves it elsewhere."""


def look_at_places() -> tuple[Place, ...]:
    """Outputs (as recipes have them by default), downloaded models, temporary files."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return (
        _place("outputs", Path("runs"), "cluster.fileroot=FOLDER"),
        _place("model downloads", Path(home), "HF_HOME=FOLDER"),
        _place("temporary files", Path(tempfile.gettempdir()), "TMPDIR=FOLDER"),
    )


def _place(title: str, folder: Path, setting: str) -> Place:
    path = folder.expanduser().absolute()
    while not path.is_dir():
        path = path.parent
    return Place(title, path, shutil.disk_usage(path).free, os.access(path, os.W_OK | os.X_OK), setting)


def check_place(place: Place) -> Finding:
    """Whether it can be written to, and how much."""
    found = f"{gib(place.free)} free, {place.path}"
    if not place.writable:
        return Finding(place.title, "problem", f"{place.path} cannot be written to", f"give another: {place.setting}")
    if place.free < NO_DISK:
        return Finding(place.title, "problem", found, f"make room, or give another: {place.setting}")
    if place.free < LITTLE_DISK:
        return Finding(place.title, "warning", found, f"make room for models, or give another: {place.setting}")
    if place.title == "temporary files":
        return Finding(place.title, "ok", found, f"elsewhere: {place.setting}")
    billions = place.free / BYTES_PER_PARAMETER / 1e9
    return Finding(place.title, "ok", found, f"{billions:,.0f} B bf16 weights; {place.setting}")


def available_cores() -> float:
    """Cores that this process may use at one time; a container's quota may be a fraction."""
    cores = float(len(os.sched_getaffinity(0)))
    limit = CGROUP / "cpu.max"
    if limit.is_file():
        quota, period = limit.read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    return cores


def available_memory() -> int:
    """Bytes that this process and those it starts can still take."""
    free = psutil.virtual_memory().available
    limit, current = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.is_file() and current.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(current.read_text()))
    return max(0, free)


def check_cores(cores: float, load: float) -> Finding:
    """Whether a run gets the processor.

    Args:
        cores: what may be used.
        load: average number of processes that wanted to run in the last minute.
    """
    found = f"{cores:g} cores, load {load:.1f}"
    if cores < 2:
        return Finding("CPU", "warning", found, "two CPU processes take turns: runs on CPU will be slow")
    if load > 2 * cores:
        return Finding("CPU", "warning", found, "other programs slow runs down: wait")
    return Finding("CPU", "ok", found, "OMP_NUM_THREADS: threads a process")


def check_memory(free: int) -> Finding:
    """Whether the processes of a run fit.

    Args:
        free: bytes that can be taken.
    """
    if free < LITTLE_MEMORY:
        fix = "each process of a run needs about 1 GiB: run fewer, or end other programs"
        return Finding("memory", "warning", f"{gib(free)} free", fix)
    return Finding("memory", "ok", f"{gib(free)} free", "1 GiB a process, besides the model")


def check_shared_memory(free: int | None, n_gpus: int) -> Finding:
    """Whether NCCL and Ray have it; containers often get 64 MB.

    Args:
        free: bytes left in /dev/shm; None: there is none.
        n_gpus: that torch can use.
    """
    name, fix = "shared memory", "start the container with --shm-size=16g or --ipc=host"
    if free is None:
        return Finding(name, "warning", f"no {SHARED_MEMORY}", "weights travel through files, which is slower")
    if free < LITTLE_SHARED_MEMORY:
        if n_gpus > 1:
            return Finding(name, "problem", f"{gib(free)} free; NCCL may fail", fix)
        return Finding(name, "warning", f"{gib(free)} free; weights travel through files", fix)
    return Finding(name, "ok", f"{gib(free)} free", "weights travel through it")


def check_open_files(limit: int) -> Finding:
    """Whether Ray's processes can open what they need.

    Args:
        limit: largest number of file descriptors that a process can have, its soft limit raised.
    """
    if limit < FEW_FILES:
        return Finding("open files", "warning", f"at most {limit:,}", f"Ray may run out: ulimit -n {2**16}")
    return Finding("open files", "ok", "no limit" if limit >= 2**30 else f"at most {limit:,}", NOTHING_TO_DO)


def check_machine(n_gpus: int) -> list[Finding]:
    """All of it, as it is now."""
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(soft, hard) if resource.RLIM_INFINITY not in (soft, hard) else 2**30
    return [
        check_cores(available_cores(), os.getloadavg()[0]),
        check_memory(available_memory()),
        check_shared_memory(shared, n_gpus),
        check_open_files(limit),
        *(check_place(place) for place in look_at_places()),
    ]
