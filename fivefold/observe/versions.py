"""Versions of the software that a run's results depend on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from fivefold import __version__

PACKAGES = ("torch", "megatron-core", "ray", "transformers", "safetensors")


def versions() -> dict[str, str]:
    """Return the versions of Fivefold, Python and the main libraries by name, without importing the libraries."""
    found = {"fivefold": __version__, "python": platform.python_version()}
    return found | {name: installed for name in PACKAGES if (installed := _version(name))}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
