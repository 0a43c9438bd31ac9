"""What is installed and what Fivefold asks for, read from the metadata of packages without importing them."""

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
    """Installed version of each."""
    requirements: Mapping[str, tuple[Requirement, ...]]
    """Requirements of each on this Python and platform, without its extras."""

    @classmethod
    def installed(cls) -> Self:
        """Return the distributions that this interpreter finds."""
        versions: dict[str, str] = {}
        requirements: dict[str, tuple[Requirement, ...]] = {}
        for distribution in distributions():
            name = canonicalize_name(distribution.name)
            if name not in versions:  # the first on sys.path is the one that is imported
                versions[name] = distribution.version
                requirements[name] = applicable(distribution.requires or ())
        return cls(versions, requirements)

    def satisfies(self, requirement: Requirement) -> bool:
        """Say whether the required package is installed in a version that the requirement allows."""
        version = self.versions.get(canonicalize_name(requirement.name))
        return version is not None and requirement.specifier.contains(version, prereleases=True)

    def unmet(self, name: str) -> tuple[Requirement, ...]:
        """Return the requirements of the installed package `name` that are not satisfied."""
        return tuple(requirement for requirement in self.requirements[name] if not self.satisfies(requirement))


@dataclass(frozen=True)
class Needs:
    """The requirements that Fivefold declares in its pyproject.toml."""

    python: SpecifierSet
    packages: tuple[Requirement, ...]

    @classmethod
    def declared(cls) -> Self:
        """Read the metadata of the installed package, or the pyproject.toml of a checkout that is not installed."""
        try:
            declared = metadata("fivefold")
        except PackageNotFoundError:
            project = tomllib.loads(CHECKOUT.read_text(encoding="utf-8"))["project"]
            return cls(SpecifierSet(project["requires-python"]), applicable(project["dependencies"]))
        return cls(SpecifierSet(declared["Requires-Python"]), applicable(declared.get_all("Requires-Dist", [])))


def applicable(lines: Iterable[str]) -> tuple[Requirement, ...]:
    """Return the requirements whose markers hold on this machine, without extras."""
    requirements = (Requirement(line) for line in lines)
    return tuple(each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""}))
