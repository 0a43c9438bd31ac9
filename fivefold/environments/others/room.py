"""Runs shell commands in Linux namespaces: no network, no files of yours, and nothing of them outlives the command.

/            new and empty for each command; it has this machine's programs, which nobody can write
/app, /tmp   folders that the caller mounts
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

_OUTSIDE = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc")
"""Mounts need a user who is root inside of the namespaces."""
_INSIDE = """\
set -e
root=$1 work=$2 command=$3; shift 3
mount -t tmpfs -o mode=755,size=64m tmpfs "$root"
cd "$root"
mkdir -p proc dev etc tmp old
mount -t proc proc proc
for each in /usr /bin /sbin /lib /lib32 /lib64 /libx32; do
    if [ -L "$each" ]; then
        cp -P "$each" ".$each"
    elif [ -d "$each" ]; then
        mkdir -p ".$each"
        mount --bind "$each" ".$each"
        mount -o remount,bind,ro,nosuid,nodev ".$each"
    fi
done
for each in /dev/null /dev/zero /dev/random /dev/urandom /etc/ld.so.cache /etc/passwd /etc/group; do
    if [ -e "$each" ]; then touch ".$each"; mount --bind "$each" ".$each"; fi
done
[ ! -d /etc/alternatives ] || cp -a /etc/alternatives etc/
while [ $# -gt 0 ]; do mkdir -p ".$2"; mount --bind "$1" ".$2"; shift 2; done
pivot_root . old
umount -l /old
rmdir /old
cd "$work"
ulimit -c 0 -v 4194304 -f 1048576 -u 512
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs /usr/bin/env -i \\
    HOME=/tmp LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin bash -c "$command"
"""
"""Without capabilities, a command cannot make what is mounted writable. Limits: 512 processes (not for root), 4 GiB of
memory for each, files of 1 GiB."""
MOST_BYTES = 1 << 20
"""Most output that is read into memory."""


class TooLate(Exception):
    """A command took longer than its limit, and was ended."""


def run_closed_in(command: str, folders: Mapping[str, Path], work: str, limit_s: float) -> tuple[int, str]:
    """Run a command of bash.

    Args:
        command: the command.
        folders: folders of this machine by the absolute path where the command sees them; it may write all of them.
        work: the path in which it begins.
        limit_s: seconds after which it is ended, with all that it started.

    Returns:
        Its exit code, and what it wrote to standard output and standard error: at most `MOST_BYTES`.

    Raises:
        TooLate: it took longer.
    """
    mounts = [text for inside, outside in folders.items() for text in (str(outside), inside)]
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryFile() as output:
        words = [*_OUTSIDE, "--", "bash", "-c", _INSIDE, "room", root, work, command, *mounts]
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise TooLate(f"the command took longer than {limit_s:g} s") from None
        output.seek(0)
        return done.returncode, output.read(MOST_BYTES).decode(errors="replace")


def check_rooms() -> None:
    """Try a command.

    Raises:
        ValueError: the machine lacks a program for it, or its kernel does not let users make namespaces.
    """
    try:
        code, output = run_closed_in("true", {}, "/", 20.0)
    except (OSError, TooLate) as error:
        code, output = 1, str(error)
    if code != 0:
        raise ValueError(
            f"commands of the model cannot be closed in on this machine: {output.strip() or f'exit code {code}'}. It "
            "needs unshare, pivot_root and setpriv (util-linux), and user namespaces"
        )
