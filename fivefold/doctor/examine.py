"""The whole examination, topic by topic, shown as it goes."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import replace

from fivefold.doctor.finding import Finding, worst
from fivefold.doctor.gpus import check_gpus, check_kernels, has_compiler, has_headers, look_at_gpus, unreachable_pairs
from fivefold.doctor.machine import check_machine
from fivefold.doctor.network import check_network
from fivefold.doctor.packages import Needs, Packages
from fivefold.doctor.report import as_json as report_as_json
from fivefold.doctor.report import make_console, print_summary, print_topic
from fivefold.doctor.self_test import SKIPPED, run_self_test
from fivefold.doctor.software import check_software
from fivefold.doctor.torch_build import check_torch, look_at_torch


def doctor(*, self_test: bool, as_json: bool) -> bool:
    """Says what this machine has and what follows, on standard output.

    Args:
        self_test: also train for a step in two processes.
        as_json: one JSON object in place of the text.

    Returns:
        Whether nothing is a problem.
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
    """Title and findings of each topic, as soon as they are known."""
    torch, gpus = look_at_torch(), look_at_gpus()
    yield "Software", check_software(Packages.installed(), Needs.declared(), platform.python_version(), torch.cuda)
    gpus = replace(gpus, unreachable=unreachable_pairs(torch.n_devices))
    devices = check_gpus(gpus) + check_torch(torch, gpus.listed, os.environ.get("CUDA_VISIBLE_DEVICES"))
    yield "Devices", devices + check_kernels(torch.n_devices, compiler=has_compiler(), headers=has_headers())
    yield "Machine", check_machine(torch.n_devices)
    yield "Network", check_network()
    if self_test:
        yield "Self-test", [SKIPPED if torch.error is not None else run_self_test(torch.n_devices)]
