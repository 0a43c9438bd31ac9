"""seccomp: the kernel answers all system calls outside a list as if it did not have them, for good.

A list of what is allowed, and not of what is forbidden, also keeps out what future kernels add. It has no network
(`socket`), no processes (`fork`, `execve`, `clone` without threads), no files by other ways than Landlock governs
(`chmod`, `utime`, `io_uring`, `memfd_create`), and nothing that reaches other processes (`ptrace`, shared memory).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import NamedTuple

PR_GET_SECCOMP, PR_SET_SECCOMP, MODE_FILTER = 21, 22, 2
ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, MASK, EQUALS, RETURN = 0x20, 0x54, 0x15, 0x06
"""Instructions of the kernel's filter language: load 32 bits, bitwise and, jump if equal, return."""
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
"""Bytes of `struct seccomp_data`."""
ALL_BITS = 0xFFFFFFFF

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# fmt: off
ON_BOTH = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "lseek": (8, 62), "pread64": (17, 67), "pwrite64": (18,
    68), "readv": (19, 65), "writev": (20, 66), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286),
    "pwritev2": (328, 287), "dup": (32, 23), "dup3": (292, 24), "fsync": (74, 82), "fdatasync": (75, 83),
    "ftruncate": (77, 46), "fallocate": (285, 47), "fadvise64": (221, 223), "readahead": (187, 213),
    "sync_file_range": (277, 84), "copy_file_range": (326, 285), "sendfile": (40, 71), "splice": (275, 76), "tee":
    (276, 77), "flock": (73, 32), "pipe2": (293, 59), "eventfd2": (290, 19), "close_range": (436, 436), "umask":
    (95, 166), "openat": (257, 56), "fstat": (5, 80), "fstatat": (262, 79), "statx": (332, 291), "statfs": (137,
    43), "fstatfs": (138, 44), "faccessat": (269, 48), "faccessat2": (439, 439), "readlinkat": (267, 78),
    "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "unlinkat": (263, 35),
    "renameat": (264, 38), "renameat2": (316, 276), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215),
    "brk": (12, 214), "mremap": (25, 216), "msync": (26, 227), "mincore": (27, 232), "madvise": (28, 233),
    "membarrier": (324, 283), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131,
    132), "restart_syscall": (219, 128), "futex": (202, 98), "set_tid_address": (218, 96), "set_robust_list": (273,
    99), "get_robust_list": (274, 100), "rseq": (334, 293), "sched_yield": (24, 124), "sched_getaffinity": (204,
    123), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "getcpu": (309, 168), "exit": (60, 93), "exit_group": (231, 94), "wait4":
    (61, 260), "waitid": (247, 95), "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid":
    (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getpgid": (121, 155), "getsid":
    (124, 156), "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158), "uname": (63, 160),
    "sysinfo": (99, 179), "times": (100, 153), "getrlimit": (97, 163), "getrusage": (98, 165), "getrandom": (318,
    278), "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229,
    114), "gettimeofday": (96, 169), "getitimer": (36, 102), "setitimer": (38, 103), "timer_create": (222, 107),
    "timer_settime": (223, 110), "timer_gettime": (224, 108), "timer_delete": (226, 111), "timer_getoverrun": (225,
    109), "timerfd_create": (283, 85), "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87), "epoll_create1":
    (291, 20), "epoll_ctl": (233, 21), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441), "ppoll": (271, 73),
    "pselect6": (270, 72), "sendto": (44, 206), "recvfrom": (45, 207), "shutdown": (48, 210), "getsockname": (51,
    204), "getpeername": (52, 205), "getsockopt": (55, 209), "clone": (56, 220), "prlimit64": (302, 261), "kill":
    (62, 129), "tgkill": (234, 131), "fcntl": (72, 25), "ioctl": (16, 29), "socketpair": (53, 199),
}
"""System calls with their numbers on x86_64 and on aarch64."""
ON_X86_64 = {
    "open": 2, "creat": 85, "stat": 4, "lstat": 6, "access": 21, "readlink": 89, "unlink": 87, "rename": 82, "dup2":
    33, "pipe": 22, "select": 23, "poll": 7, "epoll_create": 213, "epoll_wait": 232, "eventfd": 284, "getdents": 78,
    "alarm": 37, "pause": 34, "time": 201, "getpgrp": 111, "arch_prctl": 158,
}
"""Older system calls, which aarch64 does not have."""
# fmt: on


class Condition(NamedTuple):
    """A system call is allowed if the lower 32 bits of an argument, masked, have one of some values."""

    argument: int
    mask: int
    values: tuple[int, ...]


def conditions() -> dict[str, tuple[Condition, ...]]:
    """Return the conditions under which some of the listed system calls are allowed."""
    thread, own, unix, stream = 0x10000, os.getpid(), 1, 1
    to_itself = Condition(0, ALL_BITS, (own,))
    return {
        # New threads, and no new processes.
        "clone": (Condition(0, thread, (thread,)),),
        "prlimit64": (Condition(0, ALL_BITS, (0, own)),),
        "kill": (to_itself,),
        "tgkill": (to_itself,),
        # F_DUPFD to F_SETLKW, and F_DUPFD_CLOEXEC: F_SETOWN would send signals to others.
        "fcntl": (Condition(1, ALL_BITS, (*range(8), 1030)),),
        # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
        "ioctl": (Condition(1, ALL_BITS, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),
        # asyncio wakes its loop by a pair of connected sockets.
        "socketpair": (Condition(0, ALL_BITS, (unix,)), Condition(1, 0xF, (stream,))),
    }


def missing() -> str | None:
    """Return why this machine cannot filter system calls; None if it can."""
    if platform.machine() not in ARCHITECTURES:
        return f"a list of system calls for {platform.machine()} (there is one for {' and '.join(ARCHITECTURES)})"
    libc = ctypes.CDLL(None, use_errno=True)
    return "seccomp in the kernel" if libc.prctl(PR_GET_SECCOMP, 0, 0, 0, 0) < 0 else None


def restrict() -> None:
    """Filter the system calls of this process, which must have given up its privileges, and of its threads.

    Raises:
        OSError: the kernel refuses.
    """
    program = filter_program(platform.machine())
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, of 8 bytes each, and their address.
    argument = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_SECCOMP, MODE_FILTER, argument, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"seccomp refuses the filter: {os.strerror(error)}")


def filter_program(machine: str) -> bytes:
    """Return the kernel's filter for a machine: 8 bytes an instruction."""
    refuse = _instruction(RETURN, ERRNO | errno.ENOSYS)
    parts = [
        _instruction(LOAD, ARCHITECTURE_AT),
        # System calls of another architecture have other numbers.
        _instruction(EQUALS, ARCHITECTURES[machine], 1, 0),
        _instruction(RETURN, KILL_PROCESS),
        _instruction(LOAD, NUMBER_AT),
    ]
    conditional = conditions()
    for name, number in numbers(machine).items():
        allow = [*(_unless(condition, refuse) for condition in conditional.get(name, ())), _instruction(RETURN, ALLOW)]
        body = b"".join(allow)
        parts += [_instruction(EQUALS, number, 0, len(body) // 8), body]
    return b"".join([*parts, refuse])


def numbers(machine: str) -> dict[str, int]:
    """Return the numbers of the allowed system calls on a machine, by name."""
    column = list(ARCHITECTURES).index(machine)
    both = {name: pair[column] for name, pair in ON_BOTH.items()}
    return both | ON_X86_64 if machine == "x86_64" else both


def _unless(condition: Condition, refuse: bytes) -> bytes:
    """Return instructions that refuse the system call unless the condition holds, and else continue after them."""
    count = len(condition.values)
    tests = [_instruction(EQUALS, value, count - index, 0) for index, value in enumerate(condition.values)]
    load = _instruction(LOAD, ARGUMENTS_AT + 8 * condition.argument)
    return b"".join([load, _instruction(MASK, condition.mask), *tests, refuse])


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
