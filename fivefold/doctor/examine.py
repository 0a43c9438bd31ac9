"""The whole examination, topic by topic. Each topic is printed as soon as it is known."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import replace

from fivefold.doctor.finding import Finding, worst
from fivefold.doctor.gpus import (
    check_gpus,
    check_kernels,
    has_compiler,
    has_headers,
    look_at_gpus,
    unreachable_pairs,
    visible,
)
from fivefold.doctor.machine import check_machine
from fivefold.doctor.network import check_network
from fivefold.doctor.packages import Needs, Packages
from fivefold.doctor.report import as_json as report_as_json
from fivefold.doctor.report import make_console, print_summary, print_topic
from fivefold.doctor.self_test import SKIPPED, run_self_test
from fivefold.doctor.software import check_software
from fivefold.doctor.torch_build import check_torch, look_at_torch


def doctor(*, self_test: bool, as_json: bool) -> bool:
    """Print what this machine has and what follows from it.

    Args:
        self_test: whether to train for a step in two processes, too.
        as_json: whether to print one JSON object instead of the text.

    Returns:
        True unless a finding is a problem.
    """
    console = make_console(quiet=as_json)
    topics: dict[str, list[Finding]] = {}
    with console.status("examining this machine"):
        for title, findings in examine(self_test=self_test):
            topics[title] = findings
            print_topic(console, title, findings)
    print_summary(console, topics)
    if as_json:
        json.dump(report_as_json(topics), sys.stdout, indent=2)
        sys.stdout.write("\n")
    return worst(finding for findings in topics.values() for finding in findings) != "problem"


def examine(*, self_test: bool) -> Iterator[tuple[str, list[Finding]]]:
    """Yield the title and the findings of each topic."""
    torch, gpus = look_at_torch(), visible(look_at_gpus(), os.environ)
    yield "Software", check_software(Packages.installed(), Needs.declared(), platform.python_version(), torch.cuda)
    gpus = replace(gpus, unreachable=unreachable_pairs(torch.n_devices))
    devices = check_gpus(gpus) + check_torch(torch, gpus.listed, os.environ.get("CUDA_VISIBLE_DEVICES"))
    yield "Devices", devices + check_kernels(torch.n_devices, compiler=has_compiler(), headers=has_headers())
    yield "Machine", check_machine(torch.n_devices)
    yield "Network", check_network()
    if self_test:
        yield "Self-test", [SKIPPED if torch.error is not None else run_self_test(torch.n_devices)]
