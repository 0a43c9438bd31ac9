"""GPUs, their links, torch's build and Triton: what is read from the tools, and what is judged from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.doctor.finding import Finding
from fivefold.doctor.gpus import Gpu, Gpus, check_gpus, check_kernels, parse_gpus, parse_links, visible
from fivefold.doctor.torch_build import TorchBuild, check_torch

H100 = Gpu("NVIDIA H100", 80 * 2**30, 0, (9, 0), "580.65")
OLD = replace(H100, name="NVIDIA GT 1030", capability=(6, 1))
BUILD = TorchBuild(cuda="13.0", n_devices=2, architectures=("sm_80", "sm_90", "compute_120"), nccl="2.28", gloo=True)
TOPOLOGY = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tSYS\tPIX\t0-31\t0
GPU1\tNV18\t X \tSYS\tSYS\tSYS\t0-31\t0
GPU2\tSYS\tSYS\t X \tNV18\tSYS\t32-63\t1
GPU3\tSYS\tSYS\tNV18\t X \tSYS\t32-63\t1
NIC0\tPIX\tSYS\tSYS\tSYS\t X

Legend:
  X    = Self
"""
LINKS = {(i, j): "NV18" if (i, j) in ((0, 1), (2, 3)) else "SYS" for i in range(4) for j in range(i + 1, 4)}


def links_of(gpus: Gpus) -> Finding:
    return next(finding for finding in check_gpus(gpus) if finding.name == "GPU links")


def test_gpus_are_read_from_nvidia_smi() -> None:
    text = "NVIDIA H100 80GB HBM3, 81559, 4, 9.0, 580.65.06\nNVIDIA A100, 40960, 39000, 8.0, 580.65.06\n"
    first, second = parse_gpus(text)
    assert first == Gpu("NVIDIA H100 80GB HBM3", 81559 * 2**20, 4 * 2**20, (9, 0), "580.65.06", 0)
    assert second.number == 1
    statuses = {finding.name: finding.status for finding in check_gpus(Gpus((first, second)))}
    assert statuses == {"GPUs": "warning", "GPU memory": "warning", "GPU links": "ok"}
    with pytest.raises(ValueError, match="it says 'No devices were found' in place of the values name,memory"):
        parse_gpus("No devices were found")


@pytest.mark.parametrize("cells", ["[N/A], [N/A]", "81559, [Insufficient Permissions]"])
def test_a_gpu_whose_memory_nvidia_smi_does_not_tell_is_no_problem(cells: str) -> None:
    gpus = parse_gpus(f"NVIDIA GB10, {cells}, 12.1, 580.65.06\n")
    assert gpus[0].used is None
    assert {finding.name: finding.status for finding in check_gpus(Gpus(gpus))} == {"GPUs": "ok", "GPU memory": "ok"}


def test_links_are_read_and_the_linked_pairs_are_named() -> None:
    links = parse_links(TOPOLOGY, 4)
    assert links[0, 1] == links[2, 3] == "NV18"
    assert {links[pair] for pair in [(0, 2), (0, 3), (1, 2), (1, 3)]} == {"SYS"}
    finding = links_of(Gpus((H100,) * 4, links))
    assert finding.status == "warning"
    assert "0-1, 2-3" in finding.found
    with pytest.raises(ValueError, match="no matrix of 8"):
        parse_links(TOPOLOGY, 8)


def test_nvlink_is_ok_and_slower_links_are_a_warning() -> None:
    two = (H100, H100)
    assert links_of(Gpus(two, {(0, 1): "NV18"})).status == "ok"
    assert links_of(Gpus(two, {(0, 1): "PHB"})).status == "warning"
    assert "0-1" in links_of(Gpus(two, {(0, 1): "PHB"}, unreachable=((0, 1),))).found


def test_gpus_that_are_hidden_are_not_judged() -> None:
    busy = replace(H100, used=70 * 2**30)
    all_of_them = Gpus(tuple(replace(gpu, number=i) for i, gpu in enumerate((busy, H100, busy, H100))), LINKS)
    assert "on GPU 0, 2" in check_gpus(all_of_them)[1].found
    shown = visible(all_of_them, {"CUDA_VISIBLE_DEVICES": "3, 1"})
    assert [gpu.number for gpu in shown.listed] == [3, 1]
    assert shown.links == {(0, 1): "SYS"}
    assert check_gpus(shown)[1].status == "ok"
    assert "on GPU 2" in check_gpus(visible(all_of_them, {"CUDA_VISIBLE_DEVICES": "2,3"}))[1].found
    for other in ({}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "GPU-8a"}, {"CUDA_VISIBLE_DEVICES": "4"}):
        assert visible(all_of_them, other) == all_of_them
    # CUDA counts the faster one first.
    mixed, first = Gpus((OLD, H100), {(0, 1): "PHB"}), {"CUDA_VISIBLE_DEVICES": "1"}
    assert visible(mixed, first) == mixed
    assert visible(mixed, {**first, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).listed == (H100,)


def test_a_driver_that_does_not_answer_is_a_problem() -> None:
    assert check_gpus(Gpus(error="couldn't communicate with the driver"))[0].status == "problem"


@pytest.mark.parametrize(
    ("build", "gpus", "visible", "status"),
    [
        (BUILD, (H100, H100), None, "ok"),
        (TorchBuild(gloo=True), (), None, "ok"),
        (TorchBuild(gloo=True), (H100,), None, "problem"),
        (TorchBuild(cuda="13.0", gloo=True), (), None, "ok"),
        (TorchBuild(cuda="13.0", gloo=True), (H100,), None, "problem"),
        (TorchBuild(cuda="13.0", gloo=True), (H100,), "", "warning"),
        (BUILD, (Gpu("V100", 1, 0, (7, 0), "580"),), None, "problem"),
        (BUILD, (Gpu("A10", 1, 0, (8, 6), "580"),), None, "ok"),
        (BUILD, (Gpu("newer", 1, 0, (12, 1), "580"),), None, "ok"),
        (BUILD, (Gpu("between", 1, 0, (10, 0), "580"),), None, "problem"),
        (
            TorchBuild(cuda="12.6", n_devices=1, architectures=("sm_75",), gloo=True),
            (Gpu("T4", 1, 0, (7, 5), "580"),),
            None,
            "warning",
        ),
    ],
)
def test_torch_must_have_been_built_for_the_gpus(
    build: TorchBuild, gpus: tuple[Gpu, ...], visible: str | None, status: str
) -> None:
    cuda = next(finding for finding in check_torch(build, gpus, visible) if finding.name == "CUDA")
    assert cuda.status == status
    assert cuda.advice


def test_a_torch_that_cannot_be_imported_is_a_problem() -> None:
    (finding,) = check_torch(TorchBuild(error="OSError: libcudart.so.13"), (H100,), None)
    assert finding.status == "problem"
    assert "libcudart" in finding.found


def test_triton_needs_a_compiler_and_headers_on_gpus_only() -> None:
    assert check_kernels(0, compiler=False, headers=False) == []
    assert [
        check_kernels(1, compiler=a, headers=b)[0].status for a, b in [(True, True), (False, True), (True, False)]
    ] == [
        "ok",
        "problem",
        "problem",
    ]
