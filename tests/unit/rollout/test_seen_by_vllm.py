"""Prompts with images on vLLM: what its server is told, and the code inside it, over stand-ins for both."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fivefold.bridge.kept import tower_files
from fivefold.rollout.contract import complete
from fivefold.rollout.engines import DIALECTS
from fivefold.rollout.protocol import GenerationRequest
from fivefold.rollout.servers import vllm_dialect
from fivefold.rollout.servers.command import check_command, server_command
from fivefold.rollout.servers.images import SharedImages
from fivefold.types import PlacedImage
from tests.unit.rollout.conftest import spec_of
from tests.unit.rollout.fake_server import Log, write_python
from tests.unit.rollout.served import Served, sampling, start
from tests.unit.rollout.stand_ins import stand_in

IMAGE, MERGE = 66, 2
Folder = Callable[..., Path]


def image(seed: int, start: int, rows: int, columns: int) -> PlacedImage:
    patches = np.random.default_rng(seed).normal(size=(rows * columns * MERGE**2, 24))
    return PlacedImage(patches.astype(np.float32), seed, start, rows, columns)


def request(seed: int, *images: PlacedImage) -> GenerationRequest:
    tokens = [*range(10, 24)]
    for each in images:
        tokens[each.start : each.start + each.n_tokens] = [IMAGE] * each.n_tokens
    return GenerationRequest(tuple(tokens), seed, images=images)


def sha256(image: PlacedImage, dtype: torch.dtype) -> str:
    return hashlib.sha256(torch.from_numpy(image.patches_PC).to(dtype).view(torch.uint8).numpy().tobytes()).hexdigest()


def is_held(path: str) -> bool:
    """Return whether an image's memory is still there; another file may have its number by now."""
    return os.path.lexists(path) and "fivefold-image" in os.readlink(path)


# What Fivefold does outside vLLM


def test_a_server_gets_the_patches_of_each_request_and_the_tower_at_its_start(
    model_folder: Folder, tmp_path: Path
) -> None:
    model = model_folder("qwen3_vl")
    spec = spec_of("vllm", model, python=write_python(tmp_path), sees=True, new_tokens_per_chunk=5)
    engine, log = start(spec), Log(tmp_path)
    weights = load_file(model / "model.safetensors")
    [loaded] = log.rows("fivefold_load_tower")
    assert spec.can_sleep
    assert len(log.rows("fivefold_keep_features")) == 1
    towers = {name for name in weights if name.startswith("model.visual.")}
    assert loaded["files"].keys() == {str(model / "model.safetensors")}
    assert set(*loaded["files"].values()) == towers != set()

    text = {name: tensor for name, tensor in weights.items() if name not in towers}
    served = Served(spec, engine, tmp_path, text)
    served.update(1)
    engine.sleep()
    engine.wake()
    served.update(2)
    pair, alone = (image(1, 2, 2, 3), image(2, 9, 1, 2)), image(1, 4, 2, 3)
    complete(engine, [request(14, *pair), request(14, alone), request(3)], sampling())
    rows, bodies = log.rows("image"), [body for body in served.bodies() if "images" in body]
    # The third has none; each of the others asks three times for five tokens at most.
    assert len(bodies) == 6
    assert {len(body["images"]) for body in bodies} == {1, 2}
    for row in rows:
        meant = next(
            each for each in (*pair, alone) if (each.digest, each.start) == (int(row["name"][0]), row["start"])
        )
        assert row["sha256"] == sha256(meant, torch.bfloat16)
        assert row["dtype"] == "bfloat16"
        assert row["shape"] == list(meant.patches_PC.shape)
        assert row["grid"] == [meant.rows * MERGE, meant.columns * MERGE]
        assert row["n_tokens"] == meant.n_tokens
    assert not any(is_held(row["path"]) for row in rows)
    assert len(log.rows("fivefold_load_tower")) == 1
    engine.close()


def test_a_server_that_loads_its_own_weights_has_the_tower_among_them(model_folder: Folder, tmp_path: Path) -> None:
    spec = spec_of("vllm", model_folder("qwen3_vl"), python=write_python(tmp_path), sees=True, load_weights=True)
    start(spec).close()
    assert Log(tmp_path).rows("fivefold_load_tower") == []


def test_the_tensors_of_towers_are_found_by_file(model_folder: Folder) -> None:
    assert tower_files(model_folder("qwen3_moe")) == {}
    [(file, names)] = tower_files(model_folder("qwen3_5")).items()
    assert set(names) == {name for name in load_file(file) if name.startswith("model.visual.")}


def flags_of(**changes: Any) -> dict[str, str]:
    words = server_command(DIALECTS["vllm"], spec_of("vllm", Path("/models/a"), python="/opt/python", **changes), 81)
    return {word: words[index + 1] for index, word in enumerate(words[:-1]) if word.startswith("--")}


def test_vllm_makes_room_for_the_largest_image_and_for_no_video(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = flags_of(sees=True, most_pixels=5000)
    assert json.loads(flags["--limit-mm-per-prompt"]) == {"video": 0}
    assert json.loads(flags["--mm-processor-kwargs"]) == {"max_pixels": 5000}
    assert "--mm-processor-kwargs" not in flags_of(sees=True)
    assert "--limit-mm-per-prompt" not in flags_of()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    runners = [
        DIALECTS["vllm"].environment(spec_of("vllm", Path("/models/a"), sees=sees)).get("VLLM_USE_V2_MODEL_RUNNER")
        for sees in (False, True)
    ]
    assert runners == ["1", None]


@pytest.mark.parametrize(
    ("family", "rope", "is_told"),
    [
        ("qwen3_vl", {"mrope_section": [4, 2, 2], "mrope_interleaved": True}, True),
        ("qwen3_vl", {"mrope_section": [4, 2, 2]}, False),
        ("qwen3_vl", {"mrope_interleaved": True}, False),
        ("qwen2_5_vl", {"mrope_section": [2, 1, 1]}, True),
    ],
)
def test_a_folder_must_tell_vllm_how_tokens_of_images_turn(
    model_folder: Folder, tmp_path: Path, family: str, rope: dict[str, Any], is_told: bool
) -> None:
    """Without the keys, vLLM turns other channels than transformers does."""
    folder = Path(shutil.copytree(model_folder(family), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0, **rope}
    (folder / "config.json").write_text(json.dumps(config))
    spec = spec_of("vllm", folder, python=write_python(tmp_path / "server"), sees=True)
    check_command(DIALECTS["vllm"], replace(spec, sees=False))
    if is_told:
        check_command(DIALECTS["vllm"], spec)
        return
    with pytest.raises(ValueError, match=r'write {"mrope_section": \[\d+, \d+, \d+\], "mrope_interleaved": true}'):
        check_command(DIALECTS["vllm"], spec)


def test_requests_with_the_same_image_share_its_memory_until_the_last_has_ended() -> None:
    images = SharedImages(torch.float32, "images")
    same, other_size = image(1, 2, 2, 3), PlacedImage(image(1, 2, 2, 3).patches_PC[:8], 1, 2, 1, 2)
    with images.held([same, other_size]) as first:
        with images.held([image(1, 5, 2, 3)]) as second:
            paths = [each["path"] for each in first["images"]]
            assert second["images"][0]["path"] == paths[0] != paths[1]
        assert all(map(is_held, paths))
        assert Path(paths[0]).read_bytes() == same.patches_PC.tobytes()
    assert not any(map(is_held, paths))
    with images.held([]) as nothing:
        assert nothing == {}


# The code inside vLLM


@dataclass(frozen=True)
class PlaceholderRange:
    """vLLM's class of this name."""

    offset: int
    length: int


class Items(dict[str, Any]):
    """vLLM's `MultiModalKwargsItems`: by kind, a mapping for each item."""

    @staticmethod
    def from_hf_inputs(inputs: dict[str, Tensor], fields: dict[str, Callable[[Tensor], list[Tensor]]]) -> Items:
        parts = {name: fields[name](tensor) for name, tensor in inputs.items()}
        [n] = {len(values) for values in parts.values()}
        return Items(image=[{name: values[i] for name, values in parts.items()} for i in range(n)])


class FieldConfig:
    """vLLM's `MultiModalFieldConfig`, whose fields divide a tensor by item."""

    @staticmethod
    def flat_from_sizes(kind: str, sizes: Tensor) -> Callable[[Tensor], list[Tensor]]:
        assert kind == "image"
        return lambda tensor: list(tensor.split(sizes.tolist()))

    @staticmethod
    def batched(kind: str, *, keep_on_cpu: bool) -> Callable[[Tensor], list[Tensor]]:
        assert kind == "image"
        assert keep_on_cpu
        return list


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module that runs inside vLLM, over a stand-in for vLLM."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.inputs": {
            "tokens_input": lambda ids, **salt: {"prompt_token_ids": ids, **salt},
            "mm_input": lambda ids, **rest: {"prompt_token_ids": ids, **rest},
        },
        "vllm.lora": {},
        "vllm.logprobs": {"FlatLogprobs": list},
        "vllm.v1.engine.logprobs": {"LogprobsProcessor": SimpleNamespace(_update_sample_logprobs=None)},
        "vllm.lora.request": {"LoRARequest": None},
        "vllm.multimodal": {},
        "vllm.multimodal.inputs": {
            "MultiModalFieldConfig": FieldConfig, "MultiModalKwargsItems": Items, "PlaceholderRange": PlaceholderRange
        },
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {},
        "vllm.sampling_params": {
            "RequestOutputKind": SimpleNamespace(FINAL_ONLY=2), "SamplingParams": SimpleNamespace
        },
        "vllm.v1": {},
        "vllm.v1.engine": {"EngineCoreOutputs": None},
        "vllm.v1.engine.exceptions": {"EngineDeadError": OSError, "EngineGenerateError": OSError},
    }  # fmt: skip
    stand_in(monkeypatch, contents)
    monkeypatch.syspath_prepend(vllm_dialect.INSIDE)
    for name in ("fivefold_generate", "fivefold_images", "fivefold_draft", "fivefold_tower"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


class Engine:
    """A stand-in for vLLM's engine client, which may complete other tokens than those of the request."""

    def __init__(self, *more: int) -> None:
        self.prompts: list[Any] = []
        self.more = more

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def generate(self, prompt: Any, params: Any, name: str, *, lora_request: Any) -> Any:
        self.prompts.append(prompt)
        output = SimpleNamespace(token_ids=[7], logprobs=None, finish_reason="stop")
        yield SimpleNamespace(prompt_token_ids=[*prompt["prompt_token_ids"], *self.more], outputs=[output])


def reply_of(
    generate: Any, engine: Engine, body: dict[str, Any], path: str = "/fivefold/generate"
) -> tuple[int, bytes]:
    """Return status and content of the reply to a request."""
    sent: list[Any] = []

    async def run() -> None:
        async def receive() -> Any:
            if sent:
                await asyncio.Event().wait()
            sent.append(None)
            return {"type": "http.request", "body": json.dumps(body).encode()}

        async def send(message: Any) -> None:
            sent.append(message)

        app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
        await generate({"type": "http", "method": "POST", "path": path, "app": app}, receive, send)

    asyncio.run(run())
    return sent[1]["status"], sent[2]["body"]


def test_vllm_gets_the_tokens_of_the_request_and_the_patches_at_their_places(inside: Callable[[str], Any]) -> None:
    generate, engine = inside("fivefold_generate").Generate(None), Engine()
    asked = request(0, image(1, 2, 2, 3), image(2, 9, 1, 2))
    body = {"token_ids": list(asked.token_ids), "sampling_params": {}}
    with SharedImages(torch.bfloat16, "images").held(asked.images) as shown:
        assert reply_of(generate, engine, {**body, **shown})[0] == 200
    [prompt] = engine.prompts
    assert prompt["prompt_token_ids"] == list(asked.token_ids)
    assert prompt["mm_placeholders"] == {"image": [PlaceholderRange(2, 6), PlaceholderRange(9, 2)]}
    assert prompt["mm_hashes"] == {"image": ["1-2x3", "2-1x2"]}
    assert "cache_salt" not in prompt
    for seen, meant in zip(prompt["mm_kwargs"]["image"], asked.images, strict=True):
        # The memory is the server's as long as it has the tensor.
        torch.testing.assert_close(seen["pixel_values"], torch.from_numpy(meant.patches_PC).bfloat16(), rtol=0, atol=0)
        assert seen["image_grid_thw"].tolist() == [1, meant.rows * MERGE, meant.columns * MERGE]


def test_no_prompt_with_images_begins_on_what_other_weights_have_cached(inside: Callable[[str], Any]) -> None:
    generate, engine = inside("fivefold_generate").Generate(None), Engine()
    generate._version = 4
    with SharedImages(torch.float32, "images").held([image(1, 0, 1, 1)]) as shown:
        reply_of(generate, engine, {"token_ids": [IMAGE], "sampling_params": {}, **shown})
    assert engine.prompts[0]["cache_salt"] == "weights 4"


def test_a_server_that_completes_other_tokens_than_the_requests_is_an_error(inside: Callable[[str], Any]) -> None:
    generate, body = inside("fivefold_generate").Generate(None), {"token_ids": [5, IMAGE], "sampling_params": {}}
    with SharedImages(torch.float32, "images").held([image(1, 1, 1, 1)]) as shown:
        status, text = reply_of(generate, Engine(IMAGE), {**body, **shown})
    assert status == 500
    assert b"vLLM made 3 tokens of a prompt with images that has 2" in text
    assert reply_of(generate, Engine(IMAGE), body)[0] == 200  # nothing is compared of texts


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3, 3)
        self.register_buffer("table", torch.arange(5.0), persistent=False)


class Model(nn.Module):
    """A model as vLLM's: a tower, a language model, and buffers that no module lists."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.language_model = Tower(), nn.Linear(3, 3)
        self.deepstack_input_embeds = [torch.zeros(2, 3)]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            own = name.removeprefix("model.")
            self.get_parameter(own).data.copy_(tensor)
            loaded.add(own)
        return loaded

    def lose(self) -> None:
        for tensor in (*self.parameters(), *self.buffers(), *self.deepstack_input_embeds):
            tensor.data.fill_(float("nan"))


def test_the_tower_comes_from_files_and_survives_sleep(
    inside: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    reload: Any = sys.modules["vllm.model_executor.model_loader.reload"]
    reload.initialize_layerwise_reload = calls.append
    reload.finalize_layerwise_reload = lambda model, config: calls.append(config)
    tower, draft = inside("fivefold_tower"), inside("fivefold_draft")
    model = Model()
    runner = SimpleNamespace(get_model=lambda: model, model_config="the model's config")
    weights = {"model.visual.proj.weight": torch.randn(3, 3), "model.visual.proj.bias": torch.randn(3)}
    save_file(weights, tmp_path / "a.safetensors")
    file = str(tmp_path / "a.safetensors")
    tower.load_tower(runner, {file: list(weights)})
    assert calls == [model.visual, "the model's config"]
    with pytest.raises(RuntimeError, match=r"Model got no weights for visual\.proj\.bias and 0 more parameters"):
        tower.load_tower(runner, {file: ["model.visual.proj.weight"]})
    with pytest.raises(RuntimeError, match="Linear has no tower that sees images"):
        tower.load_tower(SimpleNamespace(get_model=lambda: model.language_model), {})

    worker = SimpleNamespace(
        model_runner=runner, sleep=lambda level: model.lose(), wake_up=lambda tags: calls.append(tags)
    )
    draft.keep_asleep(worker, tower.tower_tensors)
    draft.keep_asleep(worker, tower.features)
    others = [torch.ones(2)]
    draft.keep_asleep(worker, lambda runner: others)  # what drafts tokens is kept as well
    for _ in range(2):
        worker.sleep(2)
        others[0].fill_(0.0)
        worker.wake_up(["weights"])
        torch.testing.assert_close(model.visual.proj.weight.data, weights["model.visual.proj.weight"])
        torch.testing.assert_close(model.visual.proj.bias.data, weights["model.visual.proj.bias"])
        torch.testing.assert_close(model.visual.table, torch.arange(5.0))
        assert not model.deepstack_input_embeds[0].any()
        assert others[0].tolist() == [1.0, 1.0]
        assert model.language_model.weight.isnan().all()  # the trainer sends it
