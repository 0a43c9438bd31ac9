"""Critics and reward models have the values and the gradients of Hugging Face's models, on every layout.

So has a policy that is trained on pairs: the gradient of DPO's coupled loss.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_reference
import numpy as np
import pytest
import torch
from cases import AnyCase, case_of
from compare import assert_close
from hf_reference import Tensors
from megatron_cases import Case, whole
from ragged import uneven_batch
from test_checkpoint import commit
from worker_pool import Workers

from fivefold.algorithms.preferences import BradleyTerry, DirectPreference, Objective, derivatives
from fivefold.algorithms.supervised_losses import COEFFICIENT, LinearLoss
from fivefold.algorithms.value_loss import ValueLoss
from fivefold.batch import Batch, Columns
from fivefold.bridge.audit import check_weights
from fivefold.config.schema.engine import OptimizerConfig
from fivefold.config.schema.preferences import DPOModelConfig
from fivefold.data.preferences import score_columns
from fivefold.data.sft import SFTExample
from fivefold.families.read import load_shape
from tests.rows import long

LAYOUTS = {
    "qwen3_moe": ("megatron:(attn:c2d2|ffn:t2e2)", "fsdp:d2t2"),
    "qwen2": ("megatron:p2",),  # its config ties the embeddings
}
CASES = [
    *((model, layout) for model, layouts in LAYOUTS.items() for layout in layouts),
    *long(("qwen3_moe", "megatron:d1"), ("qwen3_moe", "megatron:(attn:t2p2v2|ffn:e2)")),
    *long(("qwen3_moe", "megatron:(attn:p2t2c2|ffn:e4)")),
    *long(*(("qwen2", layout) for layout in ("megatron:t2", "megatron:d2", "fsdp:d2"))),
]
CLIP = 0.3
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-3)


@dataclass(frozen=True)
class Critic:
    values_T: torch.Tensor
    """0 on every sequence's first token."""
    loss: float
    gradients: Tensors
    weights: Tensors


def batch_of(values_T: torch.Tensor | None = None) -> Batch:
    """Return a batch with old values near those of the critic, on either side of the clip range, and returns."""
    batch = uneven_batch()
    generator = torch.Generator().manual_seed(5)
    old, returns = (torch.randn(batch.n_tokens, generator=generator) for _ in range(2))
    if values_T is None:
        return batch
    return batch.with_fields(values=values_T + CLIP * old, returns=returns)


def hugging_face_model(folder: Path) -> Any:
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32).eval()


def make_critic(folder: Path, critic: Path) -> None:
    """Write a critic on the layers of a language model, with a head that is not 0."""
    model = hugging_face_model(folder)
    generator = torch.Generator().manual_seed(3)
    model.score.weight.data.normal_(std=0.2, generator=generator)
    model.score.bias.data.fill_(0.3)
    model.save_pretrained(critic)


def values_of(model: Any, batch: Batch) -> torch.Tensor:
    """Return the value of the state before each token, which its predecessor's hidden state gives."""
    rows = [model(tokens_L[None]).logits[0, :-1, 0] for tokens_L in batch.split(batch.tokens_T)]
    return torch.cat([torch.cat([torch.zeros(1), row]) for row in rows])


def hugging_face_critic(folder: Path, scratch: Path) -> Critic:
    """In a worker: return values, loss and gradient of Hugging Face's model."""
    model = hugging_face_model(folder)
    values_T = values_of(model, uneven_batch())
    batch = batch_of(values_T.detach())
    old_T, returns_T = batch.fields["values"], batch.fields["returns"]
    clipped_T = torch.minimum(torch.maximum(values_T, old_T - CLIP), old_T + CLIP)
    cost_T = 0.5 * torch.maximum((values_T - returns_T) ** 2, (clipped_T - returns_T) ** 2)
    loss = (cost_T * batch.mask_T).sum() / batch.mask_T.sum()
    loss.backward()
    gradients = hf_reference.gradients_as_in_files(model, scratch)
    return Critic(values_T.detach(), float(loss), gradients, {})


def engine_critic(case: AnyCase, folder: Path, old_T: torch.Tensor, out: Path) -> Critic:
    """In a worker: compute values, loss and gradient, make a step, and save the model and its state."""
    engine = case.engine(folder, OPTIMIZER, value_head=True)
    values_T = engine.values_of(uneven_batch())
    loss = engine.forward_backward_of(batch_of(old_T), ValueLoss(CLIP, "token_mean"))["loss"]
    gradients = whole(engine.gradients())
    engine.optim_step()
    engine.save_hf(out / "hf")
    commit(engine.snapshot(out / "state"), out / "state")
    return Critic(values_T, loss, gradients, whole(engine.export_weights()))


@pytest.fixture(scope="module")
def critics(workers: Workers, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of critics, each by the name of its model."""
    folder = tmp_path_factory.mktemp("critics")
    for name in LAYOUTS:
        workers(1).run(make_critic, models / name, folder / name)
    return folder


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_values_and_gradients_are_those_of_hugging_face(
    workers: Workers, critics: Path, tmp_path: Path, name: str, layout: str
) -> None:
    case, folder = case_of(layout), critics / name
    check_weights(folder, load_shape(folder).as_critic())
    (want,) = workers(1).run(hugging_face_critic, folder, tmp_path / "gradients")
    results = workers(case.world_size).run(engine_critic, case, folder, want.values_T, tmp_path)
    for result in results:
        mask_T = uneven_batch().mask_T
        torch.testing.assert_close(result.values_T, want.values_T * mask_T, rtol=1e-4, atol=1e-5)
        assert result.loss == pytest.approx(want.loss, rel=1e-4)
    assert_close(results[0].gradients, want.gradients, 1e-4)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"][0].endswith("TokenClassification")
    (reloaded,) = workers(1).run(hugging_face_critic, tmp_path / "hf", tmp_path / "again")
    (values_T,) = workers(1).run(loaded_values, Case("megatron:d1"), folder, tmp_path / "state")
    torch.testing.assert_close(values_T, reloaded.values_T * mask_T, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(values_T, results[0].values_T)


def loaded_values(case: AnyCase, folder: Path, state: Path) -> torch.Tensor:
    """In a worker: load another layout's training state, and return the values."""
    engine = case.engine(folder, OPTIMIZER, value_head=True)
    engine.load(state)
    return engine.values_of(uneven_batch())


def new_critic(case: AnyCase, folder: Path) -> tuple[torch.Tensor, Tensors]:
    """In a worker: make a critic of a language model; return its values, and its weights after a step."""
    engine = case.engine(folder, OPTIMIZER, value_head=True)
    values_T = engine.values_of(uneven_batch())
    engine.forward_backward_of(batch_of(values_T), ValueLoss(None, "sequence_mean"))
    engine.optim_step()
    with pytest.raises(ValueError, match="predicts values"):
        engine.logprobs_of(uneven_batch(), temperature=1.0)
    return values_T, whole(engine.export_weights())


@pytest.mark.parametrize("layout", ["megatron:d1", "megatron:(attn:t2p2|ffn:e2)", "fsdp:d2"])
def test_a_language_model_becomes_a_critic_whose_values_begin_at_zero(
    workers: Workers, models: Path, layout: str
) -> None:
    case = case_of(layout)
    check_weights(models / "qwen3_moe", load_shape(models / "qwen3_moe").as_critic())
    results = workers(case.world_size).run(new_critic, case, models / "qwen3_moe")
    assert all(not values_T.any() for values_T, _ in results)
    assert results[0][1]["score.weight"].any()
    assert "lm_head.weight" not in results[0][1]


PAIRED = (
    *("megatron:(attn:t2p2|ffn:e2)", "fsdp:c2"),
    *long("megatron:(attn:c2d2|ffn:t2e2)", "megatron:d1", "fsdp:c2t2"),
)
ANSWERS = (7, 12, 22, 5, 31, 9, 17, 3)
"""Tokens of the sequences of four pairs."""
BETA, CENTER = 0.3, 0.05


@dataclass(frozen=True)
class Compared:
    """What a pass over pairs gives."""

    scores_N: torch.Tensor
    loss: float
    gradients: Tensors
    scores_after_N: torch.Tensor | None = None
    """Scores after an optimizer step."""


def reference_scores() -> torch.Tensor:
    """Return log-probs of whole answers under a reference, float64 [N]."""
    return -4 * torch.rand(len(ANSWERS), generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def scored_batch() -> Batch:
    """Return the sequences of the pairs as a reward model gets them."""
    batch = uneven_batch(lengths=ANSWERS)
    rows = [tuple(tokens.tolist()) for tokens in batch.split(batch.tokens_T)]
    columns: Columns = score_columns([SFTExample(row[:1], row[1:]) for row in rows])
    tokens_T, mask_T = (torch.from_numpy(columns.values[name]) for name in ("tokens", "mask"))
    return Batch(tuple(columns.lengths_N.tolist()), tokens_T.long(), mask_T.float())


def hugging_face_dpo(folder: Path, scratch: Path) -> Compared:
    """In a worker: return the loss of DPO and its gradient as its paper writes them, with both answers in one graph."""
    batch, reference_N = uneven_batch(lengths=ANSWERS), reference_scores()
    model = hf_reference.load_model(folder)
    sums = [
        (hf_reference.predict(model, sequence.tokens_T, 1.0)[0] * sequence.mask_T).sum().double()
        for sequence in (batch.select([i]) for i in range(len(batch)))
    ]
    ratios_N = torch.stack(sums) - reference_N
    loss = -torch.log(1 / (1 + torch.exp(-BETA * (ratios_N[0::2] - ratios_N[1::2])))).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return Compared(ratios_N.detach(), float(loss), hf_reference.gradients_as_in_files(model, scratch))


def scores_of_reward_model(model: Any) -> torch.Tensor:
    batch = uneven_batch(lengths=ANSWERS)
    return torch.stack([model(tokens_L[None]).logits[0, 0] for tokens_L in batch.split(batch.tokens_T)])


def hugging_face_reward_model(folder: Path, scratch: Path) -> Compared:
    """In a worker: return scores, loss and gradient of Hugging Face's model for sequence classification."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.config.num_labels == 1
    scores_N = scores_of_reward_model(model)
    chosen, rejected = scores_N[0::2], scores_N[1::2]
    pairs = torch.log(1 + torch.exp(rejected - chosen)) + CENTER * (chosen + rejected) ** 2
    pairs.mean().backward()  # type: ignore[no-untyped-call]
    gradients = hf_reference.gradients_as_in_files(model, scratch)
    return Compared(scores_N.detach(), float(pairs.mean()), gradients)


def make_reward_model(folder: Path, target: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    model.score.weight.data.normal_(std=0.2, generator=torch.Generator().manual_seed(3))
    model.save_pretrained(target)


def sums_of(batch: Batch, values_T: torch.Tensor) -> torch.Tensor:
    return torch.stack([values.double().sum() for values in batch.split(values_T)])


def weighted(batch: Batch, objective: Objective, scores_N: torch.Tensor) -> tuple[Batch, float]:
    """Return the batch with the coefficient of each sequence, and the value of the objective."""
    trained_N = sums_of(batch, batch.mask_T).numpy().astype(np.int64)
    coefficients_N, metrics = derivatives(objective, scores_N.numpy(), trained_N)
    spread_T = torch.from_numpy(np.repeat(coefficients_N, batch.lengths))
    return batch.with_fields(**{COEFFICIENT: spread_T}), metrics["loss"]


def engine_dpo(case: AnyCase, folder: Path) -> Compared:
    """In a worker: compute loss and gradient of DPO in two passes."""
    engine = case.engine(folder, OPTIMIZER)
    batch = uneven_batch(lengths=ANSWERS)
    ratios_N = sums_of(batch, engine.logprobs_of(batch, temperature=1.0)[0]) - reference_scores()
    objective = DirectPreference.of(DPOModelConfig(path="m", beta=BETA))
    batch, loss = weighted(batch, objective, ratios_N)
    engine.forward_backward_of(batch, LinearLoss("logprobs"))
    return Compared(ratios_N, loss, whole(engine.gradients()))


def engine_reward_model(case: AnyCase, folder: Path, out: Path) -> Compared:
    """In a worker: compute scores, loss and gradient of a reward model in two passes; make a step, save the model."""
    engine = case.engine(folder, OPTIMIZER, value_head=True, value_bias=False)
    batch = scored_batch()
    scores_N = sums_of(batch, engine.values_of(batch))
    weighted_batch, loss = weighted(batch, BradleyTerry(CENTER), scores_N)
    engine.forward_backward_of(weighted_batch, LinearLoss("values"))
    gradients = whole(engine.gradients())
    engine.optim_step()
    engine.save_hf(out)
    return Compared(scores_N, loss, gradients, sums_of(batch, engine.values_of(batch)))


@pytest.mark.parametrize("layout", PAIRED)
def test_dpo_in_two_passes_has_the_gradient_of_the_coupled_loss(
    workers: Workers, models: Path, tmp_path: Path, layout: str
) -> None:
    case, folder = case_of(layout), models / "qwen3_moe"
    (want,) = workers(1).run(hugging_face_dpo, folder, tmp_path)
    results = workers(case.world_size).run(engine_dpo, case, folder)
    for result in results:
        torch.testing.assert_close(result.scores_N, want.scores_N, rtol=1e-4, atol=1e-4)
        assert result.loss == pytest.approx(want.loss, rel=1e-4)
    assert_close(results[0].gradients, want.gradients, 3e-4)


@pytest.mark.parametrize("layout", PAIRED)
def test_a_reward_model_is_one_of_transformers_for_sequence_classification(
    workers: Workers, models: Path, tmp_path: Path, layout: str
) -> None:
    case, folder, saved = case_of(layout), tmp_path / "model", tmp_path / "saved"
    workers(1).run(make_reward_model, models / "qwen3_moe", folder)
    check_weights(folder, load_shape(folder).as_reward_model())
    (want,) = workers(1).run(hugging_face_reward_model, folder, tmp_path / "gradients")
    results = workers(case.world_size).run(engine_reward_model, case, folder, saved)
    for result in results:
        torch.testing.assert_close(result.scores_N.float(), want.scores_N, rtol=1e-4, atol=1e-5)
        assert result.loss == pytest.approx(want.loss, rel=1e-4)
    assert_close(results[0].gradients, want.gradients, 3e-4)
    (reloaded,) = workers(1).run(hugging_face_reward_model, saved, tmp_path / "again")
    after_N = results[0].scores_after_N
    torch.testing.assert_close(after_N.float(), reloaded.scores_N, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(after_N, results[0].scores_N)
