"""Every option of the engine changes what it says, and what cannot be is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hf_reference
import megatron_cases
import pytest
import torch
from compare import assert_close
from hf_reference import Tensors
from megatron.core.transformer.moe.router import TopKRouter
from megatron_cases import Case, lay_out, whole
from ragged import uneven_batch
from safetensors.torch import load_file
from tiny_models import VOCAB
from worker_pool import Workers

from fivefold.algorithms.loss import SFTLoss
from fivefold.config.schema import EngineConfig, MegatronConfig, MicroBatchConfig, OptimizerConfig
from fivefold.layout.allocation import parse_backend
from fivefold.layout.shape import load_shape
from fivefold.mcore import settings
from fivefold.types import Batch

FOLDED = "megatron:(attn:t2|ffn:e2)"
ONE_SEQUENCE = uneven_batch(lengths=(29,))


def gradients(workers: Workers, case: Case, folder: Path, batch: Batch) -> megatron_cases.Gradients:
    return workers(case.world_size).run(megatron_cases.gradients, case, folder, batch, SFTLoss())[0]


# --- the router's dtype


@dataclass(frozen=True)
class Routing:
    hidden_TH: torch.Tensor
    weight_EH: torch.Tensor
    probs_TE: torch.Tensor
    chosen_TE: torch.Tensor


def routings(case: Case, folder: Path, batch: Batch) -> list[Routing]:
    """In a worker: what the routers of this rank's layers were given and what they made of it."""
    engine, found = case.engine(folder), []

    def note(router: TopKRouter, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        probs, chosen = outputs
        hidden_TH, weight_EH = inputs[0].flatten(0, 1).clone(), router.weight.detach().clone()
        found.append(Routing(hidden_TH, weight_EH, probs.clone(), chosen.clone()))

    for router in engine.modules_of(TopKRouter):
        router.register_forward_hook(note)
    engine.compute_logprobs(batch, temperature=1.0)
    return found


def router_errors(workers: Workers, folder: Path, router_dtype: str) -> list[float]:
    """Largest relative error of each router's probabilities against float64."""
    case = Case("megatron:d1", MegatronConfig(router_dtype=router_dtype), dtype="bfloat16")
    errors = []
    for routing in workers(1).run(routings, case, folder, ONE_SEQUENCE)[0]:
        assert routing.hidden_TH.dtype == routing.weight_EH.dtype == torch.bfloat16
        logits = routing.hidden_TH.double() @ routing.weight_EH.double().T
        wanted = logits.masked_fill(~routing.chosen_TE, -torch.inf).softmax(-1)
        errors.append(float(((routing.probs_TE.double() - wanted).abs() / wanted)[routing.chosen_TE].max()))
    return errors


def test_the_router_of_a_bfloat16_model_computes_in_float32(workers: Workers, models: Path) -> None:
    errors = router_errors(workers, models / "qwen3_moe-bf16", "fp32")
    assert len(errors) == 4
    assert max(errors) < 1e-5


def test_the_router_computes_in_the_models_dtype_if_asked_to(workers: Workers, models: Path) -> None:
    assert min(router_errors(workers, models / "qwen3_moe-bf16", "model")) > 1e-4


@pytest.mark.parametrize(
    "layout", ["megatron:d1", "megatron:d2", FOLDED, "megatron:p2v2", "megatron:(attn:c2d2|ffn:t2e2)"]
)
def test_bfloat16_trains_nearly_as_float32(workers: Workers, models: Path, layout: str) -> None:
    half, full = Case(layout, dtype="bfloat16"), Case("megatron:d1")
    folder, batch, optimizer = models / "qwen3_moe", uneven_batch(), OptimizerConfig(lr=1e-2, eps=1e-3)
    results = [
        workers(case.world_size).run(megatron_cases.train, case, folder, batch, SFTLoss(), optimizer, 3)[0]
        for case in (half, full)
    ]
    for rough, exact in zip(results[0].steps, results[1].steps, strict=True):
        assert rough.loss == pytest.approx(exact.loss, rel=0.02)
        assert rough.grad_norm == pytest.approx(exact.grad_norm, rel=0.1)


# --- overrides of Megatron-Core's own fields


def transformer_config(folder: Path, **overrides: Any) -> Any:
    config = EngineConfig(path=str(folder), dtype="float32", megatron=MegatronConfig(transformer=overrides))
    return settings.transformer_config(config, parse_backend("megatron:d1"), load_shape(folder))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("moe_aux_loss_coef", 0.1, "no such field; did you mean moe_aux_loss_coeff?"),
        ("zzz", 1, "TransformerConfig has no such field"),
        ("moe_aux_loss_coeff", "0.1", "takes .*float.*, not str"),
        ("moe_aux_loss_coeff", True, "takes .*float.*, not bool"),
        ("moe_z_loss_coeff", [1.0], "not list"),
        ("num_layers", 3, r"Fivefold sets this field itself \(to 4\); drop the override"),
        ("calculate_per_token_loss", False, "Fivefold sets this field itself"),
        ("recompute_granularity", "full", "use actor.megatron.recompute instead"),
        ("moe_router_dtype", "fp32", "use actor.megatron.router_dtype instead"),
        ("tensor_model_parallel_size", 2, "use actor.backend instead"),
        ("deterministic_mode", True, "use actor.megatron.use_deterministic_algorithms instead"),
        ("init_method", "normal", "Fivefold sets this field itself"),
        ("softmax_scale", 0.1, "Fivefold sets this field itself"),
        ("moe_expert_capacity_factor", 1.5, "Fivefold sets this field itself"),
    ],
)
def test_a_wrong_transformer_override_is_an_error(models: Path, name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"actor.megatron.transformer.{name}={re.escape(repr(value))}: .*{message}"):
        transformer_config(models / "qwen3_moe", **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bucket_sise", 10, "did you mean bucket_size?"),
        ("bucket_size", 1.5, "not float"),
        ("average_in_collective", True, r"Fivefold sets this field itself \(to False\)"),
        ("overlap_param_gather", True, "Fivefold sets this field itself"),
    ],
)
def test_a_wrong_ddp_override_is_an_error(models: Path, name: str, value: Any, message: str) -> None:
    config = EngineConfig(path=str(models / "qwen3"), megatron=MegatronConfig(ddp={name: value}))
    with pytest.raises(ValueError, match=f"actor.megatron.ddp.{name}={value}: .*{message}"):
        settings.ddp_config(config, parse_backend("megatron:d2"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("adam_beta", 0.5, "did you mean adam_beta1?"),
        ("lr", 0.1, "use actor.optimizer.lr instead"),
        ("min_lr", 0.1, "use actor.optimizer.min_lr_ratio instead"),
        ("decoupled_lr", 0.1, "use actor.optimizer.lr instead"),
        ("weight_decay", 0.1, "use actor.optimizer.weight_decay instead"),
        ("clip_grad", 0.1, "use actor.optimizer.gradient_clipping instead"),
        ("bf16", True, "use actor.dtype instead"),
        ("optimizer", "sgd", "Fivefold sets this field itself"),
        ("fp16", True, "Fivefold sets this field itself"),
    ],
)
def test_a_wrong_optimizer_override_is_an_error(models: Path, name: str, value: Any, message: str) -> None:
    config = EngineConfig(path=str(models / "qwen3"), megatron=MegatronConfig(optimizer={name: value}))
    with pytest.raises(ValueError, match=f"actor.megatron.optimizer.{name}={value!r}: .*{message}"):
        settings.optimizer_config(config, OptimizerConfig())


def test_dropout_is_refused(models: Path) -> None:
    """With it, the ratio of new and old log-probs would be noise before the first update."""
    case = Case("megatron:d1", MegatronConfig(transformer={"hidden_dropout": 0.5}))
    config = EngineConfig(path=str(models / "qwen3"), megatron=case.megatron)
    with pytest.raises(ValueError, match="hidden_dropout"):
        settings.transformer_config(config, parse_backend(case.layout), load_shape(models / "qwen3"))


@pytest.mark.parametrize(
    "overrides",
    [{"bucket_size": 500}, {"overlap_grad_reduce": True}, {"overlap_grad_reduce": True, "bucket_size": 500}],
)
@pytest.mark.parametrize("layout", ["megatron:d2e2", "megatron:(attn:d2t2|ffn:t2e2)"])
def test_gradients_are_the_same_in_small_and_overlapping_buckets(
    workers: Workers, models: Path, layout: str, overrides: dict[str, Any]
) -> None:
    case, batch, optimizer = Case(layout), uneven_batch(), OptimizerConfig(lr=1e-2, eps=1e-3)
    bucketed = replace(case, megatron=MegatronConfig(ddp=overrides))
    wanted, got = (
        workers(case.world_size).run(megatron_cases.train, c, models / "qwen3_moe", batch, SFTLoss(), optimizer, 2)[0]
        for c in (case, bucketed)
    )
    assert_close(got.weights, wanted.weights, 1e-5)
    assert [step.grad_norm for step in got.steps] == pytest.approx([step.grad_norm for step in wanted.steps], rel=1e-5)


def n_buckets(case: Case, folder: Path) -> int:
    engine = case.engine(folder, OptimizerConfig())
    return sum(len(group.buckets) for chunk in engine._chunks for group in chunk.bucket_groups)


def test_the_bucket_size_is_that_of_the_override(workers: Workers, models: Path) -> None:
    counts = [
        workers(2).run(n_buckets, Case("megatron:d2", MegatronConfig(ddp=ddp)), models / "qwen3")[0]
        for ddp in ({}, {"bucket_size": 2000, "overlap_grad_reduce": True})
    ]
    assert counts[0] == 1 < counts[1]


def decayed(case: Case, folder: Path) -> Tensors:
    """In a worker: the weights after a step that does nothing but decay them."""
    engine = case.engine(folder, OptimizerConfig(lr=0.1, weight_decay=0.5))
    batch = uneven_batch()
    engine.forward_backward(Batch(batch.lengths, batch.tokens_T, torch.zeros_like(batch.mask_T)), SFTLoss())
    engine.optim_step()
    return whole(engine.export_weights())


def test_weight_decay_of_the_head_norms_is_an_option_of_megatron_core(workers: Workers, models: Path) -> None:
    case = Case("megatron:d1", MegatronConfig(optimizer={"apply_wd_to_qk_layernorm": True}))
    before = load_file(models / "qwen3" / "model.safetensors")
    (after,) = workers(1).run(decayed, case, models / "qwen3")
    for name, weight in before.items():
        exempt = weight.ndim == 1 and "q_norm" not in name and "k_norm" not in name
        torch.testing.assert_close(after[name], weight * (1.0 if exempt else 0.95), rtol=1e-6, atol=0)


def test_weight_decay_within_adam_is_an_option_of_megatron_core(workers: Workers, models: Path) -> None:
    """As an L2 penalty, decay is a gradient like any other, of which Adam keeps the sign: a step of the whole rate."""
    case = Case("megatron:d1", MegatronConfig(optimizer={"decoupled_weight_decay": False}))
    before = load_file(models / "qwen3" / "model.safetensors")
    (after,) = workers(1).run(decayed, case, models / "qwen3")
    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(after[name], before[name] - 0.1 * before[name].sign(), rtol=1e-4, atol=1e-4)


# --- the auxiliary loss of the router


@pytest.mark.parametrize(
    "layout", ["megatron:d1", "megatron:t2", "megatron:c2", "megatron:p2v2", "megatron:d2", FOLDED]
)
@pytest.mark.parametrize("name", ["moe_aux_loss_coeff", "moe_z_loss_coeff"])
def test_the_routers_auxiliary_losses_have_the_gradients_of_their_formulas(
    workers: Workers, models: Path, tmp_path: Path, layout: str, name: str
) -> None:
    """One sequence: with virtual stages or data parallelism there are micro-batches of filler alone."""
    coefficient, folder = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.05}[name], models / "qwen3_moe"
    case = Case(layout, MegatronConfig(transformer={name: coefficient}))
    ((_, wanted),) = workers(1).run(
        hf_reference.gradients_with_auxiliary_loss, folder, ONE_SEQUENCE, name, coefficient, tmp_path / "hf"
    )
    ((plain_loss, plain),) = workers(1).run(hf_reference.gradients, folder, ONE_SEQUENCE, SFTLoss(), tmp_path / "plain")
    got = gradients(workers, case, folder, ONE_SEQUENCE)
    router = "model.layers.0.mlp.gate.weight"
    assert (wanted[router] - plain[router]).norm() > 0.1 * plain[router].norm(), "the auxiliary loss must matter here"
    assert got.loss == pytest.approx(plain_loss, rel=1e-4), "the reported loss is the trained one alone"
    assert_close(got.gradients, wanted, 1e-4)


# --- determinism and random weights


def determinism(case: Case, folder: Path) -> tuple[bool, bool]:
    """In a worker: the flags of torch and of Megatron-Core once the engine is built."""
    try:
        engine = case.engine(folder, OptimizerConfig())
        return torch.are_deterministic_algorithms_enabled(), engine._megatron_config.deterministic_mode
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_kernels_are_switched_on(workers: Workers, models: Path) -> None:
    for wanted in (True, False):
        case = Case("megatron:d1", MegatronConfig(use_deterministic_algorithms=wanted))
        assert workers(1).run(determinism, case, models / "qwen3_moe") == [(wanted, wanted)]


def random_weights(case: Case, folder: Path, seed: int) -> Tensors:
    return whole(case.engine(folder, seed=seed).export_weights())


@pytest.mark.parametrize("layout", [FOLDED, "megatron:p2v2", "megatron:(attn:d2t2|ffn:t2e2)"])
@pytest.mark.parametrize("model", ["qwen3_moe", "qwen2_moe"])
def test_random_weights_depend_on_the_seed_and_not_on_the_layout(
    workers: Workers, models: Path, layout: str, model: str
) -> None:
    alone, spread = Case("megatron:d1", init_from_scratch=True), Case(layout, init_from_scratch=True)
    wanted = workers(1).run(random_weights, alone, models / model, 3)[0]
    got = workers(spread.world_size).run(random_weights, spread, models / model, 3)[0]
    assert all(got[name].equal(tensor) for name, tensor in wanted.items())
    other = workers(1).run(random_weights, alone, models / model, 4)[0]
    matrices = [name for name, tensor in wanted.items() if tensor.ndim > 1]
    assert not any(other[name].equal(wanted[name]) for name in matrices)
    assert len({tuple(wanted[name].flatten()[:8].tolist()) for name in matrices}) == len(matrices)
    assert float(wanted["model.embed_tokens.weight"].std()) == pytest.approx(0.02, rel=0.1)


# --- what is refused


def message_of(call: Callable[..., Any], *args: Any) -> str:
    """In a worker: the text of the ValueError that `call` raises, or nothing."""
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return ""


def train_without_optimizer(case: Case, folder: Path) -> None:
    case.engine(folder).forward_backward(uneven_batch(), SFTLoss())


def step_without_optimizer(case: Case, folder: Path) -> None:
    case.engine(folder).optim_step()


@pytest.mark.parametrize("call", [train_without_optimizer, step_without_optimizer])
def test_an_engine_without_optimizer_does_not_train(workers: Workers, models: Path, call: Callable[..., Any]) -> None:
    (message,) = workers(1).run(message_of, call, Case("megatron:d1"), models / "qwen3")
    assert "built without an optimizer" in message


def build(case: Case, folder: Path) -> None:
    case.engine(folder)


@pytest.mark.parametrize(
    ("layout", "model", "rule"),
    [
        ("megatron:t8", "qwen3", "4 key/value heads cannot be split over t8"),
        ("megatron:p8", "qwen3", "4 layers do not divide"),
        ("megatron:(attn:d2|ffn:e2)", "qwen3", "e2 splits experts, and qwen3 has none"),
        ("megatron:p2v4", "qwen3", "4 layers do not divide"),
    ],
)
def test_an_impossible_layout_is_refused_on_every_rank(
    workers: Workers, models: Path, layout: str, model: str, rule: str
) -> None:
    case = Case(layout)
    for message in workers(case.world_size).run(message_of, build, case, models / model):
        assert rule in message


def build_on_other_layout(first: str, second: str, folder: Path) -> None:
    Case(first).engine(folder)
    layout = parse_backend(second)
    config = EngineConfig(path=str(folder), backend=second, dtype="float32")
    try:
        megatron_cases.OpenEngine(config, layout, seed=1)
    finally:
        lay_out("megatron:d2")  # what Megatron-Core has now is not what the next case takes it for


@pytest.mark.parametrize(
    ("first", "second", "rule"),
    [
        ("megatron:t2", "megatron:p2", "cannot share them"),
        ("megatron:p2", "megatron:p2v2", "cannot share them"),
        ("megatron:p2v2", "megatron:p2", "cannot share them"),
        ("megatron:t2", "megatron:t4", "start one process a rank"),
    ],
)
def test_one_set_of_processes_has_one_layout(
    workers: Workers, models: Path, first: str, second: str, rule: str
) -> None:
    for message in workers(2).run(message_of, build_on_other_layout, first, second, models / "qwen3"):
        assert rule in message


def two_engines(case: Case, folder: Path, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """In a worker: log-probs of an untrained model, before and after another one of the same layout was trained."""
    reference = case.engine(folder)
    actor = case.engine(folder, OptimizerConfig(lr=0.1))
    before, _ = reference.compute_logprobs(batch, temperature=1.0)
    actor.forward_backward(batch, SFTLoss())
    actor.optim_step()
    after, _ = reference.compute_logprobs(batch, temperature=1.0)
    trained, _ = actor.compute_logprobs(batch, temperature=1.0)
    assert not trained.equal(after)
    return before, after


@pytest.mark.parametrize("layout", ["megatron:d1", FOLDED, "megatron:p2v2"])
def test_an_actor_and_a_reference_share_their_processes(workers: Workers, models: Path, layout: str) -> None:
    case = Case(layout)
    for before, after in workers(case.world_size).run(two_engines, case, models / "qwen3_moe", uneven_batch()):
        assert before.equal(after)


# --- unusual batches


@pytest.mark.parametrize("layout", ["megatron:d4", "megatron:(attn:d2t2|ffn:t2e2)", "megatron:d2p2v2", "megatron:c4"])
def test_a_batch_may_have_fewer_sequences_than_ranks(workers: Workers, models: Path, layout: str) -> None:
    batch, folder = uneven_batch(lengths=(5,)), models / "qwen3_moe"
    wanted = gradients(workers, Case("megatron:d1"), folder, batch)
    got = gradients(workers, Case(layout), folder, batch)
    assert got.loss == pytest.approx(wanted.loss, rel=1e-5)
    torch.testing.assert_close(got.logprobs_T, wanted.logprobs_T, rtol=1e-5, atol=1e-5)
    assert_close(got.gradients, wanted.gradients, 1e-4)


def accumulated(case: Case, folder: Path, batches: list[Batch]) -> Tensors:
    """In a worker: the gradient after several mini-batches without a step in between."""
    engine = case.engine(folder, OptimizerConfig())
    for batch in batches:
        engine.forward_backward(batch, SFTLoss())
        engine.compute_logprobs(batch, temperature=1.0)
    return {name: tensor.clone() for name, tensor in engine.gradients()}


def test_gradients_accumulate_over_mini_batches(workers: Workers, models: Path) -> None:
    first, second = uneven_batch(0), uneven_batch(1)
    case, folder = Case("megatron:d1"), models / "qwen3_moe_mixed"
    apart = [workers(1).run(accumulated, case, folder, [batch])[0] for batch in (first, second)]
    (together,) = workers(1).run(accumulated, case, folder, [first, second])
    assert_close(together, {name: apart[0][name] + apart[1][name] for name in together}, 1e-5)


@pytest.mark.parametrize("layout", ["megatron:d1", "megatron:(attn:c2|ffn:e2)"])
def test_a_sequence_longer_than_the_token_limit_gets_a_micro_batch_of_its_own(
    workers: Workers, models: Path, layout: str
) -> None:
    case = Case(layout, micro_batches=MicroBatchConfig(max_tokens_per_mb=16))
    got = gradients(workers, case, models / "qwen3_moe", uneven_batch())
    wanted = gradients(workers, Case("megatron:d1"), models / "qwen3_moe", uneven_batch())
    assert_close(got.gradients, wanted.gradients, 1e-4)


def test_the_vocabulary_is_padded_out_of_sight(workers: Workers, models: Path) -> None:
    assert VOCAB % 2
    assert VOCAB % 4
    for layout in ("megatron:t2", "megatron:t4"):
        weights = workers(Case(layout).world_size).run(random_weights, Case(layout), models / "qwen3", 1)[0]
        assert weights["lm_head.weight"].shape == weights["model.embed_tokens.weight"].shape == (VOCAB, 32)
