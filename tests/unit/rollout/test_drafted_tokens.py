"""Speculative decoding: what servers are told, and the weights with which they draft tokens."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fivefold.bridge.kept import draft_files
from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.config.schema.rollout import SpeculativeConfig
from fivefold.rollout.contract import complete
from fivefold.rollout.engines import DIALECTS
from fivefold.rollout.protocol import ServerCounts
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers import vllm_dialect
from fivefold.rollout.servers.command import check_command, server_command
from fivefold.rollout.servers.sglang_weights import SGLangWeights
from fivefold.weights.device_buckets import DeviceBucket
from tests.unit.rollout.conftest import spec_of
from tests.unit.rollout.fake_server import Log, write_python
from tests.unit.rollout.served import Served, requests_of, sampling, start

MTP, NGRAM = SpeculativeConfig(method="mtp", n_tokens=3), SpeculativeConfig(method="ngram", n_tokens=2)


def flags_of(spec: ReplicaSpec) -> dict[str, str]:
    """Return the values of the flags of a replica's command line."""
    words = server_command(DIALECTS[spec.backend], spec, 81)
    return {word: words[index + 1] for index, word in enumerate(words[:-1]) if word.startswith("--")}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (MTP, {"method": "mtp", "num_speculative_tokens": 3}),
        (NGRAM, {"method": "ngram", "num_speculative_tokens": 2}),
    ],
)
def test_vllm_is_told_how_to_draft_and_counts_what_it_accepts(
    config: SpeculativeConfig, wanted: dict[str, Any]
) -> None:
    plain = spec_of("vllm", Path("/models/a"), python="/opt/python")
    flags = flags_of(spec_of("vllm", Path("/models/a"), python="/opt/python", speculative=config))
    assert json.loads(flags["--speculative-config"]) == wanted
    assert "--disable-log-stats" not in flags
    assert "--disable-log-stats" in flags_of(plain)
    playing = replace(plain, environment=EnvironmentConfig(game="a.py:A", max_turns=2))
    assert "--disable-log-stats" not in flags_of(playing)
    assert "--speculative-config" not in flags_of(plain)


@pytest.mark.parametrize(("config", "wanted"), [(MTP, "1"), (NGRAM, "0"), (None, "1")])
def test_vllm_drafts_by_ngrams_with_its_first_model_runner(
    monkeypatch: pytest.MonkeyPatch, config: SpeculativeConfig | None, wanted: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    spec = spec_of("vllm", Path("/models/a"), speculative=config)
    assert DIALECTS["vllm"].environment(spec)["VLLM_USE_V2_MODEL_RUNNER"] == wanted


def test_sglang_reads_what_drafts_from_the_files_and_keeps_it_asleep() -> None:
    spec = spec_of("sglang", Path("/models/a"), python="/opt/python", speculative=MTP)
    flags = flags_of(spec)
    assert {name: value for name, value in flags.items() if "speculative" in name} == {
        "--speculative-algorithm": "NEXTN",
        "--speculative-draft-model-path": "/models/a",
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
        "--speculative-draft-load-format": "auto",
    }
    assert flags["--load-format"] == "dummy"
    assert "--enable-draft-weights-cpu-backup" in server_command(DIALECTS["sglang"], spec, 81)
    awake = spec_of("sglang", Path("/models/a"), python="/opt/python", speculative=MTP, can_sleep=False)
    assert "--enable-draft-weights-cpu-backup" not in server_command(DIALECTS["sglang"], awake, 81)


@pytest.mark.parametrize(
    ("backend", "argument"),
    [
        ("vllm", "--speculative-config={}"),
        ("vllm", "-sc"),
        ("sglang", "--speculative-algorithm"),
        ("vllm", "--spec-method"),
        ("vllm", "--disable-log-stats"),
    ],
)
def test_server_args_do_not_speculate(backend: str, argument: str, tmp_path: Path) -> None:
    spec = spec_of(backend, Path("/models/a"), python=write_python(tmp_path), arguments=(argument,))
    with pytest.raises(ValueError, match=rf"server_args has {argument.split('=')[0]}, which follows from other keys"):
        check_command(DIALECTS[backend], spec)


@pytest.mark.parametrize("drafts", [False, True])
def test_sglang_gives_buckets_to_the_model_and_not_to_what_drafts(
    monkeypatch: pytest.MonkeyPatch, drafts: bool
) -> None:
    posted: list[Any] = []
    http = SimpleNamespace(
        post=lambda path, body, limit_s: posted.append(body),
        send=lambda *arguments: b"",
        get=lambda path, limit_s: {"weight_version": "4"},
    )
    monkeypatch.setattr("fivefold.rollout.servers.sglang_weights._serialized", lambda bucket, uuid: "bucket")
    bucket = DeviceBucket(("a",), "bfloat16", ((2,),), handles={"uuid": ()}, checksum=None)  # type: ignore[arg-type]
    SGLangWeights(http, ["uuid"], drafts=drafts).load(iter([bucket]), 4, is_paused=False)  # type: ignore[arg-type]
    assert posted[0].get("disable_draft_model", False) == drafts


@pytest.fixture
def drafting(model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """A folder of GLM-4.5 with a layer for multi-token prediction, in a file of its own."""
    folder = Path(shutil.copytree(model_folder("glm4_moe"), tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    n_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    further = {
        f"model.layers.{n_layers}.{name}": torch.full((4,), float(index))
        for index, name in enumerate(
            [
                "eh_proj.weight",
                "enorm.weight",
                "shared_head.norm.weight",
                "shared_head.head.weight",
                "embed_tokens.weight",
            ]
        )
    }
    save_file(weights, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file(further, folder / "model-00002-of-00002.safetensors", {"format": "pt"})
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + (name in further)}-of-00002.safetensors" for name in [*weights, *further]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def drafting_names(folder: Path) -> list[str]:
    n_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    return [f"model.layers.{n_layers}.{name}.weight" for name in ("eh_proj", "enorm", "shared_head.norm")]


def test_what_drafts_is_found_without_copies_of_the_embedding_and_the_output_layer(
    drafting: Path, model_folder: Callable[..., Path]
) -> None:
    files = draft_files(drafting)
    assert list(files) == [str(drafting / "model-00002-of-00002.safetensors")]
    assert sorted(*files.values()) == drafting_names(drafting)
    with pytest.raises(ValueError, match=r"has no weights for multi-token prediction .* drop rollout\.speculative"):
        draft_files(model_folder("glm4_moe"))
    with pytest.raises(ValueError, match=r"has no weights for multi-token prediction"):
        draft_files(model_folder("qwen3_moe"))


@pytest.mark.parametrize(("config", "loads_weights", "n_loads"), [(MTP, False, 1), (MTP, True, 0), (NGRAM, False, 0)])
def test_vllm_gets_what_drafts_once_at_its_start(
    drafting: Path, tmp_path: Path, config: SpeculativeConfig, loads_weights: bool, n_loads: int
) -> None:
    python = write_python(tmp_path / "server")
    spec = spec_of("vllm", drafting, python=python, speculative=config, load_weights=loads_weights)
    engine = start(spec)
    log = Log(tmp_path / "server")
    loads = log.rows("fivefold_load_draft")
    assert len(loads) == n_loads
    if n_loads:
        assert sorted(*loads[0]["files"].values()) == drafting_names(drafting)
        served = Served(spec, engine, tmp_path / "server", load_file(drafting / "model-00001-of-00002.safetensors"))
        served.update(1)
        engine.sleep()
        engine.wake()
        served.update(2)
        for n in (4, 2):
            complete(engine, requests_of(n), sampling())
            assert engine.take_counts() == ServerCounts(3 * n, 2 * n, 20 * n, 16 * n)
        assert engine.take_counts() == ServerCounts()
        assert len(log.rows("fivefold_load_draft")) == 1
    engine.close()


def test_sglang_counts_what_its_cache_had_of_prompts(drafting: Path, tmp_path: Path) -> None:
    python = write_python(tmp_path / "server")
    playing = EnvironmentConfig(game="a.py:A", max_turns=2)
    engine = start(spec_of("sglang", drafting, python=python, environment=playing, load_weights=True))
    for n in (4, 2):
        complete(engine, requests_of(n), sampling())
        assert engine.take_counts() == ServerCounts(prompt=20 * n, cached=16 * n)
    engine.close()


class Draft(nn.Module):
    """A model that drafts tokens as vLLM's do: it has the target's embedding."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = embedding
        self.proj = nn.Linear(3, 3, bias=False)
        self.norm = nn.LayerNorm(3, bias=False)
        self.register_buffer("table", torch.arange(5.0))
        self.absorbed = self.proj.weight.detach().T.contiguous()
        self.kv_cache = torch.zeros(1 << 40, device="meta")  # vLLM's, and not there while weights wake

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            own = name.removeprefix("mtp.")
            self.get_parameter(own).data.copy_(tensor)
            loaded.add(own)
        self.absorbed.copy_(self.proj.weight.T)
        return loaded


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(4, 3)


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module inside vLLM, over a stand-in for vLLM's functions that reload layers."""
    calls: list[str] = []
    reload = ModuleType("vllm.model_executor.model_loader.reload")
    reload.initialize_layerwise_reload = lambda model: calls.append("begin")  # type: ignore[attr-defined]
    reload.finalize_layerwise_reload = lambda model, config: calls.append(config)  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, reload.__name__, reload)
    monkeypatch.syspath_prepend(vllm_dialect.INSIDE)
    module = __import__("fivefold_draft")
    monkeypatch.setattr(module, "calls", calls, raising=False)
    return module


def runner_of(holder: str) -> Any:
    """Return a model runner like one of vLLM's two, which hold the draft model under different names."""
    target = Target()
    draft = Draft(target.embed_tokens)
    held: Any = SimpleNamespace(model=draft if holder == "speculator" else SimpleNamespace(runnable=draft))
    return SimpleNamespace(
        get_model=lambda: target,
        speculative_config=SimpleNamespace(draft_model_config="config of the draft"),
        **{"speculator": None, holder: held},
    )


@pytest.mark.parametrize("holder", ["speculator", "drafter"])
def test_the_code_inside_vllm_loads_the_draft_model_from_files(inside: Any, holder: str, tmp_path: Path) -> None:
    runner = runner_of(holder)
    draft, embedding = inside.draft_of(runner), runner.get_model().embed_tokens.weight.clone()
    weights = {
        "mtp.proj.weight": torch.randn(3, 3),
        "mtp.norm.weight": torch.randn(3),
        "model.norm.weight": torch.ones(1),
    }
    save_file(weights, tmp_path / "a.safetensors")
    inside.load_draft(runner, {str(tmp_path / "a.safetensors"): ["mtp.proj.weight", "mtp.norm.weight"]})
    torch.testing.assert_close(draft.proj.weight.data, weights["mtp.proj.weight"])
    torch.testing.assert_close(draft.norm.weight.data, weights["mtp.norm.weight"])
    torch.testing.assert_close(draft.embed_tokens.weight.data, embedding)
    assert inside.calls == ["begin", "config of the draft"]
    with pytest.raises(
        RuntimeError, match=r"Draft got no weights for norm\.weight and 0 more parameters from .*a\.safe"
    ):
        inside.load_draft(runner, {str(tmp_path / "a.safetensors"): ["mtp.proj.weight"]})


def test_a_pipeline_stage_without_a_draft_model_loads_and_keeps_nothing(inside: Any) -> None:
    runner = SimpleNamespace(get_model=Target)
    inside.load_draft(runner, {"/nowhere": ["a"]})
    assert inside.own_tensors(runner) == []


def test_the_draft_model_survives_sleep_and_shares_what_is_the_targets(inside: Any) -> None:
    runner, slept = runner_of("speculator"), []

    class Worker:
        model_runner = runner

        def sleep(self, level: int = 1) -> None:
            slept.append(level)
            for model in (runner.get_model(), inside.draft_of(runner)):
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.data.fill_(float("nan"))
            inside.draft_of(runner).absorbed.fill_(float("nan"))

        def wake_up(self, tags: list[str] | None = None) -> None:
            slept.append(str(tags))

    worker, draft = Worker(), inside.draft_of(runner)
    inside.keep_asleep(worker, inside.own_tensors)
    inside.keep_asleep(worker, inside.own_tensors)  # a second time changes nothing
    assert len(inside.own_tensors(runner)) == 4
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    absorbed = draft.absorbed.clone()
    for _ in range(2):
        worker.sleep(level=2)
        assert draft.proj.weight.isnan().all()
        worker.wake_up(tags=["weights"])
        worker.wake_up(tags=["kv_cache"])
        torch.testing.assert_close(draft.proj.weight.data, before["proj.weight"])
        torch.testing.assert_close(draft.norm.weight.data, before["norm.weight"])
        torch.testing.assert_close(draft.table, before["table"])
        torch.testing.assert_close(draft.absorbed, absorbed)
        assert draft.embed_tokens.weight.isnan().all()  # the trainer sends it
    assert slept == [2, "['weights']", "['kv_cache']"] * 2
