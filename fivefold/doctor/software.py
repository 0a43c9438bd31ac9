"""Python and packages: the installed versions, and the ones that contradict each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from fivefold.doctor.finding import NOTHING_TO_DO, Finding, pip_install
from fivefold.doctor.packages import Needs, Packages
from fivefold.layout.backends import BACKENDS, Backend

SHOWN = ("torch", "megatron-core", "ray", "transformers")
"""Packages with separate lines. The others share one line, except the ones with a problem."""

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Libraries that are compiled against one build of torch. transformers imports them if they are installed."""


@dataclass(frozen=True)
class OptionalPackage:
    """A package that Fivefold can use and does not need."""

    title: str
    names: tuple[str, ...]
    """Distributions that provide it."""
    absent: str
    """Advice for a user who does not have it."""
    present: str
    """Advice for a user who has it."""
    releases_for_torch: Mapping[str, str] = field(default_factory=dict)
    """Which releases were built for which torch: a pip requirement by torch's major.minor version."""

    @classmethod
    def of_server(cls, backend: Backend) -> OptionalPackage:
        """Describe the package of an inference server."""
        return cls(
            backend.title,
            backend.distributions,
            absent=f"only for rollout.backend={backend.name}:..., in its own environment if necessary "
            "(docs/rollout.md); the built-in engine needs nothing",
            present=f"rollout.backend={backend.name}:... uses it",
            releases_for_torch=backend.releases_for_torch,
        )


OPTIONAL = (
    *(OptionalPackage.of_server(backend) for backend in BACKENDS.values() if backend.is_server),
    OptionalPackage(
        "TransformerEngine",
        ("transformer-engine",),
        "not needed: fused kernels are built in",
        "not needed: fused kernels are built in",
    ),
    OptionalPackage(
        "fla-core",
        ("fla-core",),
        "only for gated delta nets (Qwen3-Next, Qwen3.5) on GPUs, which it makes faster: pip install 'fivefold[delta]'",
        "gated delta nets on GPUs use it, if the first lines of a run say so",
    ),
)


def check_software(packages: Packages, needs: Needs, python: str, torch_cuda: str | None) -> list[Finding]:
    """Check installed versions against the requirements of Fivefold and of the packages themselves.

    Args:
        packages: what is installed.
        needs: what Fivefold asks for.
        python: version of the interpreter.
        torch_cuda: CUDA version that torch was built with; None: torch is a CPU build, or is not installed.
    """
    findings = [_python(python, needs)]
    needed = {requirement: _needed(requirement, packages) for requirement in needs.packages}
    findings += [finding for requirement, finding in needed.items() if requirement.name in SHOWN]
    others = [finding for requirement, finding in needed.items() if requirement.name not in SHOWN]
    findings += [finding for finding in others if finding.status != "ok"]
    n_fine = sum(finding.status == "ok" for finding in others)
    findings.append(Finding("other packages", "ok", f"{n_fine} more, all within range", NOTHING_TO_DO))
    findings += [_optional(package, packages, torch_cuda) for package in OPTIONAL]
    return findings + _companions(packages)


def _python(version: str, needs: Needs) -> Finding:
    if needs.python.contains(version):
        return Finding("Python", "ok", version, NOTHING_TO_DO)
    return Finding(
        "Python", "problem", f"{version}; needs {needs.python}", f"install Fivefold with Python {needs.python}"
    )


def _needed(requirement: Requirement, packages: Packages) -> Finding:
    name = canonicalize_name(requirement.name)
    version = packages.versions.get(name)
    if version is None:
        return Finding(name, "problem", "not installed", pip_install(requirement))
    if not packages.satisfies(requirement):
        return Finding(name, "problem", f"{version}; needs {requirement.specifier}", pip_install(requirement))
    if unmet := packages.unmet(name):
        return Finding(name, "problem", f"{version}, but {_clash(unmet, packages)}", pip_install(requirement, *unmet))
    limits = sorted(map(str, requirement.specifier), reverse=True)  # the lower limit first
    found = f"{version} ({', '.join(limits)})" if limits else version
    return Finding(name, "ok", found, NOTHING_TO_DO)


def _optional(package: OptionalPackage, packages: Packages, torch_cuda: str | None) -> Finding:
    name = next((name for name in package.names if name in packages.versions), None)
    if name is None:
        return Finding(package.title, "ok", "not installed", package.absent)
    version = packages.versions[name]
    if unmet := packages.unmet(name):
        fix = (
            _fitting(package, name, packages)
            or f"install what it asks for in a separate environment, or uninstall {name}"
        )
        return Finding(package.title, "warning", f"{version}, but {_clash(unmet, packages)}", fix)
    if package.title == "TransformerEngine" and (clash := _other_cuda(packages, torch_cuda)):
        return Finding(package.title, "warning", f"{version}, {clash}", f"pip uninstall {name}: it is not needed")
    return Finding(package.title, "ok", version, package.present)


def _fitting(package: OptionalPackage, name: str, packages: Packages) -> str | None:
    """Return the command that installs the release of `name` for the installed torch; None if it is not known."""
    torch = packages.versions.get("torch")
    if torch is None:
        return None
    parsed = Version(torch)
    release = package.releases_for_torch.get(f"{parsed.major}.{parsed.minor}")
    if release is None or Requirement(release).name != name:
        return None
    return pip_install(release)


def _clash(unmet: tuple[Requirement, ...], packages: Packages) -> str:
    """Return a text such as `wants torch==2.11.0 (2.13.0 is here)`."""
    wants = []
    for requirement in unmet:
        version = packages.versions.get(canonicalize_name(requirement.name))
        state = "missing" if version is None else f"{version} is here"
        wants.append(f"{requirement.name}{requirement.specifier} ({state})")
    return "wants " + ", ".join(wants)


def _other_cuda(packages: Packages, torch_cuda: str | None) -> str | None:
    """Say for which CUDA TransformerEngine was built, if it is not torch's; each major version has its package."""
    majors = [name.removeprefix("transformer-engine-cu") for name in packages.versions]
    majors = [major for major in majors if major.isdecimal()]
    here = None if torch_cuda is None else torch_cuda.split(".")[0]
    if not majors or here in majors:
        return None
    torch = "a CPU build" if torch_cuda is None else f"built for CUDA {torch_cuda}"
    return f"built for CUDA {' and '.join(majors)}, but torch is {torch}"


def _companions(packages: Packages) -> list[Finding]:
    """Find the companions that were compiled against another build of torch: importing transformers fails on them."""
    torch = packages.versions.get("torch")
    if torch is None:
        return []
    findings = []
    for name in COMPANIONS:
        version = packages.versions.get(name)
        if version is None:
            continue
        fix = f"pip uninstall {name}: Fivefold does not need it, and transformers fails on it"
        if unmet := packages.unmet(name):
            findings.append(Finding(name, "problem", f"{version}, but {_clash(unmet, packages)}", fix))
        elif (Version(torch).local == "cpu") != (Version(version).local == "cpu"):
            findings.append(Finding(name, "problem", f"{version} is of another build than torch {torch}", fix))
    return findings
