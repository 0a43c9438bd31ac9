"""Adapters drop their inputs as PEFT does: in training alone, the same ones where a layer is computed again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import AnyCase, case_of
from compare import assert_close, difference
from fsdp_cases import FSDPCase
from hf_reference import Step, Tensors, load_model, predict
from megatron_cases import Case, whole
from ragged import uneven_batch
from safetensors.torch import load_file
from test_adapters import ALL_LAYERS, OPTIMIZER
from test_checkpoint import assert_equal, commit
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.bridge.adapters import WithAdapters
from fivefold.bridge.hf_reader import HFWeights
from fivefold.config.schema.engine import EngineConfig, FSDPConfig, MicroBatchConfig
from fivefold.config.schema.lora import LoraConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.engine.dropout import Dropout, Stream
from fivefold.families.adapters import AdapterShape, adapter_name
from fivefold.families.read import load_shape
from fivefold.layout.parser import parse_backend
from fivefold.planning.fsdp_memory import fsdp_memory
from fivefold.planning.memory import training_memory
from fivefold.planning.recipe_inputs import engine_work
from tests.rows import long

HALF = replace(ALL_LAYERS, dropout=0.5)
FULL = MegatronConfig(recompute="full")
SELECTIVE = MegatronConfig(recompute="selective")
N_STEPS = 2


def negatives(_self: Dropout, x: torch.Tensor, _stream: Stream) -> torch.Tensor:
    """Drop what is negative, at a rate of a half: a choice that no layout changes, and no rounding by much."""
    return 2 * x.relu()


@dataclass(frozen=True)
class Trained:
    steps: list[Step]
    weights: Tensors
    """The merged weights."""


def train(engine: Any, n_steps: int = N_STEPS) -> Trained:
    steps = []
    for _ in range(n_steps):
        metrics = engine.forward_backward_of(uneven_batch(), SFTLoss())
        steps.append(Step(metrics["loss"], engine.optim_step().grad_norm))
    return Trained(steps, whole(engine.export_weights()))


def train_without_negatives(case: AnyCase, folder: Path, shape: AdapterShape) -> Trained:
    """In a worker."""
    with patch.object(Dropout, "__call__", negatives):
        return train(case.engine(folder, OPTIMIZER, adapters=shape))


def hf_train(folder: Path, shape: AdapterShape) -> Trained:
    """In a worker: the same in Hugging Face's model, with every expert's rows multiplied one expert after another."""
    model, base, batch = load_model(folder), load_file(folder / "model.safetensors"), uneven_batch()
    drawn = WithAdapters(HFWeights(folder), replace(load_shape(folder), adapters=shape), seed=1)
    adapters = {name: drawn.read(name).requires_grad_() for name in drawn.names - base.keys()}

    def product(weight: str, x: torch.Tensor) -> torch.Tensor:
        a, b = (adapters[adapter_name(weight, matrix)] for matrix in ("A", "B"))
        return x @ base[weight].T + shape.scale(len(a)) * negatives(None, x, "rank") @ a.T @ b.T  # type: ignore[arg-type]

    def adapted(name: str) -> Any:
        return lambda x: product(f"{name}.weight", x)

    def experts(name: str) -> Any:
        def forward(hidden_TH: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
            total_TH = torch.zeros_like(hidden_TH)
            for token in range(len(hidden_TH)):
                for expert, weight in zip(chosen_TK[token].tolist(), weights_TK[token], strict=True):
                    gate, up = (
                        product(f"{name}.{expert}.{kind}_proj.weight", hidden_TH[token]) for kind in ("gate", "up")
                    )
                    down = product(f"{name}.{expert}.down_proj.weight", torch.nn.functional.silu(gate) * up)
                    total_TH = total_TH.index_add(0, torch.tensor([token]), (weight * down)[None])
            return total_TH

        return forward

    for name, module in list(model.named_modules()):
        if adapter_name(f"{name}.weight", "A") in adapters:
            module.forward = adapted(name)
        elif name.endswith(".experts"):
            module.forward = experts(name)
    optimizer = torch.optim.AdamW(
        adapters.values(),
        lr=OPTIMIZER.lr,
        weight_decay=0.1,
        eps=OPTIMIZER.eps,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
    )
    steps = []
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        total = 0.0
        for tokens_L, mask_L in zip(batch.split(batch.tokens_T), batch.split(batch.mask_T), strict=True):
            cost = -(predict(model, tokens_L, 1.0)[0] * mask_L).sum() / batch.mask_T.sum()
            cost.backward()
            total += float(cost)
        norm = torch.nn.utils.clip_grad_norm_(adapters.values(), OPTIMIZER.gradient_clipping)
        optimizer.step()
        steps.append(Step(total, float(norm)))
    merged = dict(base)
    for name in base:
        if (a := adapters.get(adapter_name(name, "A"))) is not None:
            merged[name] = base[name] + shape.scale(len(a)) * adapters[adapter_name(name, "B")].detach() @ a.detach()
    return Trained(steps, merged)


LAYOUTS: list[tuple[str, AnyCase]] = [
    ("qwen3_moe", Case("megatron:(attn:p2t2|ffn:p2e2)", FULL)),
    ("qwen3_moe", FSDPCase("fsdp:d2t2", FSDPConfig(recompute="full"))),
]
FURTHER: list[tuple[str, AnyCase]] = [
    ("qwen3_moe", Case("megatron:(attn:d2|ffn:t2)")),
    ("qwen3_moe", Case("megatron:d1")),
    ("qwen3_moe", Case("megatron:c2", SELECTIVE)),
    ("qwen3", Case("megatron:t2")),
    ("qwen3_next", Case("megatron:(attn:t2|ffn:e2)")),
    ("qwen3_moe", FSDPCase("fsdp:d1")),
    ("qwen3_moe", FSDPCase("fsdp:c2")),
]


@pytest.mark.parametrize(
    ("model", "case"),
    [*LAYOUTS, *long(*FURTHER)],
    ids=[f"{model} {case.layout}" for model, case in (*LAYOUTS, *FURTHER)],
)
def test_adapters_whose_inputs_are_dropped_train_as_in_plain_autograd(
    workers: Workers, models: Path, model: str, case: AnyCase
) -> None:
    folder = models / model
    (wanted,) = workers(1).run(hf_train, folder, HALF)
    result, *_ = workers(case.world_size).run(train_without_negatives, case, folder, HALF)
    for ours, theirs in zip(result.steps, wanted.steps, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)
    before = load_file(folder / "model.safetensors")
    assert_close(difference(result.weights, before), difference(wanted.weights, before), 5e-3)


def peft_losses(folder: Path, saved: Path) -> tuple[float, float]:
    """In a worker: return PEFT's loss in training, of the adapters in a folder, and without dropout."""
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(saved)
    config.lora_dropout = 0.5
    model, batch, losses = PeftModel.from_pretrained(load_model(folder), saved, config=config), uneven_batch(), []
    dropped = [module for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert {module.p for module in dropped} == {0.5}
    with patch.object(torch.nn.Dropout, "forward", lambda self, x: 2 * x.relu() if self.training else x):
        for is_training in (True, False):
            model.train(is_training)
            rows = zip(batch.split(batch.tokens_T), batch.split(batch.mask_T), strict=True)
            costs = [(predict(model, tokens_L, 1.0)[0] * mask_L).sum() for tokens_L, mask_L in rows]
            losses.append(float(-sum(costs) / batch.mask_T.sum()))
    return losses[0], losses[1]


def losses_after_steps(case: AnyCase, folder: Path, shape: AdapterShape, saved: Path) -> tuple[float, float]:
    """In a worker: save the adapters after steps; return the loss in training, and without dropout."""
    with patch.object(Dropout, "__call__", negatives):
        engine, batch = case.engine(folder, OPTIMIZER, adapters=shape), uneven_batch()
        train(engine)
        engine.save_adapters(saved)
        logprobs_T, _ = engine.logprobs_of(batch, temperature=1.0)
        mean = float(-(logprobs_T * batch.mask_T).sum() / batch.mask_T.sum())
        return engine.forward_backward_of(batch, SFTLoss())["loss"], mean


@pytest.mark.parametrize("layout", ["megatron:t2", *long("fsdp:t2")])
def test_dropout_is_where_peft_has_it(workers: Workers, models: Path, tmp_path: Path, layout: str) -> None:
    pytest.importorskip("peft")
    folder = models / "qwen3"
    ours, *_ = workers(2).run(losses_after_steps, case_of(layout), folder, HALF, tmp_path / "adapter")
    (theirs,) = workers(1).run(peft_losses, folder, tmp_path / "adapter")
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert ours[0] != pytest.approx(ours[1], rel=1e-3)


@dataclass(frozen=True)
class Drawn:
    stream: Stream
    x: torch.Tensor
    is_kept: torch.Tensor


def draws(case: AnyCase, folder: Path) -> list[Drawn]:
    """In a worker: return what one step drops on this rank; B is not 0, so that all of it matters."""
    found, call = list[Drawn](), Dropout.__call__

    def noting(self: Dropout, x: torch.Tensor, stream: Stream) -> torch.Tensor:
        # Zeros among the inputs tell nothing.
        is_kept = call(self, torch.ones_like(x), stream) != 0
        found.append(Drawn(stream, x.detach().clone(), is_kept))
        return x * is_kept * 2

    engine = case.engine(folder, OPTIMIZER, adapters=HALF)
    with patch.object(Dropout, "__call__", noting):
        train(engine, 2)
    return found


SHARED_STREAMS = {
    # Tokens are divided over the ranks but for experts in slices.
    "megatron:t2": {"rank"},
    "megatron:(attn:d2|ffn:t2)": {"rank", "tensor", "expert"},
    "megatron:d2e2": {"rank", "tensor", "expert"},
    "fsdp:t2": {"rank", "tensor"},
    "fsdp:d2": {"rank", "tensor"},
    "fsdp:c2": {"rank", "tensor"},
}


@pytest.mark.parametrize(
    "layout", ["megatron:(attn:d2|ffn:t2)", "megatron:d2e2", "fsdp:t2", *long("megatron:t2", "fsdp:d2", "fsdp:c2")]
)
def test_ranks_drop_the_same_inputs_where_they_see_the_same(workers: Workers, models: Path, layout: str) -> None:
    ranks = workers(2).run(draws, case_of(layout), models / ("qwen3" if layout == "megatron:t2" else "qwen3_moe"))
    assert {each.stream for each in ranks[0]} == SHARED_STREAMS[layout]
    pairs, n_same = list(zip(*ranks, strict=False)), 0
    for one, other in pairs:
        assert one.stream == other.stream
        sees_same = one.x.shape == other.x.shape and torch.equal(one.x, other.x)
        drops_same = one.is_kept.shape == other.is_kept.shape and torch.equal(one.is_kept, other.is_kept)
        if one.is_kept.numel() > 64 and other.is_kept.numel() > 64:
            assert sees_same == drops_same, one.stream
        n_same += sees_same
    assert (n_same > 0) == (layout in ("megatron:(attn:d2|ffn:t2)", "fsdp:t2"))


@pytest.mark.parametrize("layout", ["megatron:d1", "fsdp:d1", *long("fsdp:t2")])
def test_a_plan_counts_what_is_left_of_the_inputs_and_the_choice(workers: Workers, models: Path, layout: str) -> None:
    case, folder = case_of(layout, micro_batches=MicroBatchConfig(max_tokens_per_mb=200)), models / "qwen3_moe"
    found, *_ = workers(case.world_size).run(draws, case, folder)
    kept = sum(each.x.nbytes + each.is_kept.nbytes for each in found) / 2
    degrees, n_tokens = parse_backend(layout), uneven_batch().n_tokens
    memory = fsdp_memory if degrees.backend == "fsdp" else lambda *args: training_memory(*args)[0]
    config = EngineConfig(path=".", backend=layout, dtype="float32")
    work = replace(engine_work(config, degrees.backend, n_tokens, 1), micro_tokens=n_tokens)
    with_, without = (
        memory(degrees, replace(load_shape(folder), adapters=shape), work).activations for shape in (HALF, ALL_LAYERS)
    )
    assert with_ - without == pytest.approx(kept, abs=100)


def seeded(case: AnyCase, folder: Path, shape: AdapterShape, seed: int = 1) -> tuple[Trained, torch.Tensor]:
    """In a worker: return the training, and log-probs before it."""
    engine = case.engine(folder, OPTIMIZER, adapters=shape, seed=seed)
    logprobs_T, _ = engine.logprobs_of(uneven_batch(), temperature=1.0)
    return train(engine), logprobs_T


RECOMPUTING: list[tuple[str, AnyCase, list[AnyCase]]] = [
    ("qwen3_moe", Case("megatron:t2e2"), [Case("megatron:t2e2", FULL)]),
    ("qwen3_moe", FSDPCase("fsdp:d2"), [FSDPCase("fsdp:d2", FSDPConfig(recompute="full"))]),
]
RECOMPUTING_TOO: list[tuple[str, AnyCase, list[AnyCase]]] = [
    ("qwen3_moe", Case("megatron:t2e2"), [Case("megatron:t2e2", SELECTIVE)]),
    ("qwen3_moe", Case("megatron:p2v2"), [Case("megatron:p2v2", FULL)]),
    ("deepseek_v2", Case("megatron:t2"), [Case("megatron:t2", SELECTIVE)]),
    ("qwen3_moe", FSDPCase("fsdp:t2"), [FSDPCase("fsdp:t2", FSDPConfig(recompute="full"))]),
]


@pytest.mark.parametrize(
    ("model", "case", "others"),
    [*RECOMPUTING, *long(*RECOMPUTING_TOO)],
    ids=[f"{model} {case.layout}" for model, case, _ in (*RECOMPUTING, *RECOMPUTING_TOO)],
)
def test_a_layer_that_is_computed_again_drops_the_same_inputs(
    workers: Workers, models: Path, model: str, case: AnyCase, others: list[AnyCase]
) -> None:
    folder, run = models / model, workers(case.world_size).run
    once, before = run(seeded, case, folder, HALF)[0]
    for other in others:
        again, _ = run(seeded, other, folder, HALF)[0]
        assert again.steps == once.steps
        assert_equal(again.weights, once.weights)
    without, plain = run(seeded, case, folder, ALL_LAYERS)[0]
    assert torch.equal(before, plain), "log-probs drop nothing"
    assert without.steps[1:] != once.steps[1:]
    other_seed, _ = run(seeded, case, folder, HALF, 2)[0]
    assert other_seed.steps != once.steps


def train_save_and_go_on(case: AnyCase, folder: Path, state: Path) -> Trained:
    """In a worker: save after two steps, and make two more."""
    engine = case.engine(folder, OPTIMIZER, adapters=HALF)
    train(engine, 2)
    snapshot = engine.snapshot(state)
    trained = train(engine, 2)
    commit(snapshot, state)
    return trained


def go_on(case: AnyCase, folder: Path, state: Path) -> Trained:
    """In a worker: load, and make two steps."""
    engine = case.engine(folder, OPTIMIZER, adapters=HALF)
    engine.load(state)
    return train(engine, 2)


@pytest.mark.parametrize("layout", ["megatron:(attn:d2|ffn:t2)", *long("fsdp:t2")])
def test_a_run_that_drops_inputs_resumes_bit_for_bit(
    workers: Workers, models: Path, tmp_path: Path, layout: str
) -> None:
    case, folder = case_of(layout), models / "qwen3_moe"
    unbroken, *_ = workers(2).run(train_save_and_go_on, case, folder, tmp_path)
    resumed, *_ = workers(2).run(go_on, case, folder, tmp_path)
    assert resumed.steps == unbroken.steps
    assert_equal(resumed.weights, unbroken.weights)


class Store:
    def __init__(self) -> None:
        self.states: dict[str, torch.Tensor] = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = states


def many_draws(rate: float) -> list[torch.Tensor]:
    """In a worker."""
    dropout = Dropout(rate, 7, {"rank": None}, Store())
    return [dropout(torch.full((100, 50), 3.0), "rank") for _ in range(20)]


@pytest.mark.parametrize("rate", [0.1, 0.75])
def test_dropped_inputs_are_a_share_and_the_mean_stays(workers: Workers, rate: float) -> None:
    (found,) = workers(1).run(many_draws, rate)
    drawn = torch.stack(found)
    is_kept = drawn != 0
    assert torch.allclose(drawn[is_kept], torch.tensor(3.0 / (1 - rate)))
    # Five standard deviations of a binomial count.
    n = drawn.numel()
    assert abs(float(is_kept.float().mean()) - (1 - rate)) < 5 * (rate * (1 - rate) / n) ** 0.5
    assert len({tuple(each.flatten().tolist()) for each in is_kept}) == len(drawn), "each draw is another one"
    # Bits of one place, and of neighbours, are independent.
    dropped = (~is_kept).double() - rate
    for pairs in (dropped[1:] * dropped[:-1], dropped[:, :, 1:] * dropped[:, :, :-1]):
        assert abs(float(pairs.mean())) < 5 * rate * (1 - rate) / pairs.numel() ** 0.5


def test_the_recipe_says_how_much_is_dropped(models: Path) -> None:
    shape = load_shape(models / "qwen3").with_lora(LoraConfig(dropout=0.25))
    assert shape.adapters is not None
    assert shape.adapters.dropout == 0.25
