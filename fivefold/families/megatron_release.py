"""The releases of Megatron-Core that Fivefold runs on, and what differs in their configuration.

What differs in their modules is in `fivefold/mcore/releases.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True)
class MegatronRelease:
    """A minor release of Megatron-Core."""

    name: str
    """Major and minor version."""
    weighs_z_loss: bool
    """Whether it multiplies the router's z-loss by the number of ranks that share a micro-batch, after it has divided
    it by this number."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Its own names of fields that recipes call otherwise."""

    @property
    def fields_file(self) -> Path:
        """The file with the fields of its configuration classes."""
        return Path(__file__).parent / "megatron_fields" / f"{self.name}.json"


RELEASES = {
    release.name: release
    for release in (
        MegatronRelease("0.16", weighs_z_loss=False),
        MegatronRelease("0.19", weighs_z_loss=True, renamed={"moe_deepep_num_sms": "moe_flex_dispatcher_num_sms"}),
    )
}
"""The supported releases by name. Their versions are in pyproject.toml."""


@cache
def installed_release() -> MegatronRelease:
    """Return the release that is installed here.

    Raises:
        ValueError: Fivefold does not run on it.
    """
    return release_of(version("megatron-core"))


def release_of(version: str) -> MegatronRelease:
    """Return the release that a version of Megatron-Core belongs to.

    Raises:
        ValueError: Fivefold does not run on it.
    """
    name = ".".join(version.split(".")[:2])
    if name not in RELEASES:
        raise ValueError(
            f"megatron-core {version} is installed, and Fivefold runs on {' and '.join(RELEASES)}: run "
            "pip install megatron-core==0.16.1"
        )
    return RELEASES[name]
