"""Weights through the package mbridge: the same bits as through Fivefold's own mappings, on any layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron_cases import Case
from safetensors.torch import load_file
from worker_pool import Workers

from fivefold.bridge.bridge import Bridge
from fivefold.config.schema.engine import OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.families.read import find_shape
from fivefold.mcore import mbridge
from fivefold.weights.stream import unstacked
from tests.rows import long

pytest.importorskip("mbridge")

BY_MBRIDGE = MegatronConfig(bridge_type="mbridge")
CASES = [
    ("megatron:d1", ("qwen2", "llama", "qwen3", "mixtral")),  # in this order: tied and untied output layers
    ("megatron:t2", ("qwen2",)),
    ("megatron:(attn:t2|ffn:e2)", ("qwen2_moe",)),
    *long(("megatron:(attn:d2t2|ffn:t2e2)", ("qwen2_moe", "glm4_moe"))),
    *long(("megatron:(attn:t2p2v2|ffn:e2)", ("qwen3_moe", "glm4_moe"))),
]


def names_that_differ(case: Case, folders: list[Path]) -> list[str]:
    """In a worker: load models with mbridge; return what it, or Fivefold's bridge, exports otherwise than the files."""
    differ = []
    for folder in folders:
        files = load_file(folder / "model.safetensors")
        engine = case.engine(folder, OptimizerConfig())
        assert type(engine._bridge) is mbridge.MBridge
        for export in (
            engine.export_weights(),
            unstacked(Bridge(engine.shape).export(engine.parameters.tensors, engine._shards)),
        ):
            exported = {name: tensor.clone() for name, tensor in export}
            assert exported.keys() == files.keys()
            differ += [name for name, tensor in files.items() if not torch.equal(tensor, exported[name])]
        outlines = dict(engine.export_weights(frozenset()))
        assert {tensor.device.type for tensor in outlines.values()} == {"meta"}
    return differ


@pytest.mark.parametrize(("layout", "names"), CASES)
def test_mbridge_loads_and_exports_the_weights_of_the_files(
    workers: Workers, models: Path, layout: str, names: tuple[str, ...]
) -> None:
    case = Case(layout, BY_MBRIDGE)
    folders = [models / name for name in names]
    assert workers(case.world_size).run(names_that_differ, case, folders) == [[]] * case.world_size


def test_megatron_bridge_says_what_it_lacks(workers: Workers, models: Path) -> None:
    """The package needs TransformerEngine, which CPU machines do not have."""
    case = Case("megatron:d1", MegatronConfig(bridge_type="megatron-bridge"))
    (message,) = workers(1).run(error_of, case, models / "qwen2", False)
    assert message.startswith("bridge_type=megatron-bridge loads weights with the package megatron-bridge, which ")
    assert "is not installed here" in message or "cannot be imported without" in message
    (heads,) = workers(1).run(error_of, case, models / "qwen2", True)
    assert heads == "bridge_type=megatron-bridge has no value heads: set bridge_type to fivefold"


def error_of(case: Case, folder: Path, value_head: bool) -> str:
    """In a worker: return the error of building an engine."""
    with pytest.raises(ValueError, match=r".") as caught:
        case.engine(folder, value_head=value_head)
    return str(caught.value)


def error_without_loading(case: Case, folder: Path) -> str:
    """In a worker: return the error where mbridge loads nothing."""
    from mbridge.core.bridge import Bridge as TheirBridge

    loads = TheirBridge.load_weights
    TheirBridge.load_weights = lambda *_: None
    try:
        return error_of(case, folder, False)
    finally:
        TheirBridge.load_weights = loads


def test_what_mbridge_cannot_do_is_an_error(
    workers: Workers, models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case, run = Case("megatron:d1", BY_MBRIDGE), workers(1)
    (heads,) = run.run(error_of, case, models / "qwen2", True)
    assert heads == "bridge_type=mbridge has no value heads: set bridge_type to fivefold"
    # Qwen3 with experts in some of its layers only.
    (unknown,) = run.run(error_of, case, models / "qwen3_moe_mixed", False)
    assert "mbridge does not know all parameters" in unknown
    (unfilled,) = run.run(error_without_loading, case, models / "qwen2")
    assert unfilled.startswith("mbridge has left embedding.word_embeddings.weight, decoder.layers.0.")
    monkeypatch.setattr(mbridge, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"package mbridge, which is not installed here: run pip install 'fivefold"):
        mbridge.MBridge(find_shape("Qwen3-8B"), tmp_path, torch.bfloat16)
