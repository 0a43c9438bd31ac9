"""Objects that the workers of these tests hold; only `GlooEngine` imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from fivefold.cluster.role import Part
from fivefold.observe.progress import counting

HANG_S = 300.0
SOON_S = 120.0
"""Most seconds until something that takes less than `HANG_S` is over, however busy the machine is."""

if TYPE_CHECKING:
    from fivefold.cluster.session import Session


def gone(pids: Sequence[int], within_s: float = SOON_S) -> bool:
    """Return whether all these processes end in time, or are zombies by then."""
    deadline = time.monotonic() + within_s
    while any(_runs(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_file(path: Path) -> None:
    """Return once `path` exists; raise TimeoutError if that takes `HANG_S`."""
    deadline = time.monotonic() + HANG_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} does not exist")
        time.sleep(0.01)


class Engine:
    """Answers, yields and fails as the test asks."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.n_yielded = 0
        self.told = threading.Event()
        self.word = ""

    def echo(self, value: object, suffix: str = "") -> str:
        return f"{self.rank}:{value}{suffix}"

    def status_of_a_child(self) -> int:
        return subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=False).returncode

    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def items(self, n: int) -> Iterator[bytes]:
        for index in range(n):
            self.n_yielded += 1
            yield bytes([self.rank, index]) * 100_000

    def items_on_record(self, path: str, n: int) -> Iterator[int]:
        """Yield items; the file at `path` grows by one byte for each."""
        with open(path, "ab", buffering=0) as record:
            for index in range(n):
                record.write(b".")
                yield index

    def make_bytes(self, n: int) -> tuple[str, bytes]:
        """Return a summary and a payload."""
        return f"{self.rank} made {n}", bytes(n)

    def total_length(self, *payloads: bytes) -> int:
        return sum(map(len, payloads))

    def work(self, job: int | str) -> tuple[int, str]:
        """Return a job, and the rank that did it; a job that is a text cannot be done."""
        if isinstance(job, str):
            raise RuntimeError(job)
        return job, f"rank {self.rank}"

    def work_until_told(self, job: int) -> tuple[int, str]:
        self.told.wait(HANG_S)
        return job, self.word

    def run_until_told(self) -> str:
        with counting("listening", 4) as count:
            count(1)
            self.told.wait(HANG_S)
        return self.word

    def tell_to_stop(self, word: str) -> str:
        self.word = word
        self.told.set()
        return f"{self.rank} heard {word}"

    def yielded(self) -> int:
        return self.n_yielded

    def items_then_raise(self, n: int, failing_rank: int) -> Iterator[int]:
        yield from range(n)
        if self.rank == failing_rank:
            raise ValueError("the generator broke")

    def total(self, items: Iterable[bytes], start: int) -> int:
        return start + sum(item[1] for item in items)

    def take_one(self, items: Iterable[bytes]) -> int:
        return next(iter(items))[1]

    def raise_while_fed(self, items: Iterable[bytes]) -> None:
        next(iter(items))
        raise ValueError("cannot digest it")

    def raise_on(self, rank: int, message: str) -> None:
        if self.rank == rank:
            raise ValueError(message)
        time.sleep(HANG_S)

    def raise_both(self, cause_rank: int, path: str) -> None:
        """Raise on two ranks, on `cause_rank` once there is a file at `path`."""
        if self.rank == cause_rank:
            wait_for_file(Path(path))
            raise ValueError("the cause")
        raise RuntimeError("[gloo] Connection closed by peer")

    def raise_unpicklable(self) -> None:
        class Local(Exception):
            def __reduce__(self) -> str:
                raise TypeError("not picklable")

        raise Local("cannot travel")

    def kill_itself(self, rank: int, signal: int) -> None:
        if self.rank == rank:
            print("last words", flush=True)
            for package in ("apex", "transformer_engine"):
                warnings.warn(f"{package} is not installed", stacklevel=1)
            os.kill(os.getpid(), signal)
        time.sleep(HANG_S)

    def exit(self, code: int) -> None:
        os._exit(code)

    def hang_here(self, folder: str | None = None) -> None:
        """Hang; a file in `folder` tells that this rank does."""
        if folder is not None:
            Path(folder, f"{self.rank} hangs").touch()
        time.sleep(HANG_S)

    def spawn_child(self) -> int:
        """Start a process that runs until it is killed; return its id."""
        return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({HANG_S})"]).pid

    def pid(self) -> int:
        return os.getpid()

    def say(self, text: str) -> None:
        print(text)
        print(text, file=sys.stderr)
        os.write(1, f"native {text}\n".encode())


def listening_addresses(session: Session) -> set[str]:
    """Return the IP addresses at which this process and those of the session's Ray accept connections."""
    assert session._own_ray is not None
    processes = [psutil.Process(), *session._own_ray.processes()]
    connections = [each for process in processes for each in process.net_connections("inet")]
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


class GlooEngine(Engine):
    """Joins its peers in torch.distributed."""

    def __init__(self) -> None:
        super().__init__()
        import torch.distributed as dist

        self.had_before = [name for name in ("colorsys", "chunk") if name in sys.modules]
        dist.init_process_group("gloo")
        self.world = dist.get_world_size()

    def imported_before_it_was_built(self) -> list[str]:
        return self.had_before

    def sum_of_ranks(self) -> float:
        import torch
        import torch.distributed as dist

        value = torch.tensor(float(self.rank))
        dist.all_reduce(value)
        return value.item()

    def reduce_without(self, rank: int, timeout_s: float, folder: str) -> None:
        """Sum over all ranks, with a time limit, while `rank` does something else for ever.

        Files in `folder` tell that a rank hangs, and that another one sums.
        """
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        if self.rank == rank:
            self.hang_here(folder)
        wait_for_file(Path(folder, f"{rank} hangs"))

        def ones() -> torch.Tensor:
            Path(folder, f"{self.rank} sums").touch()
            return torch.ones(1)

        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
        dist.all_reduce(ones())

    def barrier_without(self, rank: int, signal: int) -> None:
        import torch.distributed as dist

        if self.rank == rank:
            os.kill(os.getpid(), signal)
        dist.barrier()


def build_engine() -> Engine:
    return Engine()


def broken_build(rank: int) -> Engine:
    engine = Engine()
    if engine.rank == rank:
        raise ValueError("no such checkpoint")
    time.sleep(HANG_S)
    return engine


class Tally(Part):
    """Counts what it gets, for the engine that holds it."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._total = engine, 0

    def add(self, number: int) -> str:
        self._total += number
        return self._engine.echo(self._total)
