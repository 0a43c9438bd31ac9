"""The GPUs that the driver lists, and the links between them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from fivefold.doctor.finding import Finding, gib

MIB = 2**20
SMI_TIMEOUT_S = 20.0
BUSY = 0.1
"""From this share of a GPU's memory in use, another program is assumed to run on it."""
FIELDS = "name,memory.total,memory.used,compute_cap,driver_version"
COMPILERS = ("cc", "gcc", "clang")
TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]*m")
Pair = tuple[int, int]


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver lists."""

    name: str
    memory: int | None
    """Size of its memory, in bytes; None: nvidia-smi does not report it, as for GPUs that share the host's memory."""
    used: int | None
    """Memory that programs hold, in bytes; None: nvidia-smi does not report it, as in a container on part of a GPU."""
    capability: tuple[int, int]
    """Compute capability, such as (9, 0)."""
    driver: str
    """Version of the driver."""
    number: int = 0
    """Its number, as nvidia-smi counts."""


@dataclass(frozen=True)
class Gpus:
    """What nvidia-smi and torch say about the GPUs."""

    listed: tuple[Gpu, ...] = ()
    links: Mapping[Pair, str] | None = None
    """Kind of link between each pair, in nvidia-smi's words (`NV18`, `PIX`, `SYS`); None if it is not known."""
    unreachable: tuple[Pair, ...] = ()
    """Pairs of visible devices where one cannot access the other's memory directly."""
    error: str | None = None
    """Why nvidia-smi fails; None if it works or is not installed."""


def look_at_gpus() -> Gpus:
    """Ask nvidia-smi. Without it there are no GPUs. It does not know `unreachable`: see `unreachable_pairs`."""
    if shutil.which("nvidia-smi") is None:
        return Gpus()
    try:
        listed = parse_gpus(_smi(f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"))
    except (subprocess.SubprocessError, ValueError) as error:
        output = error.stdout if isinstance(error, subprocess.CalledProcessError) else None
        return Gpus(error=" ".join(str(output or error).split()))
    return Gpus(listed, _links(len(listed)))


def _links(n: int) -> Mapping[Pair, str] | None:
    if n < 2:
        return {}
    try:
        return parse_links(_smi("topo", "-m"), n)
    except (subprocess.SubprocessError, ValueError):
        return None


def visible(gpus: Gpus, environment: Mapping[str, str]) -> Gpus:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names by number; all if it names none, or CUDA may count otherwise.

    CUDA counts GPUs of several kinds by their speed, unless CUDA_DEVICE_ORDER says otherwise.
    """
    counts_alike = len({gpu.name for gpu in gpus.listed}) == 1 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    named = [number.strip() for number in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if not counts_alike or not all(number.isdecimal() and int(number) < len(gpus.listed) for number in named):
        return gpus
    chosen = [int(number) for number in named]
    pairs = combinations(range(len(chosen)), 2)
    links = gpus.links and {
        (i, j): gpus.links[min(chosen[i], chosen[j]), max(chosen[i], chosen[j])]
        for i, j in pairs
        if chosen[i] != chosen[j]
    }
    return replace(gpus, listed=tuple(gpus.listed[number] for number in chosen), links=links)


def unreachable_pairs(n_devices: int) -> tuple[Pair, ...]:
    """Return the pairs of torch's devices where one cannot access the other's memory directly."""
    if n_devices < 2:
        return ()
    import torch

    pairs = combinations(range(n_devices), 2)
    return tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair))


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Read the output of `nvidia-smi --query-gpu=FIELDS --format=csv,noheader,nounits`.

    Raises:
        ValueError: a line has another form.
    """
    gpus = []
    for number, line in enumerate(filter(None, text.splitlines())):
        try:
            name, memory, used, capability, driver = (cell.strip() for cell in line.split(","))
            major, minor = capability.split(".")
            gpus.append(Gpu(name, _bytes(memory), _bytes(used), (int(major), int(minor)), driver, number))
        except ValueError:
            raise ValueError(f"it says {line!r} in place of the values {FIELDS}") from None
    return tuple(gpus)


def _bytes(mebibytes: str) -> int | None:
    """Return the bytes of a cell; None for one such as `[N/A]` or `[Insufficient Permissions]`."""
    return None if mebibytes.startswith("[") else int(mebibytes) * MIB


def parse_links(text: str, n: int) -> dict[Pair, str]:
    """Read the upper triangle of the matrix that `nvidia-smi topo -m` prints for `n` GPUs.

    Raises:
        ValueError: the text has no such matrix.
    """
    rows = [line.split() for line in TERMINAL_CODE.sub("", text).splitlines()]
    matrix = {row[0]: row[1 : n + 1] for row in rows if len(row) > n and row[0].startswith("GPU") and "X" in row}
    try:
        return {(i, j): matrix[f"GPU{i}"][j] for i, j in combinations(range(n), 2)}
    except (KeyError, IndexError):
        raise ValueError(
            f"there is no matrix of {n} GPUs in {text!r}; expected the output of `nvidia-smi topo -m`"
        ) from None


def check_gpus(gpus: Gpus) -> list[Finding]:
    """Report which GPUs exist, who else uses them, and how they are connected."""
    if gpus.error is not None:
        fix = "start the container with --gpus all, or reinstall the driver"
        return [Finding("GPUs", "problem", f"nvidia-smi fails: {gpus.error}", fix)]
    if not gpus.listed:
        return [Finding("GPUs", "ok", "none", "train in CPU processes")]
    findings = [_kinds(gpus.listed), _memory(gpus.listed)]
    if len(gpus.listed) > 1:
        findings.append(_connection(gpus))
    return findings


def _kinds(gpus: tuple[Gpu, ...]) -> Finding:
    counts = {gpu.name: sum(other.name == gpu.name for other in gpus) for gpu in gpus}
    found = ", ".join(f"{count} x {name}" for name, count in counts.items()) + f", driver {gpus[0].driver}"
    if len(counts) == 1:
        return Finding("GPUs", "ok", found, "fivefold plan finds a layout for them")
    fix = "the slowest GPU sets the pace of all: choose equal ones with CUDA_VISIBLE_DEVICES"
    return Finding("GPUs", "warning", found, fix)


def _memory(gpus: tuple[Gpu, ...]) -> Finding:
    known = {gpu.number: (gpu.memory, gpu.used) for gpu in gpus if gpu.memory and gpu.used is not None}
    busy = {index: used for index, (memory, used) in known.items() if used > BUSY * memory}
    if busy:
        found = f"up to {gib(max(busy.values()))} in use on GPU {', '.join(map(str, busy))}"
        return Finding("GPU memory", "warning", found, "end the programs that nvidia-smi shows, or hide these GPUs")
    if len(known) < len(gpus):
        return Finding("GPU memory", "ok", "nvidia-smi does not tell it", "fivefold plan says how much a recipe takes")
    least = gib(min(memory for memory, _ in known.values()))
    return Finding("GPU memory", "ok", f"{least} each, free", "all of it can be used")


def _connection(gpus: Gpus) -> Finding:
    if gpus.unreachable:
        pairs = ", ".join(f"{i}-{j}" for i, j in gpus.unreachable[:4]) + (" ..." if len(gpus.unreachable) > 4 else "")
        found = f"no direct access between {len(gpus.unreachable)} pairs ({pairs})"
        fix = "data goes through host memory: prefer p and d to t, c and e; on your own host, switch PCIe ACS off"
        return Finding("GPU links", "warning", found, fix)
    if gpus.links is None:
        return Finding(
            "GPU links", "ok", "direct access; nvidia-smi topo shows no matrix", "try t, c and e on neighbours"
        )
    nvlink = [pair for pair, link in gpus.links.items() if link.startswith("NV")]
    if len(nvlink) == len(gpus.links):
        kinds = ", ".join(sorted(set(gpus.links.values())))
        return Finding("GPU links", "ok", f"NVLink between all ({kinds})", "t, c and e can span all of them")
    kinds = ", ".join(sorted({link for link in gpus.links.values() if not link.startswith("NV")}))
    if nvlink:
        pairs = ", ".join(f"{i}-{j}" for i, j in nvlink[:6]) + (" ..." if len(nvlink) > 6 else "")
        fix = "keep t, c and e within linked GPUs (CUDA_VISIBLE_DEVICES orders them), p and d across"
        return Finding("GPU links", "warning", f"NVLink between {pairs} only, else {kinds}", fix)
    return Finding("GPU links", "warning", f"no NVLink ({kinds})", "PCIe is slow for t, c and e: prefer p and d")


def check_kernels(n_devices: int, *, compiler: bool, headers: bool) -> list[Finding]:
    """Check that Triton can compile its kernels.

    torch brings Triton along on CUDA, and Triton compiles a piece of C for every kernel that it launches.
    """
    if n_devices == 0:
        return []
    if not compiler:
        return [
            Finding(
                "Triton", "problem", "there is no C compiler, which its kernels need", "apt-get install gcc, or set CC"
            )
        ]
    if not headers:
        fix = "install your Python's development package (python3-dev)"
        return [Finding("Triton", "problem", "there is no Python.h, which its kernels need", fix)]
    return [Finding("Triton", "ok", "C compiler and Python.h are here", "fused kernels are compiled at first use")]


def has_compiler() -> bool:
    """Say whether there is a C compiler where Triton looks for one."""
    return "CC" in os.environ or any(shutil.which(name) for name in COMPILERS)


def has_headers() -> bool:
    """Say whether Python's own C headers are installed."""
    return (Path(sysconfig.get_path("include")) / "Python.h").is_file()


def _smi(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True).stdout
