"""What is installed and what Fivefold asks for, read from the packages' own metadata; nothing is imported for it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distributions, metadata
from pathlib import Path
from typing import Self

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).parents[2] / "pyproject.toml"


@dataclass(frozen=True)
class Packages:
    """Installed distributions, by canonical name (`megatron-core`)."""

    versions: Mapping[str, str]
    requirements: Mapping[str, tuple[Requirement, ...]]
    """What each asks for on this Python and platform, without its extras."""

    @classmethod
    def installed(cls) -> Self:
        """Those of this interpreter."""
        versions: dict[str, str] = {}
        requirements: dict[str, tuple[Requirement, ...]] = {}
        for distribution in distributions():
            name = canonicalize_name(distribution.name)
            if name not in versions:  # the first on sys.path is the one that is imported
                versions[name] = distribution.version
                requirements[name] = applicable(distribution.requires or ())
        return cls(versions, requirements)

    def satisfies(self, requirement: Requirement) -> bool:
        """Whether it is installed in a version that the requirement allows."""
        version = self.versions.get(canonicalize_name(requirement.name))
        return version is not None and requirement.specifier.contains(version, prereleases=True)

    def unmet(self, name: str) -> tuple[Requirement, ...]:
        """What the installed package `name` asks for and does not get."""
        return tuple(requirement for requirement in self.requirements[name] if not self.satisfies(requirement))


@dataclass(frozen=True)
class Needs:
    """What Fivefold declares in its pyproject.toml."""

    python: SpecifierSet
    packages: tuple[Requirement, ...]

    @classmethod
    def declared(cls) -> Self:
        """From the metadata of the installed package, or from pyproject.toml in a checkout that is not installed."""
        try:
            declared = metadata("fivefold")
        except PackageNotFoundError:
            project = tomllib.loads(CHECKOUT.read_text(encoding="utf-8"))["project"]
            return cls(SpecifierSet(project["requires-python"]), applicable(project["dependencies"]))
        return cls(SpecifierSet(declared["Requires-Python"]), applicable(declared.get_all("Requires-Dist", [])))


def applicable(lines: Iterable[str]) -> tuple[Requirement, ...]:
    """The requirements that hold here: markers are evaluated, and no extra is asked for."""
    requirements = (Requirement(line) for line in lines)
    return tuple(each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""}))
