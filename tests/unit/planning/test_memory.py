"""Memory of ranks against measured runs, against formulas, and against schedules that are played through."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fivefold.config.schema.engine import EngineConfig
from fivefold.config.schema.lora import LoraConfig
from fivefold.config.source import apply_overrides
from fivefold.families.read import find_shape
from fivefold.families.shape import ModelShape
from fivefold.layout.gpus import find_gpu
from fivefold.layout.parallel import ParallelLayout, with_stages
from fivefold.layout.parser import parse_backend
from fivefold.planning.activations import layer_costs
from fivefold.planning.groups import from_node_start, ranks_together
from fivefold.planning.memory import RankMemory, micro_batches_in_flight, training_memory
from fivefold.planning.model_estimate import trainer_memory
from fivefold.planning.recipe_inputs import engine_work
from fivefold.planning.stages import rank_parameters, stages, trained_rank_parameters
from fivefold.planning.timing import step_time
from fivefold.planning.workload import RECOMPUTE, StateBytes, Workload
from fivefold.rules.layouts import layout_problems

MEASURED = Path(__file__).parents[3] / "benchmarks" / "results" / "actor-update-h200.jsonl"
RUNS: list[dict[str, Any]] = [json.loads(line) for line in MEASURED.read_text().splitlines()]
RUN_IDS = [
    f"{run['model']}-{run['backend']}-{run['layers']}-{run['recompute']}-{len(run.get('set', []))}" for run in RUNS
]


def layers_of(name: str, count: int) -> ModelShape:
    shape = find_shape(name)
    return replace(shape, n_layers=count, moe_layers=shape.moe_layers[:count])


def planned(run: dict[str, Any]) -> tuple[ParallelLayout, ModelShape, Workload]:
    """Return layout, model and work of a measured run."""
    layout, shape = parse_backend(run["backend"]), layers_of(run["model"], run["layers"])
    keys = {
        "path": ".",
        "backend": run["backend"],
        "mb_spec": {"max_tokens_per_mb": run["micro_tokens"]},
        layout.backend: {"recompute": run["recompute"]},
    }
    values, problems = apply_overrides(keys, run.get("set", []))
    assert not problems
    config = EngineConfig.model_validate(values)
    work = engine_work(config, layout.backend, 4096, run["tokens_per_step"] // 4096)
    return with_stages(layout, config.megatron), shape, replace(work, n_fields=1)


@pytest.mark.parametrize("run", RUNS, ids=RUN_IDS)
def test_the_peak_is_what_was_measured_on_gpus(run: dict[str, Any]) -> None:
    memory = [stage.allocated / 1e9 for stage in trainer_memory(*planned(run))]
    # Early runs tell rank 0's memory only.
    peak = max(memory) if "peak_memory_gb_by_rank" in run else memory[0]
    assert peak == pytest.approx(run["peak_memory_gb"], rel=0.05)


@pytest.mark.parametrize("run", RUNS, ids=RUN_IDS)
def test_the_time_of_a_step_is_about_what_was_measured_on_gpus(run: dict[str, Any]) -> None:
    layout, shape, work = planned(run)
    if layout.etp > 1:
        pytest.skip("this run exchanged routed rows, through Megatron-Core's dispatcher")
    together = ranks_together(from_node_start(layout, 8), is_moe=shape.is_moe)
    time = step_time(layout, shape, work, find_gpu("h200"), together)
    assert time.total == pytest.approx(min(run["seconds"][1:]), rel=0.2)


def test_flash_attention_4_pads_no_values_and_is_faster() -> None:
    run = {"model": "DeepSeek-V3", "layers": 4, "backend": "megatron:d1", "micro_tokens": 8192, "recompute": "none"}
    run["tokens_per_step"] = 65536
    layout, shape, work = planned(run)
    *_, faster = planned({**run, "set": ["attn_impl=flash_attention_4"]})
    plain, other = (training_memory(layout, shape, each)[0].activations for each in (work, faster))
    # Zeros behind the values of each layer, and behind the outputs: the padded ones are kept too.
    padding = shape.query_width - shape.output_width
    assert plain - other >= 4 * 2 * 8192 * padding
    seconds = [step_time(layout, shape, each, find_gpu("h200"), {}).layers for each in (work, faster)]
    assert seconds[1] < seconds[0]


LAYOUTS = [
    ("Qwen3-30B-A3B", "megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)"),
    ("Qwen3-30B-A3B", "megatron:(attn:d2p2t4v3|ffn:t2e2)"),
    ("Qwen3-0.6B", "megatron:d2t2p4"),
    ("Mixtral-8x7B", "megatron:d4t4e8"),
    ("DeepSeek-V3", "megatron:(attn:d2p16t8|ffn:e16)"),
]


@pytest.mark.parametrize(("name", "backend"), LAYOUTS)
def test_shards_of_all_ranks_add_up_to_the_model(name: str, backend: str) -> None:
    """Experts appear once in each group of ep * etp ranks; of dense weights, some are whole on each of tp ranks."""
    shape, layout = find_shape(name), parse_backend(backend)
    held = [rank_parameters(layout, shape, stage) for stage in stages(layout, shape)]
    experts = sum(rank.experts for rank in held) * layout.ep * layout.etp
    assert experts == shape.n_moe_layers * shape.n_experts * shape.expert_parameters
    norms = shape.n_layers * 2 * shape.hidden + shape.hidden
    mixers = sum(shape.whole_mixer_parameters(kind) for kind in shape.layer_kinds)
    whole = norms + mixers + shape.n_moe_layers * shape.router_parameters
    dense = sum(rank.dense for rank in held) * layout.tp - (layout.tp - 1) * whole
    padding = 0 if shape.vocab % layout.tp == 0 else (layout.tp - shape.vocab % layout.tp) * shape.hidden
    # Tied embeddings stand on both ends of a pipeline.
    twice = shape.vocab * shape.hidden if shape.tied_embeddings and layout.pp > 1 else 0
    assert dense + experts == shape.n_parameters + twice + padding


@pytest.mark.parametrize(
    ("experts", "of_attention", "of_experts"),
    [("each", 0.84e6, 51.9e6), ("shared_outer", 0.84e6, 14.45e6), ("none", 0.84e6, 0)],
)
def test_adapters_are_counted_by_their_ranks(experts: str, of_attention: float, of_experts: float) -> None:
    """Of Qwen3-30B-A3B: an adapter has as many parameters as its weight has rows and columns, times its rank."""
    keys = {"rank": 32, "experts": experts, **({"rank_of_experts": 4} if of_experts else {})}
    shape = find_shape("Qwen3-30B-A3B").with_lora(LoraConfig.model_validate(keys))
    layout = with_stages(parse_backend("megatron:d1"), EngineConfig(path=".").megatron)
    [stage] = stages(layout, shape)
    trained = trained_rank_parameters(layout, shape, stage)
    assert trained.total == pytest.approx(32 * of_attention + 4 * of_experts, rel=0.01)


def test_frozen_weights_have_neither_gradients_nor_optimizer_state() -> None:
    shape, backend = find_shape("Qwen3-30B-A3B"), "megatron:(attn:d8|ffn:e8)"
    config = EngineConfig(path=".", backend=backend)
    layout, work = with_stages(parse_backend(backend), config.megatron), engine_work(config, "megatron", 4096, 64)
    whole, some = (training_memory(layout, replace(shape, frozen=frozen), work)[0] for frozen in ((), ("*.experts.*",)))
    experts = 48 * 128 // 8 * 3 * 2048 * 768
    assert whole.weights == some.weights
    assert some.frozen == 2 * experts
    assert whole.gradients - some.gradients == work.gradient_bytes * experts
    assert whole.optimizer - some.optimizer == work.state.of(work.element_bytes) * experts


def test_every_layer_is_on_one_stage() -> None:
    for backend in ("megatron:p4v3", "megatron:p16", "megatron:p5"):
        for name in ("Qwen3-30B-A3B", "DeepSeek-V3"):
            layout, shape = parse_backend(backend), find_shape(name)
            if not any(layout_problems(layout, shape)):
                chunks = [chunk for stage in stages(layout, shape) for chunk in stage.chunks]
                assert sorted(layer for chunk in chunks for layer in chunk) == list(range(shape.n_layers))


def test_what_is_recomputed_is_not_kept() -> None:
    """The modules of a layer with experts, and the layers of a stage, add up."""
    shape, layout = find_shape("Qwen3-30B-A3B"), parse_backend("megatron:p4")
    work = Workload(sequence_length=4096, sequences=64, micro_tokens=8192)

    def kept(**recompute: Any) -> int:
        return training_memory(layout, shape, replace(work, **recompute))[1].activations

    nothing, whole = kept(), kept(recompute="full")
    halves = kept(recompute="full", recompute_block=True, recompute_layers=6)
    assert halves == pytest.approx((nothing + whole) / 2, rel=1e-6)
    assert kept(recompute="full", recompute_layers=2) < whole
    saved = {
        module: nothing - kept(recompute="selective", recompute_modules=(module,))
        for module in ("core_attn", "layernorm", "moe_act", "moe")
    }
    assert all(amount > 0 for amount in saved.values())
    assert saved["moe_act"] < saved["moe"]
    # One activation of 768 channels for each of 8 experts of a token, in 12 layers and 3 micro-batches in flight.
    assert saved["moe_act"] == 3 * 12 * 8192 * 8 * 768 * 2
    # Two norms, whose outputs are the inputs of projections.
    assert saved["layernorm"] == 3 * 12 * 8192 * 2 * 2048 * 2
    both = kept(recompute="selective", recompute_modules=("core_attn", "moe"))
    assert nothing - both == pytest.approx(saved["core_attn"] + saved["moe"], rel=1e-6)


def test_recomputed_blocks_are_the_first_layers_of_their_stage_whatever_these_are() -> None:
    """Of DeepSeek-V3's first stage, the three dense layers are recomputed, and the others keep what they save."""
    shape, layout = find_shape("DeepSeek-V3"), parse_backend("megatron:(attn:p8|ffn:p8e1)")
    work = Workload(sequence_length=4096, sequences=64, micro_tokens=8192)
    dense, moe = (layer_costs(shape, layout, work, is_moe=is_moe) for is_moe in (False, True))

    def kept(n_layers: int) -> float:
        changed = replace(work, recompute="full", recompute_block=True, recompute_layers=n_layers)
        first = training_memory(layout, shape, changed)[0]
        return first.activations / first.in_flight

    assert kept(2) - kept(3) == pytest.approx(dense.saved - dense.input)
    assert kept(3) - kept(4) == pytest.approx(moe.saved - moe.input)


def test_a_stage_without_a_layer_is_refused() -> None:
    assert not list(layout_problems(parse_backend("megatron:p16"), layers_of("Qwen3-30B-A3B", 47)))
    assert list(layout_problems(parse_backend("megatron:p64"), find_shape("DeepSeek-V3")))


def played(pp: int, stage: int, vpp: int, count: int) -> int:
    """Play one rank's schedule through, and return the most forward passes that wait for their backward pass."""
    total = count * vpp
    warm_up = min(total, pp - stage - 1 if vpp == 1 else (pp - stage - 1) * 2 + (vpp - 1) * pp)
    waiting = most = warm_up
    for _ in range(total - warm_up):
        waiting += 1
        most = max(most, waiting)
        waiting -= 1
    return most


@pytest.mark.parametrize("vpp", [1, 2, 3])
@pytest.mark.parametrize("sequences", [1, 3, 8, 40])
def test_micro_batches_in_flight_are_those_of_the_schedule(vpp: int, sequences: int) -> None:
    layout = ParallelLayout("megatron", tp=1, pp=4, cp=1, dp=1, vpp=vpp, ep=1, etp=1, edp=1)
    work = Workload(100, sequences, 100)
    for stage in range(4):
        expected = played(4, stage, vpp, work.micro_batches(layout))
        assert micro_batches_in_flight(layout, work, stage) * vpp == expected


def first(backend: str, shape: ModelShape | None = None, **changes: Any) -> RankMemory:
    values = {"sequence_length": 4096, "sequences": 64, "micro_tokens": 8192, **changes}
    return training_memory(parse_backend(backend), shape or layers_of("Qwen3-30B-A3B", 8), Workload(**values))[0]


def test_state_is_so_many_bytes_a_parameter() -> None:
    shape = layers_of("Qwen3-30B-A3B", 8)
    alone = first("megatron:d1")
    assert alone.weights == 2 * shape.n_parameters
    assert alone.gradients == 4 * shape.n_parameters
    assert alone.optimizer == 12 * shape.n_parameters
    eight = first("megatron:d8")
    assert eight.weights == alone.weights
    assert eight.optimizer == pytest.approx(alone.optimizer / 8)
    # Float32 weights need no master copy.
    full = first("megatron:d1", element_bytes=4)
    assert (full.weights, full.optimizer) == (4 * shape.n_parameters, 8 * shape.n_parameters)


@pytest.mark.parametrize(
    ("state", "element_bytes", "bytes_each"),
    [
        (StateBytes(), 2, 12),
        (StateBytes(), 4, 8),
        (StateBytes(master=2), 2, 10),
        (StateBytes(exp_avg=2), 2, 10),
        (StateBytes(master=2, exp_avg=2, exp_avg_sq=2), 2, 6),
    ],
)
def test_state_is_counted_in_its_precision_where_it_is(state: StateBytes, element_bytes: int, bytes_each: int) -> None:
    n_parameters = layers_of("Qwen3-30B-A3B", 8).n_parameters
    device = first("megatron:d2", state=state, element_bytes=element_bytes)
    host = first("megatron:d2", state=replace(state, on_host=True), element_bytes=element_bytes)
    assert device.optimizer == host.host_optimizer == pytest.approx(bytes_each * n_parameters / 2, abs=1)
    assert host.optimizer == device.host_optimizer == 0
    # Three buckets of 2^25 elements pass through the GPU.
    assert host.update - device.update == 3 * 2**25 * bytes_each
    assert device.kept(()) - host.kept(()) == device.optimizer
    assert host.on_host(()) == device.on_host(("optimizer",)) == device.optimizer


def test_gradients_in_bfloat16_take_half() -> None:
    assert first("megatron:d1", gradient_bytes=2).gradients == first("megatron:d1").gradients // 2


def test_buckets_and_activations_are_not_alive_together() -> None:
    host = first("megatron:d8", state=StateBytes(on_host=True), recompute="full")
    assert host.allocated == host.resident + host.buffers + host.activations + max(host.logprobs, host.temporaries)
    few = {"sequence_length": 16, "sequences": 8, "micro_tokens": 16, "logprob_chunk": 1}
    small = first("megatron:d8", find_shape("Qwen3-0.6B"), state=StateBytes(on_host=True), **few)
    assert small.allocated == small.resident + small.buffers + small.update


def test_more_recomputation_keeps_less() -> None:
    kept = [first("megatron:d1", recompute=mode).activations for mode in RECOMPUTE]
    assert kept == sorted(kept, reverse=True)
    peaks = [first("megatron:d1", recompute=mode).allocated for mode in RECOMPUTE]
    assert peaks == sorted(peaks, reverse=True)
    # Full: one residual stream [tokens, hidden] in bfloat16 a layer.
    assert kept[-1] == 8 * 8192 * 2048 * 2


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B", "DeepSeek-V3"])
def test_tensor_parallelism_divides_what_is_kept(name: str) -> None:
    shape = layers_of(name, 8)
    once, twice = (first(f"megatron:t{degree}", shape).activations for degree in (1, 2))
    assert twice == pytest.approx(once / 2, rel=0.01)


def test_gathered_keys_and_values_grow_with_context_parallelism() -> None:
    shape = layers_of("Qwen3-8B", 8)
    kept = {degree: first(f"megatron:c{degree}", shape).activations for degree in (1, 4)}
    tokens, keys = 8192 // 4, shape.key_width + shape.value_width
    # A rank attends to prefixes of 9 of the 8 chunks, twice 1024 tokens of its own: 9216 rows in place of 2048.
    extra = 8 * 2 * (9216 - tokens) * keys
    assert kept[4] == pytest.approx(kept[1] / 4 + extra, rel=1e-3)


def test_a_sequence_longer_than_a_micro_batch_counts_in_full() -> None:
    assert first("megatron:d1", sequence_length=16384).activations == 2 * first("megatron:d1").activations


def test_the_reference_model_costs_its_weights() -> None:
    layout, shape = parse_backend("megatron:d2"), layers_of("Qwen3-8B", 4)
    work = Workload(1024, 8, 1024)
    without, with_reference = (
        training_memory(layout, shape, work, reference=shape if flag else None)[0] for flag in (False, True)
    )
    assert with_reference.total - without.total == without.weights


def test_the_head_is_on_the_last_stage_only() -> None:
    memory = training_memory(parse_backend("megatron:p2"), find_shape("Qwen3-8B"), Workload(4096, 16, 8192))
    assert [stage.logprobs > 0 for stage in memory] == [False, True]
    longer = Workload(4096, 16, 8192, logprob_chunk=2048)
    chunked = training_memory(parse_backend("megatron:p2"), find_shape("Qwen3-8B"), longer)
    assert chunked[1].logprobs > memory[1].logprobs
