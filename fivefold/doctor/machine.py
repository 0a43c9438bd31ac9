"""Cores, memory, disks, shared memory and limits. In a container, the container's limits count."""

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
"""Ray's processes hold a few hundred file descriptors each, and one more for each object and connection."""
BYTES_PER_PARAMETER = 2
"""Size of weights that are saved in bfloat16."""


@dataclass(frozen=True)
class Place:
    """A folder that something is written to."""

    title: str
    """What is written there."""
    path: Path
    """The folder, or the nearest folder above it that exists."""
    free: int
    """Free space, in bytes."""
    writable: bool
    setting: str
    """Setting that names another folder."""


def look_at_places() -> tuple[Place, ...]:
    """Return the folders for outputs (as recipes have them by default), downloaded models and temporary files."""
    setting = "HF_HUB_CACHE" if os.environ.get("HF_HUB_CACHE") else "HF_HOME"
    home = os.environ.get(setting) or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return (
        _place("outputs", Path("runs"), "cluster.fileroot=FOLDER"),
        _place("model downloads", Path(home), f"{setting}=FOLDER"),
        _place("temporary files", Path(tempfile.gettempdir()), "TMPDIR=FOLDER"),
    )


def _place(title: str, folder: Path, setting: str) -> Place:
    path = folder.expanduser().absolute()
    # pathlib would raise an error for a folder in one that this user may not open.
    while not os.path.isdir(path):
        path = path.parent
    return Place(title, path, shutil.disk_usage(path).free, os.access(path, os.W_OK | os.X_OK), setting)


def check_place(place: Place) -> Finding:
    """Check whether a folder can be written to, and how much space it has."""
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
    return Finding(place.title, "ok", found, f"room for {billions:,.0f} billion bf16 weights; {place.setting}")


def available_cores() -> float:
    """Return the number of cores that this process may use; a container's quota may be a fraction."""
    cores = float(len(os.sched_getaffinity(0)))
    limit = CGROUP / "cpu.max"
    if limit.is_file():
        quota, period = limit.read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    return cores


def available_memory() -> int:
    """Return the memory that this process and its children can still take, in bytes.

    A container's files in memory that have not been read lately are given up for it.
    """
    free = psutil.virtual_memory().available
    limit, current, statistics = (CGROUP / f"memory.{name}" for name in ("max", "current", "stat"))
    if limit.is_file() and current.is_file() and (text := limit.read_text().strip()) != "max":
        counts = dict(line.split() for line in statistics.read_text().splitlines()) if statistics.is_file() else {}
        free = min(free, int(text) - int(current.read_text()) + int(counts.get("inactive_file", 0)))
    return max(0, free)


def check_cores(cores: float, load: float) -> Finding:
    """Check whether the processes of a run get the processor.

    Args:
        cores: number of cores that may be used.
        load: average number of processes that wanted to run in the last minute.
    """
    found = f"{cores:g} cores, load {load:.1f}"
    if cores < 2:
        return Finding("CPU", "warning", found, "two CPU processes take turns: runs on CPU will be slow")
    if load > 2 * cores:
        return Finding("CPU", "warning", found, "other programs slow runs down: wait until they end")
    return Finding("CPU", "ok", found, "OMP_NUM_THREADS sets the threads of a process")


def check_memory(free: int) -> Finding:
    """Check whether the processes of a run fit into memory.

    Args:
        free: memory that can be taken, in bytes.
    """
    if free < LITTLE_MEMORY:
        fix = "each process of a run needs about 1 GiB: run fewer, or end other programs"
        return Finding("memory", "warning", f"{gib(free)} free", fix)
    return Finding("memory", "ok", f"{gib(free)} free", "a process takes 1 GiB, besides the model")


def check_shared_memory(free: int | None, n_gpus: int) -> Finding:
    """Check whether NCCL and Ray have enough shared memory; containers often get 64 MB.

    Args:
        free: bytes left in /dev/shm; None: there is no /dev/shm.
        n_gpus: number of GPUs that torch can use.
    """
    name, fix = "shared memory", "start the container with --shm-size=16g or --ipc=host"
    if free is None:
        return Finding(name, "warning", f"there is no {SHARED_MEMORY}", "weights travel through files, which is slower")
    if free < LITTLE_SHARED_MEMORY:
        if n_gpus > 1:
            return Finding(name, "problem", f"{gib(free)} free; NCCL may fail", fix)
        return Finding(name, "warning", f"{gib(free)} free; weights travel through files", fix)
    return Finding(name, "ok", f"{gib(free)} free", "weights travel through it")


def check_open_files(limit: int) -> Finding:
    """Check whether Ray's processes can open as many files and connections as they need.

    Args:
        limit: number of file descriptors that a process can have, after it raises its soft limit.
    """
    if limit < FEW_FILES:
        return Finding("open files", "warning", f"at most {limit:,}", f"Ray may run out: ulimit -n {2**16}")
    return Finding("open files", "ok", "no limit" if limit >= 2**30 else f"at most {limit:,}", NOTHING_TO_DO)


def check_machine(n_gpus: int) -> list[Finding]:
    """Examine this machine.

    Args:
        n_gpus: number of GPUs that torch can use.
    """
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
