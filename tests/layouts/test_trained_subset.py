"""Training of some of a model's tensors: the others have no gradient, no optimizer state and no part in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_reference
import pytest
import torch
from cases import AnyCase, case_of
from compare import assert_close, difference
from fsdp_cases import FSDPCase
from hf_reference import Step, Tensors
from megatron_cases import Case, OpenEngine, whole
from ragged import uneven_batch
from safetensors.torch import load_file
from test_checkpoint import assert_equal, commit, read_with_torch
from test_heads import batch_of, hugging_face_model, make_critic, values_of
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.algorithms.value_loss import ValueLoss
from fivefold.bridge.decoder import mappings
from fivefold.bridge.parameters import trained_parameters
from fivefold.config.schema.engine import FSDPConfig, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.families.read import load_shape
from fivefold.families.tensors import Trained
from tests.rows import long

SOME = Trained(("model.embed_tokens.weight", "model.layers.1.*", "lm_head.weight"))
"""Everything but the embedding, a layer, and the output layer."""
HEAD = Trained(("model.*",))
"""A value head alone."""
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-3, weight_decay=0.1, gradient_clipping=1.0)
N_STEPS = 2

FULL = MegatronConfig(recompute="full")
CASES: list[AnyCase] = [
    Case("megatron:(attn:p2t2|ffn:p2e2)"),
    Case("megatron:p2", FULL),
    FSDPCase("fsdp:t2"),
    FSDPCase("fsdp:d2", FSDPConfig(recompute="full")),
]
FURTHER: list[AnyCase] = [
    Case("megatron:d2e2"),
    Case("megatron:d1"),
    Case("megatron:t2"),
    Case("megatron:p2"),
    Case("megatron:d1", FULL),
    FSDPCase("fsdp:d1"),
    FSDPCase("fsdp:d2"),
]


@dataclass(frozen=True)
class Result:
    steps: list[Step]
    weights: Tensors
    with_buffer: dict[str, int]
    """Elements of gradient buffers of this rank, by the Hugging Face names of each parameter."""
    with_state: set[str]
    """Hugging Face names of the tensors whose optimizer state this rank has."""


def result_of(engine: Any, steps: list[Step]) -> Result:
    parameters = list(engine.parameters if isinstance(engine, OpenEngine) else engine.shards.parameters)
    by_name = {parameter.name: parameter for parameter in parameters}
    gradients = {each.name: gradient_elements(engine, each.tensor) for each in parameters}
    return Result(
        steps,
        whole(engine.export_weights()),
        {hf: count for name, count in gradients.items() if count for hf in by_name[name].mapping.sources()},
        {hf for part in engine.optimizer.slices() for hf in by_name[part.name].mapping.sources()},
    )


def gradient_elements(engine: Any, tensor: torch.Tensor) -> int:
    """Return how many elements of a gradient are kept for a tensor."""
    gradient = vars(tensor).get("main_grad") if isinstance(engine, OpenEngine) else tensor.grad
    return 0 if gradient is None else gradient.numel()


def train(case: AnyCase, folder: Path, trained: Trained, state: Path) -> Result:
    """In a worker: make steps, saving after the first one, and compute a gradient."""
    engine, steps = case.engine(folder, OPTIMIZER, trained=trained), []
    for step in range(N_STEPS):
        metrics = engine.forward_backward_of(uneven_batch(), SFTLoss())
        steps.append(Step(metrics["loss"], engine.optim_step().grad_norm))
        if step == 0:
            commit(engine.snapshot(state), state)
    engine.forward_backward_of(uneven_batch(), SFTLoss())
    return result_of(engine, steps)


def resume(case: AnyCase, folder: Path, trained: Trained, state: Path) -> Tensors:
    """In a worker: load the state after the first step, offload and bring back, and make the other steps."""
    engine = case.engine(folder, OPTIMIZER, trained=trained)
    engine.load(state)
    freed = engine.offload()
    assert engine.onload() == freed > 0
    for _ in range(N_STEPS - 1):
        engine.forward_backward_of(uneven_batch(), SFTLoss())
        engine.optim_step()
    return whole(engine.export_weights())


@pytest.mark.parametrize("case", [*CASES, *long(*FURTHER)], ids=lambda case: case.layout)
def test_some_tensors_train_as_with_torch_and_the_others_have_nothing(
    workers: Workers, models: Path, tmp_path: Path, case: AnyCase
) -> None:
    folder = models / "qwen3_moe"
    ((steps, wanted),) = workers(1).run(
        hf_reference.train, folder, uneven_batch(), SFTLoss(), OPTIMIZER, N_STEPS, tmp_path / "hf", SOME.frozen
    )
    results = workers(case.world_size).run(train, case, folder, SOME, tmp_path / "state")
    before = load_file(folder / "model.safetensors")
    learning = {name for name in before if name in SOME}
    for ours, theirs in zip(results[0].steps, steps, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.grad_norm > 0
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    weights = results[0].weights
    assert weights.keys() == before.keys()
    assert_equal(
        {name: weights[name] for name in before.keys() - learning}, {n: before[n] for n in before.keys() - learning}
    )
    assert_close(
        *(difference({n: after[n] for n in learning}, {n: before[n] for n in learning}) for after in (weights, wanted)),
        2e-3,
    )
    assert set().union(*(result.with_buffer for result in results)) == learning
    assert set().union(*(result.with_state for result in results)) == learning
    stored = read_with_torch(tmp_path / "state")
    assert [tensors.keys() for tensors in stored.values()] == [learning] * 3
    resumed = workers(case.world_size).run(resume, case, folder, SOME, tmp_path / "state")
    assert_equal(resumed[0], weights)


@pytest.mark.parametrize("layout", ["megatron:p2", "fsdp:d2", *long("megatron:d1", "megatron:t2p2")])
@pytest.mark.parametrize("frozen", [("model.embed_tokens.weight",), ("model.layers.*",)], ids=["embedding", "layers"])
def test_a_tied_embedding_is_frozen_at_both_ends_of_a_pipeline_or_trained_at_both(
    workers: Workers, models: Path, tmp_path: Path, layout: str, frozen: tuple[str, ...]
) -> None:
    folder, case = models / "qwen2", case_of(layout)
    assert load_shape(folder).tied_embeddings
    ((steps, wanted),) = workers(1).run(
        hf_reference.train, folder, uneven_batch(), SFTLoss(), OPTIMIZER, N_STEPS, tmp_path / "hf", frozen
    )
    result, *_ = workers(case.world_size).run(train, case, folder, Trained(frozen), tmp_path / "state")
    for ours, theirs in zip(result.steps, steps, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
    before = load_file(folder / "model.safetensors")
    learning = {name for name in before if name in Trained(frozen)}
    assert {name for name in before if not torch.equal(result.weights[name], before[name])} == learning
    assert_close(
        *(
            difference({n: after[n] for n in learning}, {n: before[n] for n in learning})
            for after in (result.weights, wanted)
        ),
        2e-3,
    )


def train_head(folder: Path, old_T: torch.Tensor) -> Tensors:
    """In a worker: return Hugging Face's critic after steps of torch's AdamW on its head alone."""
    model = hugging_face_model(folder)
    model.model.requires_grad_(False)
    groups = [
        {"params": [model.score.weight], "weight_decay": 0.1},
        {"params": [model.score.bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, eps=OPTIMIZER.eps, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2))
    batch = batch_of(old_T)
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        cost_T = 0.5 * (values_of(model, batch) - batch.fields["returns"]) ** 2
        ((cost_T * batch.mask_T).sum() / batch.mask_T.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.score.parameters(), OPTIMIZER.gradient_clipping)
        optimizer.step()
    return {f"score.{name}": parameter.detach().clone() for name, parameter in model.score.named_parameters()}


def train_engine_head(case: AnyCase, folder: Path, old_T: torch.Tensor) -> Result:
    engine, steps = case.engine(folder, OPTIMIZER, value_head=True, trained=HEAD), []
    for _ in range(N_STEPS):
        metrics = engine.forward_backward_of(batch_of(old_T), ValueLoss(1e6, "token_mean"))
        steps.append(Step(metrics["loss"], engine.optim_step().grad_norm))
    engine.forward_backward_of(batch_of(old_T), ValueLoss(1e6, "token_mean"))
    return result_of(engine, steps)


@pytest.mark.parametrize(
    "case",
    [
        Case("megatron:p2"),
        Case("megatron:t2", FULL),
        FSDPCase("fsdp:d2"),
        *long(Case("megatron:d1"), FSDPCase("fsdp:t2")),
    ],
)
def test_a_value_head_trains_alone(workers: Workers, models: Path, tmp_path: Path, case: AnyCase) -> None:
    folder = tmp_path / "critic"
    workers(1).run(make_critic, models / "qwen2", folder)
    old_T = torch.zeros(uneven_batch().n_tokens)
    (wanted,) = workers(1).run(train_head, folder, old_T)
    results = workers(case.world_size).run(train_engine_head, case, folder, old_T)
    before = load_file(folder / "model.safetensors")
    body = before.keys() - wanted.keys()
    assert_equal({name: results[0].weights[name] for name in body}, {name: before[name] for name in body})
    assert_close({name: results[0].weights[name] for name in wanted}, wanted, 1e-5)
    assert set().union(*(result.with_buffer for result in results)) == wanted.keys()
    assert set().union(*(result.with_state for result in results)) == wanted.keys()


def test_a_parameter_that_holds_trained_and_frozen_tensors_is_refused(models: Path) -> None:
    known = mappings(load_shape(models / "qwen3_moe"))
    with pytest.raises(
        ValueError, match=r"2\.self_attn\.k_proj\.weight is frozen and .*q_proj\.weight is trained, but"
    ):
        trained_parameters(known, Trained(("model.layers.2.self_attn.k_proj.weight",)))
