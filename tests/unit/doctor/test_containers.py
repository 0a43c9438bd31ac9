"""The files for containers and conda name what is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[3]


def test_the_docker_file_copies_what_the_package_needs() -> None:
    text = (ROOT / "docker/Dockerfile").read_text()
    instructions = re.findall(r"^([A-Z]+) ", text, flags=re.MULTILINE)
    assert instructions[0] == "FROM"
    assert set(instructions) <= {"FROM", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}
    sources = [name for line in re.findall(r"^COPY (.*)", text, flags=re.MULTILINE) for name in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"], "pyproject.toml", "fivefold"} <= set(sources)
    (python,) = re.findall(r"FROM python:([\d.]+)", text)
    assert python in ("3.11", "3.12")


def test_compose_builds_the_docker_file_with_gpus_and_shared_memory() -> None:
    service = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]["fivefold"]
    context = (ROOT / "docker" / service["build"]["context"]).resolve()
    assert context == ROOT
    assert (context / service["build"]["dockerfile"]).is_file()
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert service["shm_size"]


def test_the_conda_file_installs_the_package_with_pip() -> None:
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert "python=3.12" in dependencies
    assert {"pip": ["megatron-core==0.16.1", "--editable .[gguf,report]"]} in dependencies
