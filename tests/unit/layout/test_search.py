"""The search: only possible layouts, ranked by time, with reasons; where nothing fits, advice that holds."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fivefold.layout.allocation import parse_backend
from fivefold.layout.blueprint import HEADROOM
from fivefold.layout.check import check_layout
from fivefold.layout.gpus import GPUS, find_gpu
from fivefold.layout.memory import training_memory
from fivefold.layout.plan_shape import find_shape
from fivefold.layout.search import Cluster, layouts, reasons, search
from fivefold.layout.timing import step_time
from fivefold.layout.workload import Workload

WORK = Workload(4096, 256, 8192)


@pytest.mark.parametrize(("name", "n_gpus"), [("Qwen3-8B", 8), ("Qwen3-30B-A3B", 16), ("Llama-3.1-70B", 24)])
def test_every_layout_is_one_that_the_model_can_take(name: str, n_gpus: int) -> None:
    shape = find_shape(name)
    found = list(layouts(shape, Cluster(find_gpu("h100"), n_gpus, 8), WORK))
    assert found
    assert len(set(found)) == len(found)
    for layout in found:
        check_layout(layout, shape)
        assert layout.world_size == n_gpus
        assert 8 % layout.tp == 0


def test_the_seeds_layouts_are_among_them() -> None:
    shape = find_shape("Qwen3-30B-A3B")
    sixteen = set(layouts(shape, Cluster(find_gpu("h100"), 16, 8), WORK))
    assert parse_backend("megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)") in sixteen
    assert parse_backend("megatron:d1t2p4") in set(
        layouts(find_shape("Qwen3-8B"), Cluster(find_gpu("h100"), 8, 8), WORK)
    )


def test_the_best_is_the_fastest_that_fits() -> None:
    shape, cluster = find_shape("Qwen3-8B"), Cluster(find_gpu("h100"), 8, 8)
    found = search(shape, cluster, WORK, limit=3)
    assert len(found.best) == 3
    seconds = [candidate.time.total for candidate in found.best]
    assert seconds == sorted(seconds)
    room = cluster.gpu.memory * (1 - HEADROOM)
    fastest = min(
        step_time(layout, shape, WORK.recomputing(mode), cluster.gpu, 8).total
        for layout in layouts(shape, cluster, WORK)
        for mode in ("none", "selective", "full")
        if max(stage.total for stage in training_memory(layout, shape, WORK.recomputing(mode))) <= room
    )
    assert seconds[0] == pytest.approx(fastest)
    assert all(parse_backend(candidate.text) == candidate.layout for candidate in found.best)
    assert "to spare" in reasons(found.best[0], found.best[0])[0]
    assert any(reason.startswith("loses") for reason in reasons(found.best[2], found.best[0]))


def test_advice_holds_where_nothing_fits() -> None:
    shape, cluster = find_shape("Llama-3.1-70B"), Cluster(find_gpu("h100"), 8, 8)
    found = search(shape, cluster, WORK)
    assert (found.best, found.n_fitting) == ((), 0)
    advice = "\n".join(found.advice)
    assert "the nearest is" in advice
    [more] = map(int, re.findall(r"fits on (\d+) GPUs", advice))
    assert search(shape, replace(cluster, n_gpus=more), WORK.recomputing("full")).best
    [listed] = re.findall(r"GPUs on which it fits: (.*)", advice)
    names = listed.split(", ")
    for gpu in GPUS.values():
        assert bool(search(shape, replace(cluster, gpu=gpu), WORK).best) == (gpu.name in names)


def test_shorter_micro_batches_are_advised_where_they_help() -> None:
    shape, cluster = find_shape("Qwen3-8B"), Cluster(find_gpu("h100"), 2, 2)
    advice = "\n".join(search(shape, cluster, Workload(4096, 64, 131072)).advice)
    assert "GPUs of this kind" in advice


def test_models_that_are_not_trained_are_searched_over_uneven_stages() -> None:
    cluster = Cluster(find_gpu("h200"), 256, 8)
    degrees = {layout.pp for layout in layouts(find_shape("DeepSeek-V3"), cluster, WORK)}
    assert {1, 2, 4, 8, 16, 32} <= degrees
