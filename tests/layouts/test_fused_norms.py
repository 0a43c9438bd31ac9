"""Layers whose norms are part of the linear layers behind them, as TransformerEngine builds them (`kernels=te`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_cases
import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from hf_reference import Reference
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_cases import Case
from ragged import uneven_batch
from safetensors.torch import load_file
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.config.schema.engine import OptimizerConfig
from fivefold.mcore import build
from fivefold.mcore.specs import TorchSpecProvider

TOLERANCE = 1e-4
CASES = [("megatron:t2", "qwen2"), ("megatron:(attn:t2|ffn:e2)", "qwen3_moe_mixed")]
FUSED = {"qwen2": 8, "qwen3_moe_mixed": 6}
"""A norm before the attention of each of four layers, and one before each dense MLP."""


class NormLinear(ColumnParallelLinear):
    """Stands in for TransformerEngine's linear layer with a norm before it."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: torch.Tensor, **options: Any) -> Any:
        weight = self.layer_norm_weight
        return super().forward(F.rms_norm(input_, weight.shape, weight, self.config.layernorm_epsilon), **options)


class FusedProvider(TorchSpecProvider):
    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:  # type: ignore[override]
        return NormLinear


def fused(function: Callable[..., Any], case: Case, *arguments: Any) -> Any:
    """In a worker: call a function whose engine is built of layers with fused norms."""
    with mock.patch.object(build, "spec_provider", return_value=FusedProvider()):
        return function(case, *arguments)


def names_and_differences(case: Case, folder: Path) -> tuple[list[str], list[str], int]:
    """In a worker: return the names of the weights, those exported unlike the files, and the number of fused norms."""
    files = load_file(folder / "model.safetensors")
    engine = case.engine(folder, OptimizerConfig())
    differ = [name for name, tensor in engine.export_weights() if not torch.equal(tensor, files[name])]
    return sorted(engine.parameters.tensors), differ, len(engine.modules_of(NormLinear))


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_weights_have_the_same_names_and_bits_as_with_norms_of_their_own(
    workers: Workers, models: Path, layout: str, model: str
) -> None:
    case, run = Case(layout), workers(Case(layout).world_size).run
    plain = run(names_and_differences, case, models / model)
    answers = run(fused, names_and_differences, case, models / model)
    for (names, _, none), answer in zip(plain, answers, strict=True):
        assert none == 0
        assert answer == (names, [], FUSED[model])


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_predictions_and_gradients_are_those_of_hugging_face_with_fused_norms(
    workers: Workers, models: Path, reference: Callable[[str], Reference], layout: str, model: str
) -> None:
    batch, case = uneven_batch(), Case(layout)
    want_logprobs, _, want_loss, want_gradients = reference(model)
    results = workers(case.world_size).run(fused, megatron_cases.gradients, case, models / model, batch, SFTLoss())
    for result in results:
        torch.testing.assert_close(result.logprobs_T, want_logprobs * batch.mask_T, rtol=TOLERANCE, atol=TOLERANCE)
        assert result.loss == pytest.approx(want_loss, rel=TOLERANCE)
    assert_close(results[0].gradients, want_gradients, TOLERANCE)


def test_kernels_te_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    build.check_transformer_engine("fivefold")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"kernels=te has kernels for NVIDIA GPUs, and there is none here"):
        build.check_transformer_engine("te")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build, "IS_0_16", False)
    with pytest.raises(ValueError, match=r"kernels=te is tried with Megatron-Core 0\.16, and .* is installed"):
        build.check_transformer_engine("te")
    monkeypatch.setattr(build, "IS_0_16", True)
    monkeypatch.setattr(build, "version", mock.Mock(side_effect=build.PackageNotFoundError))
    with pytest.raises(ValueError, match=r"is not installed here: run pip install .*'transformer-engine\[pytorch"):
        build.check_transformer_engine("te")
    monkeypatch.setattr(build, "version", lambda _: "2.20.2")
    with pytest.raises(ValueError, match=r"kernels=te needs TransformerEngine .*, and 2\.20\.2 is installed"):
        build.check_transformer_engine("te")
    monkeypatch.setattr(build, "version", lambda _: "2.11.0")
    build.check_transformer_engine("te")
