"""Landlock: the kernel refuses this process all files but those that are named, for good."""

from __future__ import annotations

import ctypes
import os
import stat
import struct

SYS_CREATE_RULESET, SYS_ADD_RULE, SYS_RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, which are the same on all architectures."""
GET_VERSION = 1
PATH_BENEATH = 1

WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8
TRUNCATE = 1 << 14
OF_FILES = 1 | WRITE_FILE | READ_FILE | TRUNCATE | 1 << 15
"""Rights that a rule about a file, and not a folder, may grant."""
READING = READ_FILE | READ_DIR
OWN_FOLDER = READING | WRITE_FILE | REMOVE_FILE | MAKE_REG | TRUNCATE
"""What a program may do in its folder. Without subfolders and links, its size is quickly measured."""

TCP = 0b11
SCOPES = 0b11
"""Abstract Unix sockets and signals of processes outside."""


def abi() -> int:
    """Return the version of Landlock in this kernel; 0 if it has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, libc.syscall(SYS_CREATE_RULESET, None, 0, GET_VERSION))


def file_rights(version: int) -> int:
    """Return all rights on files that a version of Landlock knows; older kernels refuse rights of newer ones."""
    n_rights = 13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16
    return (1 << n_rights) - 1


def restrict(version: int, rules: dict[str, int]) -> None:
    """Refuse this process everything that Landlock governs, except for rights on some paths.

    Args:
        version: what `abi` returns.
        rules: rights by path; a path that is not there is skipped.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    known = file_rights(version)
    fields = [known, *([TCP] if version >= 4 else []), *([SCOPES] if version >= 6 else [])]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = _checked(libc.syscall(SYS_CREATE_RULESET, attributes, len(attributes), 0), "a rule set")
    for path, rights in rules.items():
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        is_folder = stat.S_ISDIR(os.fstat(place).st_mode)
        rule = struct.pack("=Qi", rights & known & (-1 if is_folder else OF_FILES), place)
        _checked(libc.syscall(SYS_ADD_RULE, ruleset, PATH_BENEATH, rule, 0), f"a rule for {path}")
        os.close(place)
    _checked(libc.syscall(SYS_RESTRICT_SELF, ruleset, 0), "the restriction")
    os.close(ruleset)


def _checked(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock refuses {what}: {os.strerror(error)}")
    return result
