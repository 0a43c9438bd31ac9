"""Routes from vLLM's second model runner: when Fivefold's worker records them, and what it sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fivefold.rollout.engines import DIALECTS
from fivefold.rollout.servers.command import check_command, server_command
from tests.unit.rollout.conftest import spec_of
from tests.unit.rollout.inside_engine import CONFIG, RANK, TOP_K, MoERunner, open_inside


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules inside vLLM, as attributes of one."""
    yield from open_inside(monkeypatch)


@pytest.mark.parametrize(("n_experts", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_routers_write_into_their_layers_of_the_buffer(inside: Any, n_experts: int, dtype: torch.dtype) -> None:
    layers = [MoERunner(1, n_experts), MoERunner(3, n_experts)]
    rows = inside.fivefold_capture.watch_routers(layers, 5, torch.device("cpu"))
    assert (rows.shape, rows.dtype) == ((5, 4, TOP_K), dtype)
    chosen = {1: torch.tensor([[n_experts - 1, 0], [3, 4]], dtype=torch.int32), 3: torch.tensor([[5, 6], [7, 2]])}
    for layer in layers:
        layer.router.capture(chosen[layer.layer_id])
    assert {layer: rows[:2, layer].tolist() for layer in chosen} == {k: v.tolist() for k, v in chosen.items()}
    assert not rows[2:].any()
    assert not rows[:, [0, 2]].any()


@pytest.mark.parametrize(
    ("layers", "says"),
    [([], "no layers of experts"), ([MoERunner(0), MoERunner(2, is_monolithic=True)], r"layers\.2\.experts with a")],
)
def test_models_whose_routers_do_not_tell_are_refused(inside: Any, layers: list[Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        inside.fivefold_capture.watch_routers(layers, 5, torch.device("cpu"))


def test_a_worker_sends_copies_of_the_rows_of_a_step(inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made before vLLM's own copies, for which its output waits, and the next step changes nothing of them."""
    log: list[str] = []
    layer = MoERunner(0)
    runner: Any = SimpleNamespace(
        get_model=lambda: torch.nn.ModuleList([layer]), max_num_tokens=6, device=torch.device("cpu"), log=log,
        execute_model_state=None, main_stream="main",
        block_tables=SimpleNamespace(slot_mappings=torch.arange(12).view(2, 6)),
        output_copy_stream=SimpleNamespace(wait_stream=lambda stream: log.append(f"waits for {stream}")),
    )  # fmt: skip

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        log.append("on the other stream")
        yield

    monkeypatch.setattr(torch.cuda, "stream", stream)
    worker = inside.fivefold_capture.Worker()
    worker.model_runner = runner
    worker.initialize_from_config(CONFIG)
    assert worker.initialized
    assert worker.sample_tokens("none").get_output().routed_experts is None, "there was no step"
    runner.execute_model_state = SimpleNamespace(input_batch=SimpleNamespace(num_tokens=3))
    chosen = torch.tensor([[1, 2], [3, 4], [5, 6], [0, 0]])
    layer.router.capture(chosen)
    log.clear()
    output = worker.sample_tokens("grammar")
    assert log == ["waits for main", "on the other stream", "vLLM copies"]
    layer.router.capture(chosen + 1)
    runner.block_tables.slot_mappings += 1
    done = output.get_output()
    assert done.grammar == "grammar"
    rows, slots = done.routed_experts
    assert rows[:, 0].tolist() == chosen[:3].tolist()
    assert slots.tolist() == [6, 7, 8]
    monkeypatch.setattr(RANK, "rank_in_group", 1)
    assert worker.sample_tokens(None).get_output().routed_experts is None


def python_with(folder: Path, release: str) -> str:
    program = folder / f"python-{release or 'none'}"
    program.write_text(f"#!/bin/sh\necho '{release}'\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("release", "devices", "chosen", "sees", "captures", "runner"),
    [
        ("0.25.1", "0", None, False, True, "1"),
        ("0.27.0+cu130", "0", "1", False, True, "1"),
        ("0.28.0", "0", None, False, False, None),
        ("0.32.0", "0", None, False, False, None),
        ("0.25.1", "0", "0", False, False, "0"),
        ("0.25.1", "", None, False, False, None),
        ("0.25.1", "0", None, True, False, None),
    ],
)
def test_fivefold_records_routes_where_vllm_does_it_in_its_first_model_runner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, devices: str, chosen: str | None, sees: bool,
    captures: bool, runner: str | None,
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if chosen is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", chosen)
    plain = spec_of("vllm", Path("/models/a"), python=python_with(tmp_path, release))
    spec = replace(plain, returns_routes=True, sees=sees)
    words = server_command(DIALECTS["vllm"], spec, 81)
    assert ("--enable-return-routed-experts" in words) == (not captures)
    assert ([*words, ""][words.index("--worker-cls") + 1] if "--worker-cls" in words else None) == (
        "fivefold_capture.Worker" if captures else None
    )
    assert DIALECTS["vllm"].environment(spec).get("VLLM_USE_V2_MODEL_RUNNER") == runner
    without = server_command(DIALECTS["vllm"], plain, 81)
    assert not {"--worker-cls", "--enable-return-routed-experts"} & set(without)
    if captures:
        with pytest.raises(ValueError, match="server_args has --worker-cls, which follows from other keys"):
            check_command(DIALECTS["vllm"], replace(spec, arguments=("--worker-cls=a.B",)))


def test_a_server_that_does_not_tell_its_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    python = python_with(tmp_path, "")
    with pytest.raises(ValueError, match="python-none does not tell its release of vLLM"):
        server_command(DIALECTS["vllm"], spec_of("vllm", Path("/models/a"), python=python, returns_routes=True), 81)
