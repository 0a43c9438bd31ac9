"""Weights that reach a server from GPU to GPU, against a server that logs its requests. There is no GPU here."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fivefold.bridge.hf_writer import save_hf
from fivefold.cluster import failures
from fivefold.config.schema.rollout import GenerationConfig
from fivefold.rollout.contract import complete
from fivefold.rollout.engines import DIALECTS
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.servers import dialect as dialects
from fivefold.rollout.servers import life, sglang_dialect, updates, vllm_dialect
from fivefold.rollout.servers import weights as weights_of_servers
from fivefold.rollout.servers.client import HttpClient
from fivefold.rollout.servers.command import server_command
from fivefold.rollout.servers.engine import ServerEngine
from fivefold.rollout.servers.process import ServerDied
from fivefold.rollout.transformers_engine import TransformersEngine
from fivefold.weights import cuda_ipc
from fivefold.weights.adapter import AdapterMemory
from fivefold.weights.buckets import pack
from fivefold.weights.device_buckets import CHECKSUMS, BufferFiller, DeviceBucket, checksum
from fivefold.weights.folder import NodePlace
from fivefold.weights.nccl_link import Invitation
from fivefold.weights.stream import stacked
from fivefold.weights.table import TRANSPORTS
from fivefold.weights.transport import Route
from tests.rows import long
from tests.unit.rollout import fake_server
from tests.unit.rollout.conftest import spec_of
from tests.unit.rollout.fake_server import Log, write_python

Folder = Callable[..., Path]

OLD, NEW = {"backend": "vllm", "release": "0.25.1"}, {"backend": "vllm", "release": "0.32.0"}
SGLANG = {"backend": "sglang", "release": "0.25.1"}
ALL = pytest.mark.parametrize("kind", [OLD, NEW, SGLANG], ids=["vllm-0.25", "vllm-0.32", "sglang"])
ID = bytes(range(128))
INVITATION = Invitation("10.0.0.1", 4321, ID, 5, "weights_0")
HANDLE = ("class", (8,), (1,), 0, "storage", "uint8", 0, b"handle", 8, 0, False, b"counter", 0, b"event", True)
"""A handle of the form of `reduce_tensor`'s."""


def route(transport: str, *, with_checksum: bool = False) -> Route:
    return Route(TRANSPORTS[transport], "bfloat16", with_checksum)


@pytest.fixture
def start(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ServerEngine]]:
    """Start an engine over a server of a kind, which ends with the test; `variables` are the server's."""
    monkeypatch.setattr(sglang_dialect, "visible_uuids", lambda: ["uuid-1", "uuid-0"])
    engines = []

    def started(
        kind: dict[str, str], way: Route, max_restarts: int = 0, keeps_cache: bool = False, **variables: str
    ) -> ServerEngine:
        model = model_folder(kind.get("model", "qwen3_moe"))
        python = write_python(tmp_path, **{fake_server.RELEASE: kind["release"], **variables})
        changes: dict[str, Any] = {"max_restarts": max_restarts, "keeps_cache": keeps_cache}
        spec = spec_of(kind["backend"], model, python=python, route=way, **changes)
        save = partial(save_hf, config_source=spec.path, tokenizer_source=spec.tokenizer_path)
        engines.append(ServerEngine(DIALECTS[spec.backend], spec, NodePlace(spec.run, 0, 1), save))
        return engines[-1]

    yield started
    for engine in engines:
        engine.close()


@pytest.fixture
def weights(model_folder: Folder) -> dict[str, Tensor]:
    return load_file(model_folder("qwen3_moe") / "model.safetensors")


def buckets_of(weights: dict[str, Tensor], transport: str, *, with_checksum: bool = False) -> list[DeviceBucket]:
    """Return the weights in buckets of two devices."""
    filler = BufferFiller(stacked(weights.items()), dtype=torch.bfloat16, n_buffers=1, max_bytes=20_000)
    handles = {"uuid-0": HANDLE, "uuid-1": HANDLE} if transport == "ipc" else {}
    buckets = []
    while (filled := filler.fill()) is not None:
        tensors, _ = filled
        names, shapes = tuple(name for name, _ in tensors), tuple(tuple(tensor.shape) for _, tensor in tensors)
        total = checksum(tensors) if with_checksum else None
        buckets.append(DeviceBucket(names, shapes, "bfloat16", handles, total))
    return buckets


def generate(engine: ServerEngine) -> Sequence[int]:
    sampling = SamplingParams.from_config(GenerationConfig(max_new_tokens=4))
    [completion] = complete(engine, [GenerationRequest((5, 6), 7)], sampling)
    return completion.versions.tolist()


def bodies(folder: Path, path: str) -> list[Any]:
    return [row["body"] for row in Log(folder).rows("request") if row["path"] == path]


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
@ALL
def test_a_server_loads_buckets_and_answers_with_their_version(
    kind: dict[str, str],
    transport: str,
    start: Callable[..., ServerEngine],
    weights: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    engine = start(kind, route(transport))
    if transport == "nccl":
        engine.enter(INVITATION, 3)
    buckets = buckets_of(weights, transport)
    before = len(Log(tmp_path).posts())
    engine.load_buckets(iter(buckets), 4)
    assert set(generate(engine)) == {4}
    update = {"ipc": "/update_weights_from_tensor", "nccl": "/update_weights_from_distributed"}[transport]
    expected = {
        "vllm": [
            "/pause?mode=abort", "/start_weight_update", *["/update_weights"] * len(buckets), "/finish_weight_update",
            "/resume",
        ],
        "sglang": [*[update] * len(buckets), "/flush_cache", "/update_weight_version"],
    }  # fmt: skip
    assert Log(tmp_path).posts()[before:-1] == expected[kind["backend"]]


@pytest.mark.parametrize("kind", [OLD, NEW], ids=["0.25", "0.32"])
def test_vllm_is_told_of_handles_in_the_form_of_its_release(
    kind: dict[str, str], start: Callable[..., ServerEngine], weights: dict[str, Tensor], tmp_path: Path
) -> None:
    engine, is_old = start(kind, route("ipc")), kind is OLD
    assert bodies(tmp_path, "/init_weight_transfer_engine") == [{"init_info": {} if is_old else {"packed": True}}]
    assert len(Log(tmp_path).rows("fivefold_load_faster")) == is_old
    buckets = buckets_of(weights, "ipc")
    engine.load_buckets(iter(buckets), 4)
    for body, bucket in zip(bodies(tmp_path, "/update_weights"), buckets, strict=True):
        info = body["update_info"]
        handles = pickle.loads(base64.b64decode(info.pop("ipc_handles_pickled")))
        assert handles == {"uuid-0": HANDLE, "uuid-1": HANDLE}
        sizes = [weights[name].numel() * 2 for name in bucket.names]
        assert info == {
            "names": list(bucket.names),
            "dtype_names": ["bfloat16"] * len(bucket.names),
            "shapes": [list(weights[name].shape) for name in bucket.names],
            "tensor_sizes": sizes,
            **({"packed": True} if is_old else {}),
        }
    assert bodies(tmp_path, "/finish_weight_update") == [{} if is_old else {"weight_version": "4"}]
    [started] = Log(tmp_path).rows("start")
    assert started["environment"]["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"


@pytest.mark.parametrize("kind", [OLD, NEW], ids=["0.25", "0.32"])
def test_vllm_enters_a_group_and_gets_each_bucket_in_one_broadcast(
    kind: dict[str, str], start: Callable[..., ServerEngine], weights: dict[str, Tensor], tmp_path: Path
) -> None:
    engine = start(kind, route("nccl"))
    assert engine.meeting == ("vllm_store" if kind is OLD else "unique_id")
    engine.enter(INVITATION, 3)
    [body] = bodies(tmp_path, "/init_weight_transfer_engine")
    packing = {"packed": True, "packed_buffer_size_bytes": 2**62, "packed_num_buffers": 1}
    place = {"rank_offset": 3, "world_size": 5}
    if kind is OLD:
        assert body == {"init_info": {"master_address": "10.0.0.1", "master_port": 4321, **place}}
    else:
        assert body == {"init_info": {"nccl_unique_id_b64": base64.b64encode(ID).decode(), **place, **packing}}
    engine.load_buckets(iter(buckets_of(weights, "nccl")), 4)
    for sent in bodies(tmp_path, "/update_weights"):
        keys = {"names", "dtype_names", "shapes"} | (packing.keys() if kind is OLD else set())
        assert sent["update_info"].keys() == keys
    [started] = Log(tmp_path).rows("start")
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in started["environment"]


class FakeSGLang(pickle.Unpickler):
    """Reads what SGLang reads, with its class, and without opening CUDA memory."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "sglang.srt.weight_sync.tensor_bucket":
            assert name == "FlattenedTensorMetadata"
            return SimpleNamespace
        if name == "rebuild_cuda_tensor":
            assert module == "torch.multiprocessing.reductions"
            return lambda *handle: handle
        assert module.split(".")[0] in ("builtins", "copyreg", "torch")  # SGLang reads no others
        return super().find_class(module, name)


def test_sglang_gets_the_bucket_of_each_of_its_devices(
    start: Callable[..., ServerEngine], weights: dict[str, Tensor], tmp_path: Path
) -> None:
    engine = start(SGLANG, route("ipc"))
    buckets = buckets_of(weights, "ipc")
    engine.load_buckets(iter(buckets), 4)
    for body, bucket in zip(bodies(tmp_path, "/update_weights_from_tensor"), buckets, strict=True):
        assert (body["load_format"], body["flush_cache"]) == ("flattened_bucket", False)
        by_process = body["serialized_named_tensors"]
        for uuid, serialized in zip(["uuid-1", "uuid-0"], by_process, strict=True):
            value = FakeSGLang(io.BytesIO(base64.b64decode(serialized))).load()
            assert value["flattened_tensor"] == (*HANDLE[:6], uuid, *HANDLE[7:])
            ends = []
            for entry, name in zip(value["metadata"], bucket.names, strict=True):
                assert (entry.name, tuple(entry.shape), entry.dtype) == (name, weights[name].shape, torch.bfloat16)
                assert entry.numel == entry.end_idx - entry.start_idx == weights[name].numel() * 2
                assert entry.start_idx == (ends[-1] if ends else 0)
                ends.append(entry.end_idx)
    assert "sglang" not in sys.modules


def test_sglang_enters_a_group_and_is_told_of_each_broadcast(
    start: Callable[..., ServerEngine], weights: dict[str, Tensor], tmp_path: Path
) -> None:
    engine = start(SGLANG, route("nccl"))
    engine.enter(INVITATION, 3)
    place = {"master_address": "10.0.0.1", "master_port": 4321, "rank_offset": 3, "world_size": 5}
    group = {"group_name": "weights_0"}
    assert bodies(tmp_path, "/init_weights_update_group") == [{**place, **group, "backend": "nccl"}]
    buckets = buckets_of(weights, "nccl")
    engine.load_buckets(iter(buckets), 4)
    assert bodies(tmp_path, "/update_weights_from_distributed") == [
        {
            "names": list(bucket.names),
            "dtypes": ["bfloat16"] * len(bucket.names),
            "shapes": [list(shape) for shape in bucket.shapes],
            **group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        for bucket in buckets
    ]


def test_sglang_gets_the_projections_that_it_fuses_in_one_request(
    start: Callable[..., ServerEngine], model_folder: Folder, tmp_path: Path
) -> None:
    engine = start({**SGLANG, "model": "deepseek_v3"}, route("nccl"))
    engine.enter(INVITATION, 3)
    stored = load_file(model_folder("deepseek_v3") / "model.safetensors")
    # As the trainer sends them, where a file has others in between.
    neighbours = sorted(stored, key=lambda name: name.replace("kv_a_proj_", "q_a_proj_"))
    engine.load_buckets(iter(buckets_of({name: stored[name] for name in neighbours}, "nccl")), 4)
    requests = [body["names"] for body in bodies(tmp_path, "/update_weights_from_distributed")]
    fused = [[name for name in names if "q_a_proj" in name or "kv_a_proj" in name] for names in requests]
    assert sum(map(len, fused)) == 2 * sum(name.endswith("q_a_proj.weight") for name in stored) > 0
    assert all(len(names) % 2 == 0 for names in fused)
    apart = {name: stored[name] for name in sorted(stored)}
    with pytest.raises(RuntimeError, match=r"self_attn\.q_a_proj\.weight without .*kv_a_proj_with_mqa\.weight"):
        engine.load_buckets(iter(buckets_of(apart, "nccl")), 5)


@pytest.mark.parametrize("kind", [NEW, SGLANG], ids=["vllm", "sglang"])
def test_a_server_that_dies_enters_another_group_but_not_amid_a_transfer(
    kind: dict[str, str], start: Callable[..., ServerEngine], weights: dict[str, Tensor], tmp_path: Path
) -> None:
    engine = start(kind, route("nccl"), max_restarts=2)
    buckets = buckets_of(weights, "nccl")
    entered = {"vllm": "/init_weight_transfer_engine", "sglang": "/init_weights_update_group"}[kind["backend"]]
    assert not engine.expect_transfer()
    engine.enter(INVITATION, 1)
    engine.load_buckets(iter(buckets), 1)
    assert engine.expect_transfer()
    sampling = SamplingParams.from_config(GenerationConfig(max_new_tokens=4))
    engine.submit(0, GenerationRequest((fake_server.DEADLY, 6), 7), sampling)
    while engine.has_weights:
        engine.collect(0.1)
    assert list(engine.take_lost()) == [0]
    assert not engine.expect_transfer()
    # Its processes enter the next group, which all servers do then, and get the weights of now.
    engine.enter(replace(INVITATION, group="weights_1"), 1)
    engine.load_buckets(iter(buckets), 2)
    assert set(generate(engine)) == {2}
    assert len(bodies(tmp_path, entered)) == 2
    if kind is SGLANG:
        assert [body["group_name"] for body in bodies(tmp_path, entered)] == ["weights_0", "weights_1"]
        updates = bodies(tmp_path, "/update_weights_from_distributed")
        names = [body["group_name"] for body in updates]
        assert names == ["weights_0"] * len(buckets) + ["weights_1"] * len(buckets)
    # One that dies without having been asked anything is started again when weights are about to be sent.
    os.kill(Log(tmp_path).rows("start")[-1]["pid"], signal.SIGKILL)
    while engine.expect_transfer():
        time.sleep(0.01)
    # The trainer and other servers would wait for it in the transfer, so that its death ends the run at once.
    with pytest.raises(ServerDied, match="died when its weights were about to come by NCCL"):
        engine.load_buckets(iter(buckets), 3)
    assert len(Log(tmp_path).rows("start")) == 3


def test_a_handle_is_released_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "SHARED_MEMORY", tmp_path)
    file = tmp_path / "torch_1_2_0"
    file.write_bytes(bytes(64) + np.array([1, 0, 1, 1], np.int64).tobytes())

    def release(name: bytes, place: int, *, device: str) -> None:
        counts = np.memmap(file, np.int64, "r+", offset=64)
        counts[place] -= 1

    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", release)
    handles = [(*range(11), b"/torch_1_2_0", place) for place in range(3)]
    for _ in range(2):
        cuda_ipc.release([*handles, (*range(11), b"/torch_of_another_node", 0)])
    assert np.fromfile(file, np.int64, offset=64).tolist() == [0, 0, 0, 1]


def test_handles_of_a_server_that_dies_are_released_in_its_place(
    start: Callable[..., ServerEngine], weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[Any] = []
    monkeypatch.setattr(updates, "release", released.extend)
    monkeypatch.setattr(updates, "visible_uuids", lambda: ["uuid-1"])
    engine = start(NEW, route("ipc"), max_restarts=1, **{fake_server.DIES_IN: "/update_weights"})
    buckets = buckets_of(weights, "ipc")
    assert len(buckets) > 1
    engine.load_buckets(iter(buckets), 1)
    assert not engine.has_weights
    # Those that it has never seen, too.
    assert released == [bucket.handles["uuid-1"] for bucket in buckets]


def test_files_of_weights_have_the_offsets_of_routers_in_float32(
    start: Callable[..., ServerEngine], model_folder: Folder, tmp_path: Path
) -> None:
    engine = start({**SGLANG, "model": "glm4_moe"}, route("folder"))
    engine.update_weights(load_file(model_folder("glm4_moe") / "model.safetensors").items(), 1)
    dtypes = {tensor["name"]: tensor["dtype"] for tensor in Log(tmp_path).rows("load")[-1]["tensors"]}
    precise = {name for name, dtype in dtypes.items() if dtype != "BF16"}
    assert precise == {name for name in dtypes if name.endswith("e_score_correction_bias")} != set()
    assert {dtypes[name] for name in precise} == {"F32"}


@ALL
def test_a_server_that_shares_devices_stands_still_until_its_cache_has_memory(
    kind: dict[str, str], start: Callable[..., ServerEngine], weights: dict[str, Tensor], tmp_path: Path
) -> None:
    engine, log = start(kind, route("ipc")), Log(tmp_path)
    engine.load_buckets(iter(buckets_of(weights, "ipc")), 1)
    sampling = SamplingParams.from_config(GenerationConfig(max_new_tokens=20))
    engine.submit(0, GenerationRequest((fake_server.LONG, 1, 9, 9), 7), sampling)
    while not {"/fivefold/generate", "/generate"}.intersection(log.posts()):
        assert engine.collect(0.01) == []
    engine.sleep()
    engine.wake_weights()
    before = len(log.posts())
    engine.load_buckets(iter(buckets_of(weights, "ipc")), 2)
    signs = {"/pause?mode=abort", "/resume", "/pause_generation", "/continue_generation"}
    assert signs.isdisjoint(log.posts()[before:]), "what it has held back has no cache yet"
    engine.wake()
    wakes = {
        "vllm": ["/wake_up?tags=kv_cache", "/resume"],
        "sglang": ["/resume_memory_occupation", "/continue_generation"],
    }
    assert log.posts()[-2:] == wakes[kind["backend"]]
    while not (done := engine.collect(0.3)):
        pass
    [(_, completion)] = done
    assert sorted(set(completion.versions.tolist())) == [1, 2]


def test_requests_that_are_held_before_a_transfer_go_on_after_it(
    start: Callable[..., ServerEngine], weights: dict[str, Tensor], tmp_path: Path
) -> None:
    engine, log = start(NEW, route("nccl"), keeps_cache=True), Log(tmp_path)
    engine.enter(INVITATION, 1)
    assert engine.expect_transfer()
    engine.load_buckets(iter(buckets_of(weights, "nccl")), 1)
    sampling = SamplingParams.from_config(GenerationConfig(max_new_tokens=20))
    engine.submit(0, GenerationRequest((fake_server.LONG, 1, 9, 9), 7), sampling)
    while "/fivefold/generate" not in log.posts():
        assert engine.collect(0.01) == []
    before = len(log.posts())
    assert engine.expect_transfer()
    assert log.posts()[before:] == ["/fivefold/hold"]
    buckets = buckets_of(weights, "nccl")
    engine.load_buckets(iter(buckets), 2)
    update = ["/start_weight_update", *["/update_weights"] * len(buckets), "/finish_weight_update"]
    assert log.posts()[before + 1 :] == [*update, "/fivefold/go_on"]
    while not (done := engine.collect(0.3)):
        pass
    [(_, completion)] = done
    assert sorted(set(completion.versions.tolist())) == [1, 2]


@pytest.mark.parametrize("kind", [NEW, SGLANG], ids=["vllm", "sglang"])
@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_a_server_that_hangs_before_a_transfer_is_started_again_and_enters_another_group(
    is_busy: bool,
    kind: dict[str, str],
    start: Callable[..., ServerEngine],
    weights: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, log = start(kind, route("nccl"), max_restarts=1), Log(tmp_path)
    engine.enter(INVITATION, 1)
    assert engine.expect_transfer(), "a server without weights cannot show that it goes on"
    engine.load_buckets(iter(buckets_of(weights, "nccl")), 1)
    if is_busy:
        long = GenerationRequest((fake_server.LONG, 3, 9, 9), 7)
        engine.submit(0, long, SamplingParams.from_config(GenerationConfig(max_new_tokens=20)))
        while "/fivefold/generate" not in log.posts() and "/generate" not in log.posts():
            assert engine.collect(0.01) == []
    before = len(log.posts())
    assert engine.expect_transfer()
    signs = {"vllm": ("/fivefold/generate", "/pause?mode=abort"), "sglang": ("/generate", "/pause_generation")}
    assert signs[kind["backend"]][is_busy] in log.posts()[before:]
    before = len(log.posts())
    with monkeypatch.context() as stalled:
        stalled.setattr(engine._life, "_quiet_since", -math.inf)
        assert engine.collect(0.01) == []
    assert log.posts()[before:] == [], "it stands still until the weights come, however long the trainer takes"
    engine.load_buckets(iter(buckets_of(weights, "nccl")), 2)
    assert engine.collect(0.01) == []

    monkeypatch.setattr(dialects, "PAUSE_S", 0.5)
    log.hang()
    assert not engine.expect_transfer()
    engine.enter(replace(INVITATION, group="weights_1"), 1)
    engine.load_buckets(iter(buckets_of(weights, "nccl")), 3)
    assert len(log.rows("start")) == 2
    assert list(engine.take_lost()) == [0] * is_busy
    assert set(generate(engine)) == {3}


@pytest.mark.parametrize("kind", [NEW, SGLANG, *long(OLD)], ids=["vllm-0.32", "sglang", "vllm-0.25"])
@pytest.mark.parametrize("hangs_in", ["group", "start", "bucket"])
def test_a_server_that_hangs_in_a_transfer_ends_it_and_says_where(
    hangs_in: str,
    kind: dict[str, str],
    start: Callable[..., ServerEngine],
    weights: dict[str, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights_of_servers, "READY_S", 0.5)
    monkeypatch.setattr(weights_of_servers, "BUCKET_S", 0.5)
    monkeypatch.setattr(life, "WELL_S", 0.5)
    engine, log = start(kind, route("nccl"), max_restarts=1), Log(tmp_path)
    if hangs_in == "group":
        log.hang()
        with pytest.raises(ServerDied, match=r"the server did not reply to /init_w.* within 0.5 s"):
            engine.enter(INVITATION, 1)
        return
    engine.enter(INVITATION, 1)
    engine.load_buckets(iter(buckets_of(weights, "nccl")), 1)
    assert engine.expect_transfer()

    def buckets() -> Iterator[DeviceBucket]:
        if hangs_in == "bucket":
            log.hang()
        yield from buckets_of(weights, "nccl")

    if hangs_in == "start":
        log.hang()
    with pytest.raises(ServerDied, match=r"the server did not reply to /\S+ within 0.5 s, .* by NCCL") as failure:
        engine.load_buckets(buckets(), 2)
    # It answers GET requests, as one does that waits for another: then the other one is the cause.
    assert any(words in str(failure.value) for words in failures._PEER_LOSS)
    with monkeypatch.context() as silent:
        silent.setattr(HttpClient, "is_healthy", lambda self, limit_s: False)
        with pytest.raises(ServerDied, match="by NCCL") as failure:
            engine.load_buckets(buckets(), 2)
    assert not any(words in str(failure.value) for words in failures._PEER_LOSS)


@ALL
def test_a_refused_bucket_is_an_error_at_once_and_the_engine_has_no_weights(
    kind: dict[str, str], start: Callable[..., ServerEngine], weights: dict[str, Tensor], tmp_path: Path
) -> None:
    engine = start(kind, route("ipc"))
    refusal = tmp_path / fake_server.REFUSAL
    refusal.write_text("500")
    taken: list[DeviceBucket] = []

    def buckets() -> Iterator[DeviceBucket]:
        for bucket in buckets_of(weights, "ipc"):
            taken.append(bucket)
            yield bucket

    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"refused /update_weights.* with status 500: .*no such weights"):
        engine.load_buckets(buckets(), 4)
    assert time.monotonic() - began < 60
    assert len(taken) == 1
    with pytest.raises(RuntimeError, match="the last update failed"):
        generate(engine)
    refusal.unlink()
    engine.load_buckets(buckets(), 5)
    assert set(generate(engine)) == {5}


@pytest.mark.parametrize("kind", [NEW, SGLANG], ids=["vllm-0.32", "sglang"])
def test_a_server_that_says_another_version_is_an_error(
    kind: dict[str, str], start: Callable[..., ServerEngine], weights: dict[str, Tensor], tmp_path: Path
) -> None:
    engine = start(kind, route("ipc"))
    (tmp_path / fake_server.FORGETFUL).touch()
    with pytest.raises(RuntimeError, match=r"an update to version 4 the server says .* version 'default'"):
        engine.load_buckets(iter(buckets_of(weights, "ipc")), 4)
    with pytest.raises(RuntimeError, match="the last update failed"):
        generate(engine)


def test_buckets_that_lack_a_tensor_leave_the_engine_without_weights(
    start: Callable[..., ServerEngine], weights: dict[str, Tensor]
) -> None:
    engine = start(OLD, route("ipc"))
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match=r"do not fit .*missing: model\.norm\.weight"):
        engine.load_buckets(iter(buckets_of(weights, "ipc")), 4)
    with pytest.raises(RuntimeError, match="the last update failed"):
        generate(engine)


@pytest.mark.parametrize("transport", ["ipc", "folder"])
def test_what_arrives_in_vllm_is_compared_with_what_was_sent(
    transport: str, start: Callable[..., ServerEngine], weights: dict[str, Tensor], tmp_path: Path
) -> None:
    engine = start(OLD, route(transport, with_checksum=True))
    right = checksum((name, tensor.bfloat16()) for name, tensor in weights.items()) % CHECKSUMS

    def update(version: int) -> None:
        if transport == "ipc":
            engine.load_buckets(iter(buckets_of(weights, "ipc", with_checksum=True)), version)
        else:
            engine.update_weights(weights.items(), version)

    (tmp_path / fake_server.CHECKSUM).write_text(str(right))
    update(4)
    assert set(generate(engine)) == {4}
    (tmp_path / fake_server.CHECKSUM).write_text(str(right + 1))
    with pytest.raises(RuntimeError, match="the weights that arrived are not those that were sent"):
        update(5)
    with pytest.raises(RuntimeError, match="the last update failed"):
        generate(engine)
    [started] = Log(tmp_path).rows("start")
    assert started["environment"]["PYTHONPATH"].split(":")[0] == str(vllm_dialect.INSIDE)


def test_the_code_inside_vllm_computes_the_same_checksum(
    weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(vllm_dialect.INSIDE)
    module, _, name = vllm_dialect.WEIGHTS.rpartition(".")
    worker = getattr(__import__(module), name)()
    loaded: dict[str, Tensor] = {}
    model = SimpleNamespace(load_weights=loaded.update)
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    rows = list(weights.items())
    for _ in range(2):  # the second update begins anew
        worker.fivefold_watch_weights()
        model.load_weights(iter(rows[:3]))
        model.load_weights(iter(rows[3:]))
        assert worker.fivefold_weight_checksum() == str(checksum(rows) % CHECKSUMS)
    assert loaded.keys() == weights.keys()


def test_a_command_line_names_the_transport() -> None:
    def flags(backend: str, way: Route) -> list[str]:
        return server_command(DIALECTS[backend], spec_of(backend, Path("/models/a"), route=way), 81)

    for transport in ("ipc", "nccl"):
        command = flags("vllm", route(transport))
        assert command[command.index("--weight-transfer-config") + 1] == f'{{"backend": "{transport}"}}'
        assert flags("sglang", route(transport)) == flags("sglang", route("folder"))
    assert "--weight-transfer-config" not in flags("vllm", route("folder"))


@pytest.fixture
def inside_vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(vllm_dialect.INSIDE)
    return __import__("fivefold_weights")


class ExpertLayer:
    """A layer like vLLM's: its parameters' loader takes the tensor of one expert, or those of all."""

    ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name = "gate_proj", "down_proj", "up_proj"

    def __init__(self, number: int, *, use_ep: bool = False) -> None:
        self.layer_name = f"model.layers.{number}.mlp.experts"
        self.quant_method = type("UnquantizedFusedMoEMethod", (), {})()
        self.moe_config = SimpleNamespace(
            num_experts=4, num_logical_experts=4, moe_parallel_config=SimpleNamespace(use_ep=use_ep)
        )
        self.expert_map_manager = SimpleNamespace(num_fused_shared_experts=0)
        self.calls: list[tuple[str, int]] = []
        self.w13_weight = SimpleNamespace(data=torch.zeros(4, 6, 2), weight_loader=self.load)
        self.w2_weight = SimpleNamespace(data=torch.zeros(4, 2, 3), weight_loader=self.load)

    def load(
        self, *, param: Any, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int,
        return_success: bool,
    ) -> bool:  # fmt: skip
        self.calls.append((weight_name, loaded_weight.dim()))
        rows = {"w1": slice(0, 3), "w3": slice(3, 6), "w2": slice(None)}[shard_id]
        (param.data if loaded_weight.dim() == 3 else param.data[expert_id])[..., rows, :] = loaded_weight
        return return_success


class ExpertModel:
    """A model like vLLM's, which loads the tensors of experts one by one."""

    def __init__(self, *layers: ExpertLayer) -> None:
        self.layers = layers
        self.others: list[str] = []

    def modules(self) -> Iterator[Any]:
        yield from (self, *self.layers)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            if ".experts." not in name:
                self.others.append(name)
                loaded.add(name)
                continue
            layer_name, expert, projection, _ = name.rsplit(".", 3)
            [layer] = [layer for layer in self.layers if layer.layer_name == layer_name]
            shard = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[projection]
            kind = "w2_weight" if shard == "w2" else "w13_weight"
            layer.load(
                param=getattr(layer, kind), loaded_weight=tensor, weight_name=f"{layer_name}.{kind}", shard_id=shard,
                expert_id=int(expert), return_success=True,
            )  # fmt: skip
            loaded.add(f"{layer_name}.{kind}")
        return loaded


def expert_rows(n_layers: int) -> list[tuple[str, Tensor]]:
    """Draw tensors of layers with four experts, and one of a norm before each layer."""
    shapes = {"gate_proj": (3, 2), "up_proj": (3, 2), "down_proj": (2, 3)}
    rows = []
    for layer in range(n_layers):
        rows.append((f"model.layers.{layer}.input_layernorm.weight", torch.randn(2)))
        rows += [
            (f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", torch.randn(shape))
            for expert in range(4) for name, shape in shapes.items()
        ]  # fmt: skip
    return rows


def test_vllm_loads_all_experts_of_a_projection_at_once(inside_vllm: Any) -> None:
    rows = expert_rows(2)
    plain, faster = (ExpertModel(ExpertLayer(0), ExpertLayer(1, use_ep=True)) for _ in range(2))
    names = plain.load_weights(rows)
    for _ in range(2):  # the second time changes nothing
        inside_vllm.load_experts_together(faster, ExpertLayer)
    list(faster.load_weights(iter(expert_rows(2)[:9])))  # an update that ends early leaves nothing behind
    for _ in range(2):
        for layer in faster.layers:
            layer.calls.clear()
        faster.others.clear()
        loaded = faster.load_weights(iter(rows[:8])) | faster.load_weights(iter(rows[8:]))
        assert loaded == names
        whole, single = (layer.layer_name for layer in faster.layers)
        assert sorted(faster.layers[0].calls) == [(f"{whole}.w13_weight", 3)] * 2 + [(f"{whole}.w2_weight", 3)]
        assert sorted(faster.layers[1].calls) == [(f"{single}.w13_weight", 2)] * 8 + [(f"{single}.w2_weight", 2)] * 4
        assert faster.others == [name for name, _ in rows if "norm" in name]
        for one, other in zip(plain.layers, faster.layers, strict=True):
            assert one.w13_weight.data.equal(other.w13_weight.data)
            assert one.w2_weight.data.equal(other.w2_weight.data)


def test_vllm_copies_a_buffer_that_it_opens_at_once(inside_vllm: Any) -> None:
    tensors = {"a": torch.randn(3, 2), "b": torch.randn(5), "c": torch.randn(1, 4, 2)}
    buffer = torch.cat([tensor.bfloat16().view(-1) for tensor in tensors.values()]).view(torch.uint8)
    copies: list[Tensor] = []

    def consumer(
        ipc_handle: Any, names: list[str], shapes: list[list[int]], dtype_names: list[str], tensor_sizes: list[int],
        device_index: int,
    ) -> list[tuple[str, Tensor]]:  # fmt: skip
        """Do what vLLM's own does."""
        assert (ipc_handle, device_index) == ({"uuid": ()}, 3)
        parts = buffer[: sum(tensor_sizes)].split(tensor_sizes)
        copies.extend(part.clone() for part in parts)
        dtypes = [getattr(torch, name) for name in dtype_names]
        copied = zip(names, copies[-len(names) :], dtypes, shapes, strict=True)
        return [(name, copy.view(dtype).view(shape)) for name, copy, dtype, shape in copied]

    engine = SimpleNamespace(packed_ipc_consumer=consumer)
    args = (list(tensors), [list(t.shape) for t in tensors.values()], ["bfloat16"] * 3, [12, 10, 16], 3)
    expected = engine.packed_ipc_consumer({"uuid": ()}, *args)
    copies.clear()
    for _ in range(2):  # the second time changes nothing
        inside_vllm.open_whole_buffers(engine)
    found = engine.packed_ipc_consumer({"uuid": ()}, *args)
    assert len(copies) == 1
    assert [name for name, _ in found] == list(tensors)
    assert all(one.equal(other) for (_, one), (_, other) in zip(found, expected, strict=True))
    buffer.zero_()  # the sender fills it again
    assert all(tensor.abs().sum() > 0 for _, tensor in found)


def test_the_embedded_engine_opens_the_trainers_buffers(
    model_folder: Folder, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handles stand for buffers in this process's own memory."""
    engine = TransformersEngine.from_path(
        str(model_folder("qwen3_moe")), dtype="float32", device="cpu", max_batch_size=2, tokenizer_path=None,
        load_weights=False, transport=TRANSPORTS["ipc"],
    )  # fmt: skip
    monkeypatch.setattr(cuda_ipc, "device_uuid", lambda device: "uuid-0")
    monkeypatch.setattr(cuda_ipc, "opened", lambda handle, device: handle[0])

    def buckets(spoils: bool) -> Iterator[DeviceBucket]:
        filler = BufferFiller(stacked(weights.items()), dtype=torch.float32, n_buffers=2, max_bytes=20_000)
        while (filled := filler.fill()) is not None:
            tensors, buffer = filled
            names, shapes = tuple(name for name, _ in tensors), tuple(tuple(tensor.shape) for _, tensor in tensors)
            yield DeviceBucket(names, shapes, "float32", {"uuid-0": (buffer,)}, checksum(tensors) % CHECKSUMS + spoils)

    engine.receive(buckets(spoils=False), 3)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in engine.weights())
    with pytest.raises(RuntimeError, match="not those that were sent"):
        engine.receive(buckets(spoils=True), 4)


@pytest.mark.parametrize("kind", [OLD, SGLANG], ids=["vllm", "sglang"])
def test_a_server_loads_a_folder_with_the_adapters_that_came_alone_merged_into_its_own_weights(
    kind: dict[str, str], start: Callable[..., ServerEngine], weights: dict[str, Tensor], tmp_path: Path
) -> None:
    way = Route(AdapterMemory(merged_dtype="float32", alpha=4.0), "float32", checksum=False)
    engine = start(kind, way)
    adapted = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.3.down_proj")
    generator, sent, wanted = torch.Generator().manual_seed(0), list[tuple[str, Tensor]](), dict(weights)
    for layer in adapted:
        rows, columns = weights[f"{layer}.weight"].shape
        a, b = torch.randn(2, columns, generator=generator), torch.randn(rows, 2, generator=generator)
        sent += [(f"{layer}.lora_A.weight", a), (f"{layer}.lora_B.weight", b)]
        wanted[f"{layer}.weight"] = weights[f"{layer}.weight"].float() + 4.0 / 2 * b @ a
    engine.receive(pack(sent, 1000), 3)
    loaded = {tensor["name"]: tensor["sha256"] for tensor in Log(tmp_path).rows("load")[-1]["tensors"]}
    dtype = getattr(torch, engine._spec.dtype)
    hashes = {
        name: hashlib.sha256(tensor.float().to(dtype).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in wanted.items()
    }
    assert loaded == hashes
    assert generate(engine) == [3] * 4
