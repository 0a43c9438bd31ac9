"""Installed versions against the requirements of Fivefold and of the packages themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from fivefold.doctor.finding import Finding, worst
from fivefold.doctor.packages import Needs, Packages, applicable
from fivefold.doctor.software import check_software

NEEDS = Needs(SpecifierSet(">=3.11,<3.13"), (Requirement("torch>=2.11,<2.14"), Requirement("psutil>=6")))
GOOD = {"torch": "2.13.0", "psutil": "7.0"}


def check(
    versions: Mapping[str, str],
    asks: Mapping[str, Sequence[str]] | None = None,
    *,
    python: str = "3.12.1",
    cuda: str | None = None,
) -> dict[str, Finding]:
    requirements = {name: applicable((asks or {}).get(name, ())) for name in versions}
    findings = check_software(Packages(versions, requirements), NEEDS, python, cuda)
    return {finding.name: finding for finding in findings}


def test_versions_within_the_requirements_are_ok() -> None:
    assert worst(check(GOOD).values()) == "ok"


@pytest.mark.parametrize(
    ("versions", "name", "found"),
    [
        ({"psutil": "7.0"}, "torch", "not installed"),
        ({**GOOD, "torch": "2.10.1"}, "torch", "2.10.1"),
        ({**GOOD, "torch": "2.14.0+cu130"}, "torch", "2.14.0"),
        ({**GOOD, "psutil": "5.9"}, "psutil", "5.9"),
    ],
)
def test_a_missing_or_wrong_version_is_a_problem_and_the_fix_is_a_command(
    versions: dict[str, str], name: str, found: str
) -> None:
    finding = check(versions)[name]
    assert finding.status == "problem"
    assert found in finding.found
    assert finding.advice.startswith(f"pip install '{name}")


@pytest.mark.parametrize("python", ["3.10.9", "3.13.0"])
def test_an_unsupported_python_is_a_problem(python: str) -> None:
    assert check(GOOD, python=python)["Python"].status == "problem"


def test_a_local_build_counts_as_its_version() -> None:
    assert check({**GOOD, "torch": "2.13.0+cpu"})["torch"].status == "ok"


def test_two_packages_that_contradict_each_other_are_a_problem() -> None:
    finding = check(GOOD, {"torch": ["psutil<7", "nvidia-nccl-cu13==2.29; platform_machine == 'none'"]})["torch"]
    assert finding.status == "problem"
    assert "psutil<7 (7.0 is here)" in finding.found
    assert "'psutil<7'" in finding.advice


def test_vllm_of_another_torch_names_the_one_that_fits() -> None:
    finding = check({**GOOD, "vllm": "0.25.1"}, {"vllm": ["torch==2.11.0"]})["vLLM"]
    assert finding.status == "warning"
    assert finding.advice == "pip install 'vllm>=0.27,<0.33'"
    assert check({**GOOD, "vllm": "0.30.0"}, {"vllm": ["torch==2.13.0"]})["vLLM"].status == "ok"


def test_transformer_engine_for_another_cuda_is_a_warning() -> None:
    versions = {**GOOD, "transformer-engine": "2.11", "transformer-engine-cu12": "2.11"}
    assert check(versions, cuda="13.0")["TransformerEngine"].status == "warning"
    assert check(versions, cuda="12.8")["TransformerEngine"].status == "ok"


def test_a_companion_of_another_build_breaks_transformers() -> None:
    on_cpu = {**GOOD, "torch": "2.13.0+cpu"}
    assert check({**on_cpu, "torchvision": "0.28.0"})["torchvision"].status == "problem"
    assert "torchvision" not in check({**on_cpu, "torchvision": "0.28.0+cpu"})


def test_the_declared_requirements_are_read() -> None:
    needs, packages = Needs.declared(), Packages.installed()
    assert {"torch", "megatron-core", "ray"} <= {requirement.name for requirement in needs.packages}
    assert "pytest" not in {requirement.name for requirement in needs.packages}, "an extra is not needed"
    assert packages.satisfies(Requirement("pytest"))
