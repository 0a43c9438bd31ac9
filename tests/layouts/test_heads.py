"""A head that predicts no log-probs trains on every kind of layout: the engine only scatters what heads predict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import hf_reference
import pytest
import torch
from compare import assert_close
from hf_reference import Tensors
from megatron_cases import Case, whole
from ragged import uneven_batch
from worker_pool import Workers

from fivefold.algorithms.loss import LossInputs
from fivefold.config.schema import OptimizerConfig
from fivefold.engine.heads import HeadOptions, Predictions
from fivefold.types import Batch, Totals

LAYOUTS = ("megatron:d1", "megatron:(attn:c2d2|ffn:t2e2)", "megatron:(attn:p2t2c2|ffn:e4)", "megatron:p2v2")


class ValueHead:
    """Predicts a value for each token: the sum of its hidden state's channels, weighted by a fixed wave."""

    def predict(
        self, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor, options: HeadOptions
    ) -> Predictions:
        values_N = (hidden_NH.float() * wave(hidden_NH.shape[1])).sum(-1)
        # All tensor-parallel ranks see the whole hidden state, and its gradient is summed over them.
        share = torch.distributed.get_world_size(_tensor_parallel_group())
        return {"values": values_N / share + (values_N * (1 - 1 / share)).detach(), "targets": targets_N.float()}


def _tensor_parallel_group() -> torch.distributed.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def wave(n: int) -> torch.Tensor:
    return torch.arange(n).float().sin()


@dataclass(frozen=True)
class ValueLoss:
    """Half the squared difference between values and a tenth of the tokens' ids, averaged over trained tokens."""

    temperature: float = 1.0
    entropy_gradient: bool = False

    def normalizer(self, totals: Totals) -> float:
        return float(totals.n_trained_tokens)

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        values_T, targets_T = inputs.predictions["values"], inputs.predictions["targets"]
        assert not targets_T.requires_grad, "the head gives the targets no gradient"
        return (0.5 * (values_T - targets_T / 10).square() * inputs.mask_T).sum(), {}


def engine_gradient(case: Case, folder: Path, batch: Batch) -> tuple[float, Tensors]:
    engine = case.engine(folder, OptimizerConfig())
    engine.head = ValueHead()
    loss = engine.forward_backward_of(batch, ValueLoss())["loss"]
    return loss, whole(engine.gradients())


def hugging_face_gradient(folder: Path, batch: Batch, scratch: Path) -> tuple[float, Tensors]:
    model = hf_reference.load_model(folder)
    total = torch.zeros(())
    for tokens_L, mask_L in zip(batch.split(batch.tokens_T), batch.split(batch.mask_T), strict=True):
        hidden_LH = model.model(tokens_L[None]).last_hidden_state[0]
        values_L = (hidden_LH[:-1] * wave(hidden_LH.shape[1])).sum(-1)
        total = total + (0.5 * (values_L - tokens_L[1:] / 10).square() * mask_L[1:]).sum()
    loss = total / batch.mask_T.sum()
    loss.backward()
    return float(loss), hf_reference.gradients_as_in_files(model, scratch)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_value_head_has_hugging_faces_gradient(workers: Workers, models: Path, tmp_path: Path, layout: str) -> None:
    batch, case, folder = uneven_batch(), Case(layout), models / "qwen3_moe"
    ((want_loss, want),) = workers(1).run(hugging_face_gradient, folder, batch, tmp_path)
    results = workers(case.world_size).run(engine_gradient, case, folder, batch)
    assert {loss for loss, _ in results} == {results[0][0]}
    assert results[0][0] == pytest.approx(want_loss, rel=1e-4)
    assert_close(results[0][1], want, 1e-4)
