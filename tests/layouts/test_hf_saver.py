"""Every layout saves a model as the same bytes, from all ranks, and a rank that cannot write harms nothing."""

from __future__ import annotations

import hashlib
import json
import resource
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from cases import AnyCase, case_of
from megatron_cases import Case
from safetensors.torch import load_file
from worker_pool import Workers

from fivefold.bridge import hf_saver
from fivefold.bridge.decoder import file_tensors
from fivefold.bridge.hf_reader import HFWeights
from fivefold.bridge.hf_writer import save_hf
from fivefold.bridge.shard_plan import TensorSpec
from fivefold.config.schema.engine import OptimizerConfig
from fivefold.families.read import load_shape
from tests.rows import long

SHARD_BYTES = 30_000
"""Bytes of a weight file, so that the tiny models fill several."""
BLOCK_BYTES = 1000
"""Bytes of a block, so that most pieces have several, and replicas take turns within them."""

FILES = {"float32": "", "bfloat16": "-bf16"}
"""Ends of the names of models."""
CASES = [
    ("qwen2", "megatron:p2t2", "float32"),
    ("qwen2", "fsdp:d3", "float32"),
    ("qwen3_moe_mixed", "megatron:p2v2", "bfloat16"),
    ("qwen3_moe_mixed", "megatron:(attn:d2t2|ffn:t2e2)", "bfloat16"),
    ("qwen2_moe", "megatron:(attn:t2|ffn:t2)", "float32"),
    ("qwen3_5", "megatron:t2", "bfloat16"),
    ("gpt_oss", "megatron:(attn:d2t2|ffn:t2e2)", "bfloat16"),
    ("minimax_m2", "fsdp:d2t2", "bfloat16"),
    ("glm_moe_dsa", "megatron:(attn:d2t2|ffn:t2e2)", "float32"),
    ("qwen3_vl_moe", "megatron:(attn:d2t2|ffn:t2e2)", "bfloat16"),
    *long(
        ("qwen3_vl_moe", "fsdp:d2t2", "float32"),
        ("qwen2", "megatron:d1", "float32"),
        ("qwen2", "megatron:t2", "float32"),
        ("qwen2", "megatron:p2", "float32"),
        ("qwen2", "megatron:d2t2", "float32"),
        ("qwen3_moe_mixed", "megatron:(attn:d2|ffn:e2)", "bfloat16"),
        ("qwen2_moe", "megatron:d1", "float32"),
        ("qwen2_moe", "megatron:(attn:c2t2|ffn:e2d2)", "float32"),
        ("qwen2_moe", "megatron:d1", "bfloat16"),
        ("qwen3_5", "megatron:p2t2", "bfloat16"),
        ("qwen3_5", "fsdp:d3", "bfloat16"),
        ("qwen3_5_moe", "megatron:(attn:t2|ffn:e2)", "float32"),
        ("qwen3_5_moe", "fsdp:d2t2", "float32"),
        ("mistral", "megatron:p2t2", "bfloat16"),
        ("mistral", "fsdp:d2t2", "bfloat16"),
        ("minimax_m2", "megatron:(attn:d2t2|ffn:t2e2)", "bfloat16"),
        ("gpt_oss", "megatron:(attn:p2t2|ffn:e2)", "bfloat16"),
        ("gpt_oss", "fsdp:d2t2", "bfloat16"),
        ("deepseek_v32", "megatron:(attn:p2t2|ffn:e2)", "bfloat16"),
        ("deepseek_v32", "fsdp:d2t2", "bfloat16"),
        ("gemma3_text", "megatron:p2t2", "bfloat16"),
        ("gemma3_text", "fsdp:d2t2", "bfloat16"),
        ("mixtral", "megatron:(attn:d2t2|ffn:t2e2)", "bfloat16"),
        ("mixtral", "fsdp:d2t2", "bfloat16"),
    ),
]


def save(case: AnyCase, model: Path, out: Path, file_limit_of_last: int | None = None) -> str:
    """In a worker: save a model in small blocks. The last rank may have a limit on the size of files.

    Returns:
        The error of this rank, which is empty if there is none.
    """
    is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    # With an optimizer, DDP moves the parameters into buffers of its own.
    engine = case.engine(model, OptimizerConfig())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with patch.object(hf_saver, "BLOCK_BYTES", BLOCK_BYTES):
        try:
            if is_last and file_limit_of_last is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit_of_last, limits[1]))
            engine.save_hf(out, max_shard_bytes=SHARD_BYTES)
        except OSError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ""


def digests(folder: Path) -> dict[str, str]:
    """Return a digest of every file."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def streamed(model: Path, out: Path) -> dict[str, str]:
    """Write the model from the tensors that transformers has saved; return the digests of the files."""
    weights = load_file(model / "model.safetensors")
    order = file_tensors(load_shape(model))
    with HFWeights(model) as stored:  # where experts are in files together, and each is trained for itself
        weights |= {name: stored.read(name) for name in order if name not in weights}
    tensors = {name: TensorSpec.of(weights[name]) for name in order}
    save_hf(out, [(name, weights[name]) for name in order], model, tensors=tensors, max_shard_bytes=SHARD_BYTES)
    return digests(out)


@pytest.mark.parametrize(("name", "layout", "dtype"), CASES)
def test_every_layout_writes_the_bytes_of_a_stream(
    workers: Workers, models: Path, tmp_path: Path, name: str, layout: str, dtype: str
) -> None:
    case, model = case_of(layout, dtype=dtype), models / f"{name}{FILES[dtype]}"
    assert workers(case.world_size).run(save, case, model, tmp_path / "saved") == [""] * case.world_size
    saved = digests(tmp_path / "saved")
    assert len([file for file in saved if file.endswith(".safetensors")]) > 1
    assert saved == streamed(model, tmp_path / "streamed")
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "streamed"}


def test_all_ranks_report_the_rank_that_cannot_write_and_the_earlier_model_stays(
    workers: Workers, models: Path, tmp_path: Path
) -> None:
    case, model, out = Case("megatron:(attn:d2t2|ffn:t2e2)"), models / "qwen3_moe_mixed", tmp_path / "saved"
    earlier = streamed(models / "qwen2", out)
    errors = workers(4).run(save, case, model, out, 20_000)
    for error in errors:
        assert f"the model was not written to {out}: rank 3 on " in error
        assert "File too large" in error
        assert ".safetensors" in error
    assert digests(out) == earlier
    assert list(tmp_path.iterdir()) == [out]
    assert workers(4).run(save, case, model, out) == [""] * 4


def save_without_seeing(case: Case, model: Path, out: Path) -> str:
    """In a worker: save on a node that does not see what rank 0 has made, unless this is rank 0. Returns the error."""
    engine = case.engine(model)
    write = hf_saver._write_own
    sees = torch.distributed.get_rank() == 0

    def write_own(partial: Path, *args: Any) -> int:
        return write(partial if sees else partial / "of another node", *args)

    with patch.object(hf_saver, "_write_own", write_own), pytest.raises(OSError, match="not written") as raised:
        engine.save_hf(out)
    return str(raised.value)


def test_storage_that_is_not_shared_is_an_error(workers: Workers, models: Path, tmp_path: Path) -> None:
    out = tmp_path / "saved"
    errors = workers(2).run(save_without_seeing, Case("megatron:t2"), models / "qwen2", out)
    assert all("rank 1 on " in error and "need storage that they share" in error for error in errors)
    assert list(tmp_path.iterdir()) == []


def peak_growth(case: Case, model: Path, out: Path) -> int:
    """In a worker: return the bytes by which this process grows at most while it saves."""
    engine = case.engine(model)
    engine.save_hf(out)  # imports modules, and makes buffers for the collectives
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak in the status starts anew
    engine.save_hf(out)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 - before


def test_no_rank_holds_the_experts_of_a_layer_of_others(workers: Workers, models: Path, tmp_path: Path) -> None:
    config = json.loads((models / "qwen3_moe" / "config.json").read_text())
    config |= {"hidden_size": 512, "moe_intermediate_size": 1024, "num_hidden_layers": 2}
    bytes_of_layer = 8 * 3 * 512 * 1024 * 4
    (tmp_path / "large").mkdir()
    (tmp_path / "large/config.json").write_text(json.dumps(config))
    case = Case("megatron:d2e2", init_from_scratch=True)
    growths = workers(2).run(peak_growth, case, tmp_path / "large", tmp_path / "saved")
    assert max(growths) < bytes_of_layer / 4
