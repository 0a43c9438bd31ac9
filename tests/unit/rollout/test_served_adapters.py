"""Adapters that a server keeps next to its weights, against a server that logs its requests and reads the files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.config.schema.lora import LoraConfig
from fivefold.config.schema.rollout import GenerationConfig
from fivefold.families.read import load_shape
from fivefold.families.served import ServedAdapters, sent_matrices
from fivefold.families.shape import ModelShape
from fivefold.rollout.contract import complete
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.servers.client import ServerRefused
from fivefold.rollout.servers.command import check_command
from fivefold.rollout.servers.engine import ServerEngine
from fivefold.rollout.servers.sglang_dialect import SGLangDialect
from fivefold.rollout.servers.vllm_dialect import VLLMDialect
from fivefold.weights.buckets import pack
from fivefold.weights.table import TRANSPORTS
from fivefold.weights.transport import Route
from tests.unit.rollout import served
from tests.unit.rollout.conftest import spec_of
from tests.unit.rollout.fake_server import REFUSAL, UNUSED, Log, write_python

Folder = Callable[..., Path]

ROUTE = Route(TRANSPORTS["served_adapter"], "bfloat16", checksum=False)
LORA = LoraConfig(rank=6, rank_of_experts=2, alpha=3.0)
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERT = ("gate_proj", "up_proj", "down_proj")
BACKENDS = pytest.mark.parametrize("backend", ["vllm", "sglang"])


def shape_of(folder: Path, lora: LoraConfig = LORA) -> ModelShape:
    return load_shape(folder).with_lora(lora)


@pytest.fixture
def start(model_folder: Folder, tmp_path: Path) -> Iterator[Callable[..., ServerEngine]]:
    """Start an engine over a server whose model has adapters."""
    engines = []

    def started(backend: str, lora: LoraConfig = LORA, **changes: Any) -> ServerEngine:
        model = model_folder("narrow_experts")
        adapters = ServedAdapters.of(shape_of(model, lora))
        spec = spec_of(
            backend, model, python=write_python(tmp_path), route=ROUTE, adapters=adapters, dtype="bfloat16", **changes
        )
        engines.append(served.start(spec))
        return engines[-1]

    yield started
    for engine in engines:
        engine.close()


def sent_by(shape: ModelShape, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(full, generator=generator).bfloat16() for name, full in sent_matrices(shape).items()}


def generate(engine: ServerEngine) -> Sequence[int]:
    sampling = SamplingParams.from_config(GenerationConfig(max_new_tokens=4))
    [completion] = complete(engine, [GenerationRequest((5, 6), 7)], sampling)
    return list(completion.versions)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def arrived(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the config and the tensors of the adapters that a server has read last."""
    row = Log(folder).rows("adapters")[-1]
    return row["config"], {tensor["name"]: tensor for tensor in row["tensors"]}


@BACKENDS
def test_a_server_gets_the_adapters_with_their_scales_and_answers_with_them(
    backend: str, start: Callable[..., ServerEngine], model_folder: Folder, tmp_path: Path
) -> None:
    engine = start(backend)
    shape = shape_of(model_folder("narrow_experts"))
    sent = sent_by(shape)
    engine.receive(pack(sent.items(), 10_000), 3)
    config, tensors = arrived(tmp_path)
    # Servers compute the scale from the config alone, whatever the layer.
    assert config["lora_alpha"] / config["r"] == 1.0
    assert not config["use_rslora"], "SGLang does not read it"
    assert tensors.keys() == {f"base_model.model.{name}" for name in sent}
    for name, matrix in sent.items():
        rank = 2 if ".experts." in name else 6
        wanted = matrix if "lora_A" in name else (matrix.float() * (3.0 / rank)).bfloat16()
        if backend == "sglang":
            missing = 6 - rank
            wanted = torch.nn.functional.pad(wanted, (0, 0, 0, missing) if "lora_A" in name else (0, missing))
        found = tensors[f"base_model.model.{name}"]
        assert (found["shape"], found["dtype"], found["sha256"]) == (list(wanted.shape), "BF16", digest(wanted)), name
    assert generate(engine) == [3] * 4


@BACKENDS
def test_each_update_takes_the_place_of_the_last_and_leaves_no_files(
    backend: str, start: Callable[..., ServerEngine], model_folder: Folder, tmp_path: Path
) -> None:
    engine = start(backend)
    shape = shape_of(model_folder("narrow_experts"))
    for version in (1, 2):
        before = len(Log(tmp_path).posts())
        engine.receive(pack(sent_by(shape, version).items(), 10_000), version)
        posts = Log(tmp_path).posts()[before:]
        if backend == "vllm":
            assert posts == ["/fivefold/adapters", "/collective_rpc"]
        else:
            unload = ["/unload_lora_adapter"] if version == 2 else []
            assert posts == [*unload, "/load_lora_adapter", "/flush_cache"]
        assert generate(engine) == [version] * 4
    names = [row["name"] for row in Log(tmp_path).rows("adapters")]
    assert len(set(names)) == 2, "a new name for each version"
    bodies = [row["body"] for row in Log(tmp_path).rows("request") if row["path"] == served.GENERATE[backend]]
    assert [body.get("lora_path") for body in bodies] == ([None] * 2 if backend == "vllm" else names)
    folders = [Path(row["folder"]) for row in Log(tmp_path).rows("adapters")]
    assert not any(folder.exists() for folder in folders)
    assert not list(served.SHARED_MEMORY.glob(f"{served.PREFIX}{engine._spec.run}*"))


@pytest.mark.parametrize(
    ("targets", "further"),
    [
        (["up_proj"], [f"experts.0.{name}" for name in EXPERT]),
        (["v_proj"], ["q_proj", "k_proj", "v_proj"]),
        (["o_proj"], ["o_proj"]),
    ],
    ids=["one side of experts", "one of qkv", "alone"],
)
@BACKENDS
def test_layers_that_a_server_computes_in_one_have_adapters_that_are_0_next_to_those_that_are_trained(
    backend: str,
    targets: list[str],
    further: list[str],
    start: Callable[..., ServerEngine],
    model_folder: Folder,
    tmp_path: Path,
) -> None:
    lora = LORA.model_copy(update={"targets": targets})
    engine = start(backend, lora)
    shape = shape_of(model_folder("narrow_experts"), lora)
    sent = sent_by(shape)
    engine.receive(pack(sent.items(), 10_000), 1)
    _, tensors = arrived(tmp_path)
    of_layer = {name for name in tensors if "layers.0." in name and (".experts." not in name or ".experts.0." in name)}
    layers = {name.removeprefix("base_model.model.model.layers.0.").split(".lora_")[0] for name in of_layer}
    assert {layer.removeprefix("mlp.").removeprefix("self_attn.") for layer in layers} == set(further)
    zeros = {name for name in tensors if name.removeprefix("base_model.model.") not in sent}
    for name in zeros:
        tensor = tensors[name]
        assert tensor["sha256"] == digest(torch.zeros(tensor["shape"], dtype=torch.bfloat16))
    assert len(tensors) == len(sent) + len(zeros)


def test_experts_that_share_a_matrix_each_have_a_copy(
    start: Callable[..., ServerEngine], model_folder: Folder, tmp_path: Path
) -> None:
    lora = LORA.model_copy(update={"experts": "shared_outer"})
    engine = start("vllm", lora)
    sent = sent_by(shape_of(model_folder("narrow_experts"), lora))
    engine.receive(pack(sent.items(), 10_000), 1)
    _, tensors = arrived(tmp_path)
    shared = "model.layers.0.mlp.experts.gate_proj.lora_A.weight"
    copies = [tensors[f"base_model.model.{shared.replace('experts.', f'experts.{e}.')}"] for e in range(4)]
    assert {copy["sha256"] for copy in copies} == {digest(sent[shared])}


def test_a_matrix_that_does_not_come_is_refused(
    start: Callable[..., ServerEngine], model_folder: Folder, tmp_path: Path
) -> None:
    engine = start("vllm")
    sent = sent_by(shape_of(model_folder("narrow_experts")))
    lost = sent.popitem()[0]
    with pytest.raises(ValueError, match=f"missing: {lost}"):
        engine.receive(pack(sent.items(), 10_000), 1)
    assert not engine.has_weights
    assert not Log(tmp_path).rows("adapters")


@BACKENDS
def test_a_server_that_refuses_adapters_has_none(
    backend: str, start: Callable[..., ServerEngine], model_folder: Folder, tmp_path: Path
) -> None:
    engine = start(backend)
    (tmp_path / REFUSAL).write_text("400")
    with pytest.raises(ServerRefused, match="no such adapters"):
        engine.receive(pack(sent_by(shape_of(model_folder("narrow_experts"))).items(), 10_000), 1)
    assert not engine.has_weights


def test_adapters_for_which_no_worker_of_vllm_has_a_layer_end_the_update(
    start: Callable[..., ServerEngine], model_folder: Folder, tmp_path: Path
) -> None:
    engine = start("vllm")
    sent = sent_by(shape_of(model_folder("narrow_experts")))
    # Layers of the other pipeline stage are no problem.
    (tmp_path / UNUSED).write_text(json.dumps([["first.q_proj"], ["last.q_proj"]]))
    engine.receive(pack(sent.items(), 10_000), 1)
    (tmp_path / UNUSED).write_text(json.dumps([["first.q_proj", "experts"], ["experts"]]))
    with pytest.raises(RuntimeError, match="no layer for 1 adapters, 'experts'"):
        engine.receive(pack(sent.items(), 10_000), 2)
    assert not engine.has_weights


@BACKENDS
def test_a_server_loads_the_weights_itself_and_keeps_them_while_it_sleeps(
    backend: str, start: Callable[..., ServerEngine], model_folder: Folder, tmp_path: Path
) -> None:
    """The server that logs requests forgets weights as real ones do."""
    engine = start(backend, can_sleep=True, memory_fraction=0.5)
    assert not engine.has_weights, "without adapters it would answer with the base"
    arguments = Log(tmp_path).rows("start")[0]["command"]
    assert "dummy" not in arguments
    sent = sent_by(shape_of(model_folder("narrow_experts")))
    for version in (1, 2):
        engine.sleep()
        engine.wake_weights()
        engine.receive(pack(sent.items(), 10_000), version)
        engine.wake()
        assert generate(engine) == [version] * 4


@pytest.mark.parametrize(
    ("lora", "modules", "rank"),
    [
        (LORA, ["experts", "k_proj", "o_proj", "q_proj", "v_proj"], "8"),
        (LoraConfig(rank=33, experts="none"), ["k_proj", "o_proj", "q_proj", "v_proj"], "64"),
        (LoraConfig(rank=1, rank_of_experts=1, targets=["gate_proj"]), ["experts"], "1"),
    ],
)
def test_vllm_makes_room_for_the_layers_that_have_adapters(
    lora: LoraConfig, modules: list[str], rank: str, model_folder: Folder
) -> None:
    model = model_folder("narrow_experts")
    adapters = ServedAdapters.of(shape_of(model, lora))
    arguments = VLLMDialect().arguments(spec_of("vllm", model, adapters=adapters), 1)
    first = arguments.index("--lora-target-modules")
    assert arguments[first + 1 :][: len(modules)] == modules
    assert arguments[arguments.index("--max-lora-rank") + 1] == rank
    assert arguments[arguments.index("--max-loras") + 1] == "1"


def test_sglang_makes_room_for_the_layers_that_have_adapters_and_has_the_kernel_of_experts(
    model_folder: Folder,
) -> None:
    model = model_folder("narrow_experts")
    adapters = ServedAdapters.of(shape_of(model))
    arguments = SGLangDialect().arguments(spec_of("sglang", model, adapters=adapters), 1)
    first = arguments.index("--lora-target-modules")
    assert arguments[first + 1 :][:7] == sorted({*LAYERS, *EXPERT})
    assert arguments[arguments.index("--max-lora-rank") + 1] == "6"
    assert arguments[arguments.index("--lora-backend") + 1] == "triton"


@BACKENDS
def test_a_recipe_does_not_say_again_what_follows_from_the_adapters(
    backend: str, model_folder: Folder, tmp_path: Path
) -> None:
    dialect = {"vllm": VLLMDialect(), "sglang": SGLangDialect()}[backend]
    spec = spec_of(backend, model_folder("narrow_experts"), python=write_python(tmp_path), arguments=("--enable-lora",))
    with pytest.raises(ValueError, match="server_args has --enable-lora"):
        check_command(dialect, spec)
