"""What the sandbox keeps out, by programs that try it, and what it lets programs do."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fivefold.rewards.sandbox import landlock, seccomp
from fivefold.rewards.sandbox.runner import Result, Sandbox, run
from tests.unit.rewards.conftest import LONGEST_S

OUTPUT = {"asks": "output"}
GENEROUS = Sandbox(timeout_s=600.0)
"""For programs that end by themselves: the machine may be busy."""
ATTEMPTS = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
parent = os.getppid()
def system_call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
def libc_call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
succeeded = []
def attempt(name, function):
    try:
        function()
    except (OSError, MemoryError, RuntimeError):
        return
    succeeded.append(name)
"""


def succeeded(attempts: str, **names: object) -> list[str]:
    """Return the attempts that succeeded, of a program that makes each and goes on."""
    values = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    result = run(ATTEMPTS + values + attempts + "\nprint(json.dumps(succeeded))", OUTPUT, sandbox=GENEROUS)
    assert result.is_complete, result
    names_of: list[str] = json.loads(result.output)
    return names_of


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a file that a program must neither read nor change, and a folder that it must not write to."""
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "secret.txt").chmod(0o644)
    return tmp_path


def test_nothing_is_written_outside_the_folder(home: Path) -> None:
    before = (home / "secret.txt").stat()
    tries = """
secret = f"{home}/secret.txt"
attempt("create", lambda: open(f"{home}/new.txt", "w"))
attempt("create in /tmp", lambda: open("/tmp/fivefold-new.txt", "w"))
attempt("create above", lambda: open("../fivefold-new.txt", "w"))
attempt("overwrite", lambda: open(secret, "w"))
attempt("append", lambda: open(secret, "a"))
attempt("truncate", lambda: os.truncate(secret, 0))
attempt("delete", lambda: os.remove(secret))
attempt("rename", lambda: os.rename(secret, f"{home}/other.txt"))
attempt("folder", lambda: os.mkdir(f"{home}/folder"))
attempt("chmod", lambda: os.chmod(secret, 0))
attempt("chown", lambda: os.chown(secret, 1, 1))
attempt("time", lambda: os.utime(secret, (0, 0)))
attempt("attribute", lambda: os.setxattr(secret, "user.a", b"1"))
attempt("node", lambda: os.mkfifo(f"{home}/pipe"))
attempt("take in", lambda: os.rename(secret, "mine.txt"))
open("mine.txt", "w").close()
attempt("put out", lambda: os.rename("mine.txt", f"{home}/mine.txt"))
attempt("shared memory", lambda: open("/dev/shm/fivefold-new", "w"))
attempt("memory file", lambda: os.memfd_create("a"))
attempt("io_uring", lambda: system_call(425, 8, ctypes.create_string_buffer(256)))
attempt("root", lambda: os.chroot("."))
"""
    assert succeeded(tries, home=str(home)) == []
    assert [file.name for file in home.iterdir()] == ["secret.txt"]
    after = (home / "secret.txt").stat()
    assert (after.st_size, after.st_mode, after.st_mtime, after.st_uid) == (
        before.st_size,
        before.st_mode,
        before.st_mtime,
        before.st_uid,
    )


def test_no_file_of_others_is_read_not_even_by_links(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "secret")
    tries = """
secret = f"{home}/secret.txt"
attempt("read", lambda: open(secret).read())
attempt("list", lambda: os.listdir(home))
attempt("list home", lambda: os.listdir(os.path.expanduser("~root")))
attempt("users", lambda: open("/etc/passwd").read())
attempt("project", lambda: open(project).read())
for name in ("environ", "cmdline", "maps", "mem", "fd/0"):
    attempt(name, lambda: open(f"/proc/{parent}/{name}", "rb").read(1))
attempt("processes", lambda: os.listdir("/proc"))
attempt("own memory", lambda: open("/proc/self/mem", "r+b"))
attempt("by root", lambda: open(f"/proc/self/root{secret}").read())
attempt("symbolic link", lambda: os.symlink(secret, "link"))
attempt("hard link", lambda: os.link(secret, "link"))
attempt("link", lambda: open("link").read())
attempt("memory of the parent", lambda: libc_call("process_vm_readv", parent, None, 0, None, 0, 0))
attempt("trace", lambda: libc_call("ptrace", 16, parent, 0, 0))
attempt("handle of the parent", lambda: os.pidfd_open(parent))
succeeded += [key for key in os.environ if "SECRET" in key]
"""
    assert succeeded(tries, home=str(home), project=__file__) == []


def test_there_is_no_network() -> None:
    path = f"/tmp/fivefold-test-{os.getpid()}.sock"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(path)
        unix.listen()
        tries = """
import socket
def to(family, kind, action):
    return lambda: action(socket.socket(family, kind))
attempt("tcp", to(socket.AF_INET, socket.SOCK_STREAM, lambda s: s.connect(("127.0.0.1", port))))
attempt("tcp bind", to(socket.AF_INET, socket.SOCK_STREAM, lambda s: s.bind(("127.0.0.1", 0))))
attempt("tcp6", to(socket.AF_INET6, socket.SOCK_STREAM, lambda s: s.bind(("::1", 0))))
attempt("udp", to(socket.AF_INET, socket.SOCK_DGRAM, lambda s: s.sendto(b"a", ("127.0.0.1", port))))
attempt("udp bind", to(socket.AF_INET, socket.SOCK_DGRAM, lambda s: s.bind(("127.0.0.1", 0))))
attempt("raw", to(socket.AF_INET, socket.SOCK_RAW, lambda s: s.close()))
attempt("netlink", to(socket.AF_NETLINK, socket.SOCK_RAW, lambda s: s.close()))
attempt("unix", to(socket.AF_UNIX, socket.SOCK_STREAM, lambda s: s.connect(path)))
attempt("unix bind", to(socket.AF_UNIX, socket.SOCK_STREAM, lambda s: s.bind("a.sock")))
attempt("abstract", to(socket.AF_UNIX, socket.SOCK_DGRAM, lambda s: s.bind("\\0fivefold-test")))
attempt("pair of datagrams", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
attempt("pair that connects", lambda: socket.socketpair()[0].connect(path))
attempt("name", lambda: socket.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)[0] and socket.create_connection(
    ("localhost", port)))
"""
        assert succeeded(tries, port=tcp.getsockname()[1], path=path) == []
    os.remove(path)


def test_no_process_is_started_or_reached() -> None:
    """No attempt would do harm if it succeeded: signal 0 is only checked."""
    names = {"before_priority": os.getpriority(os.PRIO_PROCESS, 0), "before_cores": os.sched_getaffinity(0)}
    tries = """
import fcntl, multiprocessing, resource, signal, subprocess, threading
attempt("fork", os.fork)
attempt("subprocess", lambda: subprocess.run(["/bin/true"]))
attempt("spawn", lambda: os.posix_spawn("/bin/true", ["true"], {}))
attempt("pool", lambda: multiprocessing.get_context("fork").Process(target=print).start())
attempt("exec", lambda: os.execv(sys.executable, [sys.executable, "-c", "pass"]))
attempt("session", os.setsid)
attempt("namespace", lambda: libc_call("unshare", 0x10000000))
attempt("kill the parent", lambda: os.kill(parent, 0))
attempt("kill all", lambda: os.kill(-1, 0))
attempt("kill the group of the parent", lambda: os.killpg(os.getpgid(parent), 0))
tgkill = {"x86_64": 234, "aarch64": 131}[os.uname().machine]
attempt("signal to a thread of the parent", lambda: system_call(tgkill, parent, parent, 0))
attempt("signal by a file", lambda: fcntl.fcntl(0, 8, parent))
attempt("signal by ioctl", lambda: fcntl.ioctl(0, 0x8901, parent.to_bytes(4, "little")))
attempt("limit the parent", lambda: resource.prlimit(parent, resource.RLIMIT_CORE))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, parent, before_priority))
attempt("cores", lambda: os.sched_setaffinity(parent, before_cores))
attempt("shared memory", lambda: libc_call("shmget", 1, 4096, 0o1666))
def raise_limit():
    try:
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    except ValueError:
        raise OSError("refused")
attempt("limits", raise_limit)
"""
    assert succeeded(tries, **names) == []


def programs() -> list[psutil.Process]:
    """Return the programs that run below this process; a child that has ended has no command line."""
    running = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if "child.py" in " ".join(child.cmdline()):
                running.append(child)
    return running


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(1000)",
        "import signal\nfor n in (1, 2, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        ("import os\nfor n in range(3, 64):\n    try: os.close(n)\n    except OSError: pass\nos.close(1)\nos.close(2)\n"
         "while True: pass"),
        "import threading\nthreading.Thread(target=lambda: __import__('time').sleep(1000)).start()",
    ],
)  # fmt: skip
def test_a_program_that_does_not_end_is_ended(program: str) -> None:
    began = time.perf_counter()
    assert run(program, OUTPUT, sandbox=Sandbox(timeout_s=1.0)).ended == "time"
    assert time.perf_counter() - began < LONGEST_S
    assert programs() == []


@pytest.mark.parametrize(
    ("program", "ended"),
    [
        ("while True: print('a' * 100000)", "output"),
        ("import sys\nwhile True: print('a' * 100000, file=sys.stderr)", "output"),
        ("i = 0\nwhile True:\n    i += 1\n    open(str(i), 'w').close()", "files"),
        ("i = 0\nwhile True:\n    i += 1\n    open(str(i), 'w').write('a' * 10**7)", "files"),
        (
            "import os\nkept = []\nfor i in range(40):\n    kept.append(open(str(i), 'w'))\n    os.unlink(str(i))\n"
            "    kept[-1].write('a' * 10**7)\n    kept[-1].flush()\nfor i in range(10**8): pass",
            "files",
        ),
    ],
)
def test_a_program_that_floods_is_ended(program: str, ended: str) -> None:
    assert run(program, OUTPUT, sandbox=GENEROUS).ended == ended


@pytest.mark.parametrize(
    ("program", "kept"),
    [
        ("input()", "exit 1"),
        ("a = bytearray(1 << 40)", "exit 1"),
        ("a = []\nwhile True: a.append(bytearray(1 << 20))", "exit 1"),
        ("a = 'a'\nwhile True: a += a", "exit 1"),
        ("with open('a', 'wb') as file:\n    for _ in range(100): file.write(b'a' * (1 << 20))", "exit 1"),
        ("f = [open('/dev/null') for _ in range(1000)]", "exit 1"),
        ("from threading import Thread\nfrom time import sleep\n"
         "while True: Thread(target=sleep, args=[99], daemon=True).start()", "exit 1"),
    ],
)  # fmt: skip
def test_a_program_that_takes_more_than_there_is_fails(program: str, kept: str) -> None:
    assert run(program, OUTPUT, sandbox=GENEROUS).ended == kept


def test_programs_may_do_what_solutions_do() -> None:
    program = """
import asyncio, functools, heapq, os, random, re, resource, sys, tempfile, threading, zoneinfo
sys.setrecursionlimit(10**6)
threading.stack_size(1 << 26)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
thread = threading.Thread(target=lambda: print(depth(20000)))
thread.start()
thread.join()
async def later():
    await asyncio.sleep(0.001)
    return "later"
print(asyncio.run(later()))
with open("a.txt", "w") as file: file.write("own")
os.rename("a.txt", "b.txt")
print(open("b.txt").read(), os.listdir("."))
print(tempfile.TemporaryFile().write(b"abc"), random.SystemRandom().random() < 1)
print(zoneinfo.ZoneInfo("Europe/Berlin") if os.path.exists("/usr/share/zoneinfo/Europe") else "Europe/Berlin")
print(sys.stdin.read(), sys.argv, __name__)
"""
    result = run(program, OUTPUT, "äöü", sandbox=GENEROUS)
    assert result.is_complete
    expected = "20000\nlater\nown ['b.txt']\n3 True\nEurope/Berlin\näöü ['program.py'] __main__\n"
    assert result.output.decode() == expected


def test_a_program_has_neither_installed_packages_nor_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    program = """
import importlib.util, os, sys
print([name for name in ("torch", "pydantic", "fivefold", "test_sandbox") if importlib.util.find_spec(name)])
print(sorted(set(os.environ) - {"LD_LIBRARY_PATH"}))
"""
    result = run(program, OUTPUT, sandbox=GENEROUS)
    # A package that is imported already would be found in sys.modules: it is the sandbox itself.
    assert result.output.decode().splitlines()[1] == "['LANG', 'MALLOC_ARENA_MAX']"
    assert "torch" not in result.output.decode()
    assert "pydantic" not in result.output.decode()


def test_a_program_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "from fivefold.rewards.sandbox.runner import Sandbox, run\n"
        "run('import time; time.sleep(1000)', {'asks': 'output'}, sandbox=Sandbox(timeout_s=1000.0))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    process = psutil.Process(parent.pid)
    deadline = time.monotonic() + LONGEST_S
    while not (children := process.children()) and time.monotonic() < deadline:
        time.sleep(0.02)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert psutil.wait_procs(children, timeout=LONGEST_S)[1] == []


def test_a_child_that_cannot_close_the_sandbox_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: -1)
    asks = {"asks": "output", "landlock": 7, "memory_mb": "much"}
    with pytest.raises(RuntimeError, match="failed before it, with status 1"):
        run("print('ran')", asks, sandbox=GENEROUS)


def test_the_limits_of_a_program_do_not_touch_the_next_one() -> None:
    first, second = (
        run(program, OUTPUT, sandbox=GENEROUS) for program in ("open('a', 'w')", "import os; print(os.listdir())")
    )
    assert first.is_complete
    assert second == Result("exit 0", b"[]\n", b"")


@pytest.mark.parametrize(("version", "rights"), [(1, 13), (2, 14), (3, 15), (4, 15), (5, 16), (7, 16)])
def test_older_kernels_are_asked_for_the_rights_that_they_know(version: int, rights: int) -> None:
    assert landlock.file_rights(version) == 2**rights - 1


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_decides_by_architecture_number_and_arguments(machine: str) -> None:
    program = seccomp.filter_program(machine)
    numbers = seccomp.numbers(machine)

    def decided(number: int, *arguments: int, architecture: int = seccomp.ARCHITECTURES[machine]) -> int:
        data = struct.pack("=iIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
        return interpreted(program, data)

    refused = seccomp.ERRNO | 38
    assert decided(numbers["read"]) == seccomp.ALLOW
    assert decided(numbers["socketpair"], 1, 0x80001) == seccomp.ALLOW
    assert decided(numbers["socketpair"], 1, 2) == refused
    assert decided(numbers["socketpair"], 2, 1) == refused
    assert decided(numbers["clone"], 0x3D0F00) == seccomp.ALLOW
    assert decided(numbers["clone"], 17) == refused
    assert decided(numbers["kill"], os.getpid()) == seccomp.ALLOW
    assert decided(numbers["kill"], os.getppid()) == refused
    assert decided(numbers["fcntl"], 0, 8) == refused
    assert decided(numbers["fcntl"], 0, 1030) == seccomp.ALLOW
    socket_number = {"x86_64": 41, "aarch64": 198}[machine]
    assert decided(socket_number) == refused
    assert decided(435) == refused, "clone3, in whose place glibc calls clone"
    assert decided(numbers["read"] | 0x40000000) == refused, "the x32 interface"
    assert decided(numbers["read"], architecture=0x40000003) == seccomp.KILL_PROCESS
    assert seccomp.missing() is None or platform.machine() not in seccomp.ARCHITECTURES


def interpreted(program: bytes, data: bytes) -> int:
    """Run a filter as the kernel does."""
    instructions = list(struct.iter_unpack("=HBBI", program))
    value = at = 0
    while True:
        code, if_true, if_false, operand = instructions[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
        elif code == 0x54:
            value &= operand
        elif code == 0x15:
            at += if_true if value == operand else if_false
        else:
            assert code == 0x06
            return operand
