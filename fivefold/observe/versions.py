"""The versions that a run's numbers were made with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from fivefold import __version__

PACKAGES = ("torch", "megatron-core", "ray", "transformers", "safetensors")


def versions() -> dict[str, str]:
    """Version of Fivefold, Python and the libraries under it, by name; nothing is imported for it."""
    found = {"fivefold": __version__, "python": platform.python_version()}
    return found | {name: installed for name in PACKAGES if (installed := _version(name))}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
