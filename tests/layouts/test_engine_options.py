"""The engine's own options have their effects, unusual batches train, and impossible layouts are refused."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import megatron_cases
import pytest
import torch
from cases import AnyCase, case_of
from compare import assert_close
from fsdp_cases import FSDPCase
from hf_reference import Tensors
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron_cases import Case, lay_out, whole
from ragged import uneven_batch
from tiny_models import VOCAB
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.batch import Batch
from fivefold.config.schema.engine import EngineConfig, FSDPConfig, MicroBatchConfig, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig, MegatronTransformerFields
from fivefold.engine.contract import EngineOptions
from fivefold.engine.deterministic import make_deterministic
from fivefold.layout.parser import parse_backend
from fivefold.mcore.dispatcher import ExchangingDispatcher
from tests.rows import long

FOLDED = "megatron:(attn:t2|ffn:e2)"
ONE_SEQUENCE = uneven_batch(lengths=(29,))


def gradients(workers: Workers, case: AnyCase, folder: Path, batch: Batch) -> megatron_cases.Gradients:
    return workers(case.world_size).run(megatron_cases.gradients, case, folder, batch, SFTLoss())[0]


# --- the router's dtype


@dataclass(frozen=True)
class Routing:
    hidden_TH: torch.Tensor
    weight_EH: torch.Tensor
    logits_TE: torch.Tensor
    probs_TE: torch.Tensor
    chosen_TE: torch.Tensor


def routings(case: Case, folder: Path, batch: Batch) -> list[Routing]:
    """In a worker: return inputs and outputs of the routers of this rank's layers."""
    engine, found, logits = case.engine(folder), [], list[torch.Tensor]()

    def keep(gate: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        scores = gate(hidden)
        logits.append(scores.flatten(0, 1).clone())
        return scores

    def note(router: TopKRouter, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        probs, chosen = outputs
        hidden_TH, weight_EH = inputs[0].flatten(0, 1).clone(), router.weight.detach().clone()
        found.append(Routing(hidden_TH, weight_EH, logits.pop(), probs.clone(), chosen.clone()))

    for router in engine.modules_of(TopKRouter):
        router.register_forward_hook(note)
        router.gating = partial(keep, router.gating)
    engine.logprobs_of(batch, temperature=1.0)
    return found


def router_errors(workers: Workers, folder: Path, router_dtype: str) -> list[tuple[float, float]]:
    """Return the largest relative errors of each router's probabilities and scores against float64."""
    case = Case("megatron:d1", MegatronConfig(router_dtype=router_dtype), dtype="bfloat16")
    errors = []
    for routing in workers(1).run(routings, case, folder, ONE_SEQUENCE)[0]:
        assert routing.hidden_TH.dtype == routing.weight_EH.dtype == torch.bfloat16
        logits = routing.hidden_TH.double() @ routing.weight_EH.double().T
        wanted = logits.masked_fill(~routing.chosen_TE, -torch.inf).softmax(-1)
        of_probs = float(((routing.probs_TE.double() - wanted).abs() / wanted)[routing.chosen_TE].max())
        errors.append((of_probs, float(((routing.logits_TE.double() - logits) / logits).abs().max())))
    return errors


def test_the_router_of_a_bfloat16_model_computes_in_float32(workers: Workers, models: Path) -> None:
    errors = router_errors(workers, models / "qwen3_moe-bf16", "fp32")
    assert len(errors) == 4
    assert max(of_probs for of_probs, _ in errors) < 1e-5
    assert min(of_scores for _, of_scores in errors) > 1e-9


def test_the_router_chooses_by_scores_in_float64_if_asked_to(workers: Workers, models: Path) -> None:
    errors = router_errors(workers, models / "qwen3_moe-bf16", "fp64")
    assert max(of_scores for _, of_scores in errors) < 1e-12
    assert max(of_probs for of_probs, _ in errors) < 1e-6


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
def test_routers_in_float64_train_the_same_on_every_layout(workers: Workers, models: Path, model: str) -> None:
    """With auxiliary losses, scores by sigmoids and offsets, and probabilities that travel to other ranks."""
    fields = MegatronTransformerFields(moe_aux_loss_coeff=0.01, moe_z_loss_coeff=0.001)
    of_64 = MegatronConfig(router_dtype="fp64", transformer=fields)
    cases = [
        Case("megatron:d1", MegatronConfig(transformer=fields)),
        *(Case(layout, of_64) for layout in ("megatron:d1", FOLDED)),
    ]
    single, alone, folded = (gradients(workers, case, models / model, uneven_batch()) for case in cases)
    for other in (alone, folded):
        assert_close(other.gradients, single.gradients, 1e-5)


def test_the_router_computes_in_the_models_dtype_if_asked_to(workers: Workers, models: Path) -> None:
    assert min(router_errors(workers, models / "qwen3_moe-bf16", "model"))[0] > 1e-4


@pytest.mark.parametrize("layout", ["megatron:(attn:c2|ffn:t2)", "megatron:p2v2", *long("megatron:d1", FOLDED)])
def test_bfloat16_trains_nearly_like_float32(workers: Workers, models: Path, layout: str) -> None:
    half, full = Case(layout, dtype="bfloat16"), Case("megatron:d1")
    folder, batch, optimizer = models / "qwen3_moe", uneven_batch(), OptimizerConfig(lr=1e-2, eps=1e-3)
    results = [
        workers(case.world_size).run(megatron_cases.train, case, folder, batch, SFTLoss(), optimizer, 2)[0]
        for case in (half, full)
    ]
    for rough, exact in zip(results[0].steps, results[1].steps, strict=True):
        assert rough.loss == pytest.approx(exact.loss, rel=0.02)
        assert rough.grad_norm == pytest.approx(exact.grad_norm, rel=0.1)


def kept_by_dispatchers(case: Case, folder: Path, batch: Batch) -> list[str]:
    """In a worker: return the names of the tensors that MoE layers keep for their dispatch after a pass."""
    engine = case.engine(folder, OptimizerConfig())
    engine.forward_backward_of(batch, SFTLoss())
    layers = list(engine.modules_of(MoELayer))
    assert layers
    attributes = [item for layer in layers for item in vars(layer.token_dispatcher).items()]
    return [name for name, value in attributes if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("layout", ["megatron:d1", FOLDED])
def test_dispatchers_keep_no_tensors_after_a_pass(workers: Workers, models: Path, layout: str) -> None:
    case = Case(layout, MegatronConfig(recompute="full"))
    assert not any(workers(case.world_size).run(kept_by_dispatchers, case, models / "qwen3_moe", uneven_batch()))


def counts_of_loads(case: AnyCase, folder: Path, batch: Batch) -> int:
    """In a worker: return how often the engine gathers the loads of experts in a mini-batch."""
    counted = "fivefold.mcore.engine.load_metrics" if isinstance(case, Case) else "fivefold.fsdp.engine.load_metrics"
    with patch(counted, return_value={}) as gathered:
        case.engine(folder, OptimizerConfig()).forward_backward_of(batch, SFTLoss())
    return gathered.call_count


@pytest.mark.parametrize("backend", ["megatron:d1", "fsdp:d1"])
@pytest.mark.parametrize(("family", "expected"), [("qwen2", 0), ("qwen3_moe", 1)])
def test_a_dense_model_gathers_no_loads_of_experts(
    workers: Workers, models: Path, backend: str, family: str, expected: int
) -> None:
    case = case_of(backend)
    assert workers(case.world_size).run(counts_of_loads, case, models / family, uneven_batch()) == [expected]


def waits_of_dispatchers(case: Case, folder: Path, batch: Batch) -> tuple[int, int]:
    """In a worker: return how often dispatchers read a tensor on the host in a mini-batch, and how often they work."""
    engine, counts = case.engine(folder, OptimizerConfig()), Counter[str]()

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            # On the CPU, PyTorch calls the patched method a second time, through the mode that stands in for CUDA.
            with torch._C.DisableTorchFunction():
                return method(*args, **options)

        return call

    # The experts' own products are not the dispatcher's.
    for layer in engine.modules_of(MoELayer):
        layer.experts.register_forward_pre_hook(lambda *_: counts.subtract(experts=counts["reads"]))
        layer.experts.register_forward_hook(lambda *_: counts.update(experts=counts["reads"]))
        layer.register_forward_pre_hook(lambda *_: counts.subtract(layers=counts["reads"]))
        layer.register_forward_hook(lambda *_: counts.update(layers=counts["reads"], passes=1))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "item", "numpy", "cpu"):
            patch.setattr(torch.Tensor, name, counted("reads", getattr(torch.Tensor, name)))
        engine.forward_backward_of(batch, SFTLoss())
    return counts["layers"] - counts["experts"], counts["passes"]


@pytest.mark.parametrize(("layout", "waits"), [("megatron:(attn:t2|ffn:t2)", 0), (FOLDED, 1)])
def test_dispatchers_wait_only_for_the_numbers_of_rows_that_travel(
    workers: Workers, models: Path, layout: str, waits: int
) -> None:
    for reads, passes in workers(2).run(waits_of_dispatchers, Case(layout), models / "qwen3_moe", uneven_batch()):
        assert reads == waits * passes
        assert passes >= 4


def rows_that_travel(case: Case, folder: Path, batch: Batch) -> tuple[int, int]:
    """In a worker: return how many tokens dispatchers send to other ranks, and how many have experts there."""
    engine, sent, wanted = case.engine(folder, OptimizerConfig()), 0, 0
    layers = list(engine.modules_of(MoELayer))
    exchange, count = ExchangingDispatcher._exchange, ExchangingDispatcher._count
    rank, hidden = layers[0].ep_group.rank(), layers[0].config.hidden_size

    def exchanging(self: ExchangingDispatcher, rows: torch.Tensor) -> torch.Tensor:
        nonlocal sent
        assert len(rows) == sum(self.n_sent)
        if rows.shape[-1] == hidden:
            sent += len(rows) - self.n_sent[rank]
        return exchange(self, rows)

    def counting(self: ExchangingDispatcher, routing_map: torch.Tensor) -> None:
        nonlocal wanted
        for experts in routing_map.tolist():
            ranks = {expert // self.n_local_experts for expert, is_chosen in enumerate(experts) if is_chosen}
            wanted += len(ranks - {rank})
        count(self, routing_map)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExchangingDispatcher, "_exchange", exchanging)
        patch.setattr(ExchangingDispatcher, "_count", counting)
        engine.forward_backward_of(batch, SFTLoss())
    return sent, wanted


def test_a_token_is_sent_once_to_each_rank_that_has_some_of_its_experts(workers: Workers, models: Path) -> None:
    for sent, wanted in workers(4).run(rows_that_travel, Case("megatron:d4e4"), models / "qwen3_moe", uneven_batch()):
        assert sent == wanted > 0


def bubble(case: Case, folder: Path, batch: Batch) -> float | None:
    return case.engine(folder, OptimizerConfig()).forward_backward_of(batch, SFTLoss()).get("pipeline/bubble")


def test_the_stages_of_a_pipeline_wait_for_each_other_at_least_as_its_schedule_says(
    workers: Workers, models: Path
) -> None:
    """With one micro-batch, one of two stages works at a time."""
    one, several = (Case("megatron:p2", micro_batches=MicroBatchConfig(max_tokens_per_mb=n)) for n in (100_000, 20))
    folder = models / "qwen3_moe"
    first, second = workers(2).run(bubble, one, folder, uneven_batch())
    assert first == second
    assert 0.5 <= first < 1
    assert 0 < workers(2).run(bubble, several, folder, uneven_batch())[0] < first
    assert workers(1).run(bubble, Case("megatron:d1"), folder, uneven_batch()) == [None]


# --- determinism and random weights


def determinism(case: Case, folder: Path) -> tuple[bool, bool]:
    """In a worker: build an engine; return the deterministic flags of torch and of Megatron-Core."""
    try:
        engine = case.engine(folder, OptimizerConfig())
        return torch.are_deterministic_algorithms_enabled(), engine._megatron_config.deterministic_mode
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_kernels_are_switched_on(workers: Workers, models: Path) -> None:
    for wanted in (True, False):
        case = Case("megatron:d1", MegatronConfig(use_deterministic_algorithms=wanted))
        assert workers(1).run(determinism, case, models / "qwen3_moe") == [(wanted, wanted)]


def trained_deterministically(case: Case, folder: Path, unwritten: bool) -> tuple[list[float], Tensors]:
    """In a worker: return the gradient norms of two steps, and the weights behind them.

    `unwritten` is what allocated memory holds: what it held before (False), or NaN (True).
    """

    def filled() -> None:
        make_deterministic()
        torch.utils.deterministic.fill_uninitialized_memory = unwritten

    builder = "fivefold.fsdp.engine" if isinstance(case, FSDPCase) else "fivefold.mcore.build"
    with patch(f"{builder}.make_deterministic", filled):
        try:
            run = megatron_cases.train(case, folder, uneven_batch(), SFTLoss(), OptimizerConfig(lr=1e-2), 2)
            assert torch.are_deterministic_algorithms_enabled()
            return [step.grad_norm for step in run.steps], run.weights
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "layout",
    ["megatron:(attn:c2|ffn:t2)", *long("megatron:d1", "megatron:(attn:t2p2|ffn:e2)", "fsdp:t2", "fsdp:t2c2")],
)
def test_two_deterministic_runs_have_the_same_bits_whatever_unwritten_memory_holds(
    workers: Workers, models: Path, layout: str
) -> None:
    fields = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}
    options = MegatronConfig(use_deterministic_algorithms=True, transformer=fields)
    on_fsdp = FSDPCase(layout, FSDPConfig(use_deterministic_algorithms=True), dtype="bfloat16")
    case = on_fsdp if layout.startswith("fsdp") else Case(layout, options, dtype="bfloat16")
    first, second = (
        workers(case.world_size).run(trained_deterministically, case, models / "qwen3_moe-bf16", unwritten)[0]
        for unwritten in (False, True)
    )
    assert first[0] == second[0]
    assert all(tensor.equal(second[1][name]) for name, tensor in first[1].items())


def random_weights(case: Case, folder: Path, seed: int) -> Tensors:
    return whole(case.engine(folder, seed=seed).export_weights())


@pytest.mark.parametrize("layout", ["megatron:p2v2", "megatron:(attn:d2t2|ffn:t2e2)", *long(FOLDED)])
@pytest.mark.parametrize("model", ["qwen2_moe", *long("qwen3_moe")])
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
    """In a worker: return the text of the ValueError that `call` raises, or ""."""
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return ""


def train_without_optimizer(case: Case, folder: Path) -> None:
    case.engine(folder).forward_backward_of(uneven_batch(), SFTLoss())


def step_without_optimizer(case: Case, folder: Path) -> None:
    case.engine(folder).optim_step()


@pytest.mark.parametrize("call", [train_without_optimizer, step_without_optimizer])
def test_an_engine_without_optimizer_does_not_train(workers: Workers, models: Path, call: Callable[..., Any]) -> None:
    (message,) = workers(1).run(message_of, call, Case("megatron:d1"), models / "qwen3")
    assert "built without an optimizer" in message


def build(case: Case, folder: Path) -> None:
    case.engine(folder)


def test_deepeps_dispatcher_is_refused_where_it_is_not_installed(workers: Workers, models: Path) -> None:
    case = Case("megatron:d1", MegatronConfig(token_dispatcher="flex"))
    (message,) = workers(1).run(message_of, build, case, models / "qwen3_moe")
    assert "the package deep_ep is not installed here" in message


def build_on_other_layout(first: str, second: str, folder: Path) -> None:
    Case(first).engine(folder)
    layout = parse_backend(second)
    config = EngineConfig(path=str(folder), backend=second, dtype="float32")
    try:
        megatron_cases.OpenEngine(config, layout, EngineOptions(seed=1))
    finally:
        lay_out("megatron:d2")  # so that the next case finds the groups that it expects


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


def two_engines(case: AnyCase, folder: Path, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """In a worker: return log-probs of a frozen model, before and after another one on the same layout is trained."""
    reference = case.engine(folder)
    actor = case.engine(folder, OptimizerConfig(lr=0.1))
    before, _ = reference.logprobs_of(batch, temperature=1.0)
    actor.forward_backward_of(batch, SFTLoss())
    actor.optim_step()
    after, _ = reference.logprobs_of(batch, temperature=1.0)
    trained, _ = actor.logprobs_of(batch, temperature=1.0)
    assert not trained.equal(after)
    return before, after


@pytest.mark.parametrize("layout", [FOLDED, "fsdp:d2", *long("megatron:d1", "megatron:p2v2", "fsdp:d2t2")])
def test_an_actor_and_a_reference_share_their_processes(workers: Workers, models: Path, layout: str) -> None:
    case = case_of(layout)
    for before, after in workers(case.world_size).run(two_engines, case, models / "qwen3_moe", uneven_batch()):
        assert before.equal(after)


def group_timeouts(case: Case, folder: Path) -> set[float]:
    """In a worker: return the time limits, in seconds, of collectives in Megatron-Core's groups."""
    lay_out("megatron:d2" if case.layout != "megatron:d2" else "megatron:t2")  # so that the groups are created again
    groups = case.engine(folder).groups
    backends = [group._get_backend(torch.device("cpu")) for group in (groups.tp, groups.pp, groups.ep, groups.dp)]
    return {backend.options._timeout.total_seconds() for backend in backends}


def test_collectives_of_all_groups_have_the_time_limit(workers: Workers, models: Path) -> None:
    case = Case("megatron:(attn:t2|ffn:e2)", timeout_s=77.0)
    assert workers(2).run(group_timeouts, case, models / "qwen3_moe") == [{77.0}] * 2


# --- unusual batches


@pytest.mark.parametrize(
    "layout", ["megatron:(attn:d2t2|ffn:t2e2)", "fsdp:d2", *long("megatron:d4", "megatron:d2p2v2")]
)
def test_a_batch_may_have_fewer_sequences_than_ranks(workers: Workers, models: Path, layout: str) -> None:
    batch, folder = uneven_batch(lengths=(5,)), models / "qwen3_moe"
    wanted = gradients(workers, Case("megatron:d1"), folder, batch)
    got = gradients(workers, case_of(layout), folder, batch)
    assert got.loss == pytest.approx(wanted.loss, rel=1e-5)
    torch.testing.assert_close(got.logprobs_T, wanted.logprobs_T, rtol=1e-5, atol=1e-5)
    assert_close(got.gradients, wanted.gradients, 1e-4)


def accumulated(case: AnyCase, folder: Path, batches: list[Batch]) -> Tensors:
    """In a worker: return the gradient after several mini-batches without a step in between."""
    engine = case.engine(folder, OptimizerConfig())
    for batch in batches:
        engine.forward_backward_of(batch, SFTLoss())
        engine.logprobs_of(batch, temperature=1.0)
    return {name: tensor.clone() for name, tensor in engine.gradients()}


@pytest.mark.parametrize(
    "layout",
    ["megatron:d2e2", "megatron:p2v2", "fsdp:d2", *long("megatron:d1", "megatron:(attn:t2p2|ffn:e2)", "fsdp:d2t2")],
)
def test_gradients_accumulate_over_mini_batches(workers: Workers, models: Path, layout: str) -> None:
    first, second = uneven_batch(0), uneven_batch(1)
    case, folder = case_of(layout), models / "qwen3_moe_mixed"
    ranks = workers(case.world_size)
    apart = [ranks.run(accumulated, case, folder, [batch])[0] for batch in (first, second)]
    together = ranks.run(accumulated, case, folder, [first, second])[0]
    assert_close(together, {name: apart[0][name] + apart[1][name] for name in together}, 1e-5)


@pytest.mark.parametrize("layout", ["megatron:d1", "megatron:(attn:c2|ffn:e2)"])
def test_a_sequence_longer_than_the_token_limit_gets_a_micro_batch_of_its_own(
    workers: Workers, models: Path, layout: str
) -> None:
    case = Case(layout, micro_batches=MicroBatchConfig(max_tokens_per_mb=16))
    got = gradients(workers, case, models / "qwen3_moe", uneven_batch())
    wanted = gradients(workers, Case("megatron:d1"), models / "qwen3_moe", uneven_batch())
    assert_close(got.gradients, wanted.gradients, 1e-4)


def test_exported_weights_lack_the_padding_of_the_vocabulary(workers: Workers, models: Path) -> None:
    assert VOCAB % 2
    assert VOCAB % 4
    for layout in ("megatron:t2", "megatron:t4"):
        weights = workers(Case(layout).world_size).run(random_weights, Case(layout), models / "qwen3", 1)[0]
        assert weights["lm_head.weight"].shape == weights["model.embed_tokens.weight"].shape == (VOCAB, 32)


def remains_after_training(case: Case, folder: Path) -> bool:
    """In a worker: return whether an engine outlives its last reference."""
    engine = case.engine(folder, OptimizerConfig())
    engine.forward_backward_of(uneven_batch(), SFTLoss())
    engine.optim_step()
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    return reference() is not None


@pytest.mark.parametrize("layout", ["megatron:d1", "megatron:p2v2"])
def test_an_engine_without_references_is_freed(workers: Workers, models: Path, layout: str) -> None:
    case = Case(layout)
    assert not any(workers(case.world_size).run(remains_after_training, case, models / "qwen3_moe"))
