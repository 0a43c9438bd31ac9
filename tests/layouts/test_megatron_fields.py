"""Each field of Megatron-Core that a recipe can set has its effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import hf_reference
import megatron_cases
import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from hf_reference import Tensors
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor
from megatron.core.transformer.moe.router import TopKRouter
from megatron_cases import Case, Gradients, whole
from ragged import uneven_batch
from safetensors.torch import load_file
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.batch import Batch
from fivefold.config.schema.engine import EngineConfig, MicroBatchConfig, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.engine.state.optimizer_state import learning_rate
from fivefold.families.read import load_shape
from fivefold.layout.parser import parse_backend
from fivefold.mcore import compat
from fivefold.rules.engines import megatron_problems
from tests.rows import long

PROJECTION = "model.layers.0.mlp.up_proj.weight"
ONE_SEQUENCE = uneven_batch(lengths=(29,))


@pytest.mark.parametrize("overrides", [{"bucket_size": 10_000}, {"overlap_grad_reduce": True, "bucket_size": 10_000}])
def test_gradients_are_the_same_in_small_and_overlapping_buckets(
    workers: Workers, models: Path, overrides: dict[str, Any]
) -> None:
    case, batch, optimizer = Case("megatron:d2e2"), uneven_batch(), OptimizerConfig(lr=1e-2, eps=1e-3)
    bucketed = replace(case, megatron=MegatronConfig(ddp=overrides))
    wanted, got = (
        workers(case.world_size).run(megatron_cases.train, c, models / "qwen3_moe", batch, SFTLoss(), optimizer, 2)[0]
        for c in (case, bucketed)
    )
    assert_close(got.weights, wanted.weights, 1e-5)
    assert [step.grad_norm for step in got.steps] == pytest.approx([step.grad_norm for step in wanted.steps], rel=1e-5)


SCHEDULES = {
    "outputs freed": ("megatron:p2", "qwen3_moe", {"deallocate_pipeline_outputs": True}),
    "without waits": ("megatron:p2", "qwen3_moe", {"batch_p2p_sync": False}),
    "groups of 4 micro-batches": ("megatron:p2v2", "qwen3_moe", {"microbatch_group_size_per_vp_stage": 4}),
    "larger groups than there are micro-batches": (
        "megatron:p2v2",
        "qwen3_moe",
        {"microbatch_group_size_per_vp_stage": 100},
    ),
    "fused activation": ("megatron:t2", "qwen2", {"bias_activation_fusion": True}),
    "fused activation of shared experts": ("megatron:t2", "qwen2_moe", {"bias_activation_fusion": True}),
    "embeddings not copied": ("megatron:t2", "qwen2", {"clone_scatter_output_in_embedding": False}),
    "shared experts during the exchange": (
        "megatron:(attn:t2|ffn:e2)",
        "qwen2_moe",
        {"moe_shared_expert_overlap": True},
    ),
    "shared experts beside slices, computed again": (
        "megatron:(attn:t2|ffn:t2)",
        "qwen2_moe",
        {"moe_shared_expert_overlap": True, "moe_layer_recompute": True},
    ),
}
"""Layout, model and fields of ways to compute the same."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_fields_that_change_only_the_way_keep_the_gradients(workers: Workers, models: Path, name: str) -> None:
    layout, model, fields = SCHEDULES[name]
    batch = uneven_batch()
    changed = Case(layout, MegatronConfig(transformer=fields), micro_batches=MicroBatchConfig(max_tokens_per_mb=20))
    got, wanted = (
        workers(case.world_size).run(megatron_cases.gradients, case, models / model, batch, SFTLoss())[0]
        for case in (changed, Case("megatron:d1"))
    )
    assert got.loss == pytest.approx(wanted.loss, rel=1e-5)
    assert_close(got.gradients, wanted.gradients, 1e-4)


def test_stages_that_share_sequences_of_one_length_keep_the_gradients(workers: Workers, models: Path) -> None:
    """The all-gather dispatcher wants one length of all micro-batches, which stages then do not tell each other."""
    options = MegatronConfig(token_dispatcher="allgather")
    spread = Case("megatron:(attn:p2c2|ffn:e2)", options, micro_batches=MicroBatchConfig(max_tokens_per_mb=20))
    got, wanted = (
        workers(case.world_size).run(megatron_cases.gradients, case, models / "qwen3_moe", uneven_batch(), SFTLoss())[0]
        for case in (spread, Case("megatron:d1"))
    )
    assert got.loss == pytest.approx(wanted.loss, rel=1e-5)
    assert_close(got.gradients, wanted.gradients, 1e-4)


def received_after_the_sender_has_freed_it() -> torch.Tensor | None:
    """In a worker: rank 0 frees a tensor and uses its memory again before rank 1 receives it."""
    compat.prepare()
    rank, others = dist.get_rank(), {"group": dist.group.WORLD, "prev_pipeline_rank": 1, "next_pipeline_rank": 1}
    received_N, later = torch.zeros(10_000), []
    sent_N = torch.ones(10_000)
    nothing = dict.fromkeys(("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next"))
    if rank == 0:
        sends = p2p_communication._p2p_ops(**{**nothing, "tensor_send_next": sent_N}, **others)
        deallocate_output_tensor(sent_N, deallocate_pipeline_outputs=True)
        later = [torch.full((10_000,), -1.0) for _ in range(20)]
        dist.barrier()
        sends["send_next"].wait()
        assert len(later) == 20
        return None
    dist.barrier()
    dist.recv(received_N, src=0)
    return received_N


def test_a_stage_may_free_what_it_is_still_sending(workers: Workers) -> None:
    _, received_N = workers(2).run(received_after_the_sender_has_freed_it)
    assert received_N.equal(torch.ones(10_000))


RECOMPUTED: dict[str, dict[str, Any]] = {
    "two layers at a time": {"recompute": "full", "transformer": {"recompute_num_layers": 2}},
    "one layer of each stage": {
        "recompute": "full",
        "transformer": {"recompute_method": "block", "recompute_num_layers": 1},
    },
    "attention": {"recompute": "selective", "transformer": {"recompute_modules": ["core_attn"]}},
    "norms": {"recompute": "selective", "transformer": {"recompute_modules": ["layernorm"]}},
    "parts of layers with experts": {
        "recompute": "selective",
        "transformer": {"recompute_modules": ["moe_act", "shared_experts", "layernorm", "core_attn"]},
    },
    "layers with experts": {"transformer": {"moe_layer_recompute": True}},
}


RECOMPUTING_MODELS = {
    "megatron:p2": "qwen2_moe",
    "megatron:(attn:t2|ffn:e2)": "deepseek_v3",
    "megatron:(attn:p2c2|ffn:p2e2)": "gpt_oss",
}


@pytest.fixture(scope="module")
def gradients_of(workers: Workers, models: Path) -> Callable[[str, str | None], Gradients]:
    """Returns what a layout computes, with what it recomputes."""

    def compute(layout: str, name: str | None) -> Gradients:
        case = Case(layout, MegatronConfig(**({} if name is None else RECOMPUTED[name])))
        run = workers(case.world_size).run
        return run(megatron_cases.gradients, case, models / RECOMPUTING_MODELS[layout], uneven_batch(), SFTLoss())[0]

    return cache(compute)


@pytest.mark.parametrize("layout", ["megatron:(attn:t2|ffn:e2)", *long("megatron:p2", "megatron:(attn:p2c2|ffn:p2e2)")])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_gradients_are_the_same_whatever_is_recomputed(
    gradients_of: Callable[[str, str | None], Gradients], name: str, layout: str
) -> None:
    got, wanted = gradients_of(layout, name), gradients_of(layout, None)
    torch.testing.assert_close(got.logprobs_T, wanted.logprobs_T, rtol=0, atol=0)
    assert_close(got.gradients, wanted.gradients, 1e-5)


@pytest.mark.parametrize(
    ("layout", "fields", "rule"),
    [
        ("megatron:p2", {"microbatch_group_size_per_vp_stage": 2}, "no virtual stages"),
        ("megatron:p2v2", {"microbatch_group_size_per_vp_stage": 3}, "must be a multiple of the 2 stages"),
        ("megatron:d1", {"moe_layer_recompute": True}, "qwen3 has none"),
        ("megatron:d1", {"moe_shared_expert_overlap": True}, "is about shared experts, and qwen3 has none"),
        ("megatron:p2", {"recompute_num_layers": 3}, "does not divide the 2 layers of a"),
    ],
)
def test_fields_that_the_layout_or_the_model_cannot_take_are_refused(
    models: Path, layout: str, fields: dict[str, Any], rule: str
) -> None:
    granularity = "full" if "recompute_num_layers" in fields else "none"
    config = EngineConfig(path="unused", megatron=MegatronConfig(recompute=granularity, transformer=fields))
    (line,) = megatron_problems("actor", config, load_shape(models / "qwen3"), parse_backend(layout))
    assert rule in line


def bfloat16_norms(case: Case, folder: Path) -> tuple[float, int]:
    """In a worker: return the gradient norm of a batch, and the elements of the gradient buffers."""
    engine = case.engine(folder, OptimizerConfig())
    engine.forward_backward_of(uneven_batch(), SFTLoss())
    return engine.optim_step().grad_norm, sum(buffer.grad_data.numel() for buffer in engine._buffers.buffers)


def test_gradients_in_bfloat16_may_be_summed_over_ranks_in_float32(workers: Workers, models: Path) -> None:
    results = [
        workers(2).run(
            bfloat16_norms, Case("megatron:d2", MegatronConfig(ddp=fields), dtype="bfloat16"), models / "qwen3-bf16"
        )[0]
        for fields in ({}, {"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True})
    ]
    assert results[0][0] == pytest.approx(results[1][0], rel=0.01)
    assert results[0][0] != results[1][0]


def test_padded_buckets_are_a_multiple_of_a_large_power_of_two(workers: Workers, models: Path) -> None:
    case = Case("megatron:d2", MegatronConfig(ddp={"pad_buckets_for_high_nccl_busbw": True}), dtype="bfloat16")
    _, n_elements = workers(2).run(bfloat16_norms, case, models / "qwen3-bf16")[0]
    assert n_elements % 2**16 == 0


def test_the_embedding_and_the_output_layer_may_have_a_rate_of_their_own(workers: Workers, models: Path) -> None:
    """A step that only decays moves each weight by its rate times the decay."""
    case = Case("megatron:d1", MegatronConfig(optimizer={"decoupled_lr": 0.2}))
    before = load_file(models / "qwen3" / "model.safetensors")
    (after,) = workers(1).run(decayed, case, models / "qwen3")
    for name, rate in (("model.embed_tokens.weight", 0.2), ("lm_head.weight", 0.2), (PROJECTION, 0.1)):
        torch.testing.assert_close(after[name], before[name] * (1 - rate * 0.5), rtol=1e-6, atol=0)


def test_the_decoupled_rate_decays_to_its_own_end() -> None:
    config = OptimizerConfig(lr=1.0, lr_scheduler_type="linear", min_lr_ratio=0.5)
    assert [learning_rate(step, config, 2, peak=4.0, end=1.0) for step in (0, 1, 2)] == [4.0, 2.5, 1.0]


def n_buckets(case: Case, folder: Path) -> int:
    engine = case.engine(folder, OptimizerConfig())
    return sum(len(group.buckets) for chunk in engine._chunks for group in chunk.bucket_groups)


def test_a_smaller_bucket_size_makes_more_buckets(workers: Workers, models: Path) -> None:
    counts = [
        workers(2).run(n_buckets, Case("megatron:d2", MegatronConfig(ddp=ddp)), models / "qwen3")[0]
        for ddp in ({}, {"bucket_size": 2000, "overlap_grad_reduce": True})
    ]
    assert counts[0] == 1 < counts[1]


def decayed(case: Case, folder: Path) -> Tensors:
    """In a worker: return the weights after a step that only decays them."""
    engine = case.engine(folder, OptimizerConfig(lr=0.1, weight_decay=0.5))
    batch = uneven_batch()
    engine.forward_backward_of(Batch(batch.lengths, batch.tokens_T, torch.zeros_like(batch.mask_T)), SFTLoss())
    engine.optim_step()
    return whole(engine.export_weights())


def test_apply_wd_to_qk_layernorm_decays_the_norms_of_queries_and_keys(workers: Workers, models: Path) -> None:
    case = Case("megatron:d1", MegatronConfig(optimizer={"apply_wd_to_qk_layernorm": True}))
    before = load_file(models / "qwen3" / "model.safetensors")
    (after,) = workers(1).run(decayed, case, models / "qwen3")
    for name, weight in before.items():
        exempt = weight.ndim == 1 and "q_norm" not in name and "k_norm" not in name
        torch.testing.assert_close(after[name], weight * (1.0 if exempt else 0.95), rtol=1e-6, atol=0)


def test_weight_decay_that_is_not_decoupled_goes_through_adam(workers: Workers, models: Path) -> None:
    """As an L2 penalty, decay is a gradient, of which Adam's first step keeps only the sign, times the whole rate."""
    case = Case("megatron:d1", MegatronConfig(optimizer={"decoupled_weight_decay": False}))
    before = load_file(models / "qwen3" / "model.safetensors")
    (after,) = workers(1).run(decayed, case, models / "qwen3")
    wanted = before[PROJECTION] - 0.1 * before[PROJECTION].sign()
    torch.testing.assert_close(after[PROJECTION], wanted, rtol=1e-4, atol=1e-4)


AUXILIARY: dict[str, dict[str, Any]] = {
    "moe_aux_loss_coeff": {"moe_aux_loss_coeff": 0.5},
    "moe_z_loss_coeff": {"moe_z_loss_coeff": 0.05},
    "seq_aux_loss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5},
    "global_aux_loss": {"moe_router_load_balancing_type": ["global_aux_loss"], "moe_aux_loss_coeff": [0.5]},
}
"""Fields of each auxiliary loss. Over one sequence, all load-balancing losses are the same."""


AUXILIARY_LAYOUTS = ("megatron:(attn:t2|ffn:e2)", "megatron:c2", "megatron:p2v2", "megatron:t2", "megatron:d2")


@pytest.mark.parametrize(
    ("layout", "name", "model"),
    [
        *((layout, "moe_aux_loss_coeff", "qwen3_moe") for layout in AUXILIARY_LAYOUTS[:3]),
        *long(*((layout, "moe_aux_loss_coeff", "qwen3_moe") for layout in AUXILIARY_LAYOUTS[3:])),
        ("megatron:(attn:t2|ffn:e2)", "moe_z_loss_coeff", "qwen3_moe"),
        *long(*((layout, "moe_z_loss_coeff", "qwen3_moe") for layout in AUXILIARY_LAYOUTS[1:])),
        ("megatron:c2", "seq_aux_loss", "qwen3_moe"),
        ("megatron:d2", "global_aux_loss", "qwen3_moe"),
        *long(("megatron:(attn:t2|ffn:e2)", "seq_aux_loss", "qwen3_moe")),
        *long(("megatron:c2", "global_aux_loss", "qwen3_moe")),
        # Experts are chosen within groups, which are not those of the largest probabilities.
        ("megatron:c2", "moe_aux_loss_coeff", "deepseek_v2"),
        *long(("megatron:d1", "seq_aux_loss", "deepseek_v2"), ("megatron:d1", "global_aux_loss", "deepseek_v2")),
    ],
)
def test_the_routers_auxiliary_losses_have_the_gradients_of_their_formulas(
    workers: Workers, models: Path, tmp_path: Path, layout: str, name: str, model: str
) -> None:
    """With one sequence, virtual stages and data parallelism have micro-batches of filler only."""
    kind = "moe_z_loss_coeff" if name == "moe_z_loss_coeff" else "moe_aux_loss_coeff"
    coefficient, folder = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.05}[kind], models / model
    case = Case(layout, MegatronConfig(transformer=AUXILIARY[name]))
    ((auxiliary, wanted),) = workers(1).run(
        hf_reference.gradients_with_auxiliary_loss, folder, ONE_SEQUENCE, kind, coefficient, tmp_path / "hf"
    )
    ((plain_loss, plain),) = workers(1).run(hf_reference.gradients, folder, ONE_SEQUENCE, SFTLoss(), tmp_path / "plain")
    got = workers(case.world_size).run(megatron_cases.gradients, case, folder, ONE_SEQUENCE, SFTLoss())[0]
    router = next(name for name in wanted if name.endswith("mlp.gate.weight"))
    assert (wanted[router] - plain[router]).norm() > 0.1 * plain[router].norm(), "the auxiliary loss must matter here"
    assert got.loss == pytest.approx(plain_loss, rel=1e-4), "the reported loss is the trained one alone"
    assert_close(got.gradients, wanted, 1e-4)
    told = {name: value for name, value in got.metrics.items() if name.endswith(("aux_loss", "z_loss"))}
    metric = {"moe_aux_loss_coeff": "aux_loss", "moe_z_loss_coeff": "z_loss"}.get(name, name)
    assert told == {f"experts/{metric}": pytest.approx(auxiliary, rel=1e-4)}


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        ("megatron:(attn:d2t2|ffn:e4)", "none"),
        ("megatron:p2v2", "full"),
        *long(("megatron:d1", "none"), ("megatron:(attn:c2|ffn:t2)", "none")),
        *long(("megatron:t2", "selective"), ("megatron:(attn:t2p2|ffn:e2)", "block")),
    ],
)
def test_the_balance_of_each_sequence_does_not_depend_on_layout_and_packing(
    workers: Workers, models: Path, tmp_path: Path, layout: str, recompute: Any
) -> None:
    folder, batch = models / "qwen3_moe", uneven_batch()
    ((auxiliary, wanted),) = workers(1).run(
        hf_reference.gradients_with_auxiliary_loss, folder, batch, "moe_aux_loss_coeff", 0.5, tmp_path / "hf"
    )
    balancing = AUXILIARY["seq_aux_loss"]
    options = {"recompute": recompute, "transformer": balancing}
    if recompute == "block":
        options = {"recompute": "full", "transformer": {**balancing, "recompute_method": "block"}}
    case = Case(layout, MegatronConfig(**options))
    got = workers(case.world_size).run(megatron_cases.gradients, case, folder, batch, SFTLoss())[0]
    assert_close(got.gradients, wanted, 1e-4)
    assert got.metrics["experts/seq_aux_loss"] == pytest.approx(auxiliary, rel=1e-4)


def routed_loads(case: Case, folder: Path, batch: Batch) -> tuple[dict[str, float], list[list[float]]]:
    """In a worker: return the metrics of the experts' load, and the choices of each layer, counted by a hook."""
    engine, counts = case.engine(folder, OptimizerConfig()), {}

    def note(router: TopKRouter, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        counts[router.layer_number] = counts.get(router.layer_number, 0) + outputs[1].sum(0)

    for router in engine.modules_of(TopKRouter):
        router.register_forward_hook(note)
    metrics = engine.forward_backward_of(batch, SFTLoss())
    loads = [counts[layer].tolist() for layer in sorted(counts)]
    return {name: value for name, value in metrics.items() if name.startswith("experts/")}, loads


def test_the_load_of_experts_is_that_of_all_ranks_without_filler(workers: Workers, models: Path) -> None:
    folder, batch = models / "qwen3_moe", uneven_batch()
    ((alone, loads),) = workers(1).run(routed_loads, Case("megatron:d1"), folder, batch)
    ratios = [max(layer) * len(layer) / sum(layer) for layer in loads]
    assert [alone[f"experts/imbalance/layer_{layer}"] for layer in range(4)] == pytest.approx(ratios, rel=1e-6)
    assert alone["experts/imbalance"] == pytest.approx(sum(ratios) / 4)
    assert alone["experts/imbalance/max"] == pytest.approx(max(ratios))
    assert alone["experts/dead"] == sum(load == 0 for layer in loads for load in layer)
    for layout, options in {
        "megatron:(attn:c2d2|ffn:t2e2)": {},
        "megatron:(attn:t2p2|ffn:e2)": {"recompute": "full"},
        "megatron:(attn:t2p2|ffn:t2)": {"recompute": "full", "transformer": {"recompute_method": "block"}},
    }.items():
        case = Case(layout, MegatronConfig(**options))
        for metrics, _ in workers(4).run(routed_loads, case, folder, batch):
            assert metrics == pytest.approx(alone)


def test_routes_that_are_forced_to_balance_do_not_follow_the_router(workers: Workers, models: Path) -> None:
    folder, batch = models / "qwen3_moe", uneven_batch()
    fields = {"moe_router_force_load_balancing": True}
    followed, forced = (
        workers(1).run(chosen_twice, Case("megatron:d1", MegatronConfig(transformer=each)), folder, batch)[0]
        for each in ({}, fields)
    )
    assert all(first.equal(second) for first, second in followed), "a router chooses by its input"
    assert not any(first.equal(second) for first, second in forced), "random routes differ from pass to pass"


def chosen_twice(case: Case, folder: Path, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """In a worker: return each layer's choices of experts in two passes over the same batch."""
    engine, found = case.engine(folder), list[torch.Tensor]()

    def note(router: TopKRouter, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        found.append(outputs[1].clone())

    for router in engine.modules_of(TopKRouter):
        router.register_forward_hook(note)
    for _ in range(2):
        engine.logprobs_of(batch, temperature=1.0)
    half = len(found) // 2
    return list(zip(found[:half], found[half:], strict=True))


@pytest.mark.parametrize("is_disabled", [False, True])
def test_partial_products_of_bfloat16_are_summed_in_float32_if_asked(
    workers: Workers, models: Path, is_disabled: bool
) -> None:
    fields = {"disable_bf16_reduced_precision_matmul": is_disabled}
    case = Case("megatron:d1", MegatronConfig(transformer=fields), dtype="bfloat16")
    (may_reduce,) = workers(1).run(may_reduce_in_bfloat16, case, models / "qwen3-bf16")
    assert may_reduce is not is_disabled


def may_reduce_in_bfloat16(case: Case, folder: Path) -> bool:
    """In a worker: build the engine, and return whether matrix products may sum in bfloat16; it was so before."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    case.engine(folder)
    allowed = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    return bool(allowed)


def test_group_limited_routing_visits_only_so_many_groups(workers: Workers, models: Path) -> None:
    fields = {"moe_router_num_groups": 4, "moe_router_group_topk": 1}
    case = Case("megatron:d1", MegatronConfig(transformer=fields))
    (groups,) = workers(1).run(groups_visited, case, models / "qwen3_moe", uneven_batch())
    assert groups == {1}
    (groups,) = workers(1).run(groups_visited, Case("megatron:d1"), models / "qwen3_moe", uneven_batch())
    assert groups == {1, 2}


def groups_visited(case: Case, folder: Path, batch: Batch) -> set[int]:
    """In a worker: return the numbers of groups of 2 experts that tokens visit."""
    engine, found = case.engine(folder), set()

    def note(router: TopKRouter, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        found.update(outputs[1].view(-1, 4, 2).any(-1).sum(-1).tolist())

    for router in engine.modules_of(TopKRouter):
        router.register_forward_hook(note)
    engine.logprobs_of(batch, temperature=1.0)
    return found
