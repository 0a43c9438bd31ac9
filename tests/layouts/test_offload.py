"""Offloading frees what it says, and training goes on afterwards as if it had not happened."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from cases import AnyCase, case_of
from fsdp_cases import FSDPCase, OpenFSDPEngine
from hf_reference import Tensors
from megatron_cases import Case, OpenEngine, whole
from ragged import uneven_batch
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.config.schema.engine import FSDPConfig, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.engine.contract import OFFLOADABLE, Offloadable
from tests.rows import long

OPTIMIZER = OptimizerConfig(lr=1e-3)
SMALL = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16", "store_param_remainders": True}


def train(engine: OpenEngine | OpenFSDPEngine) -> None:
    engine.forward_backward_of(uneven_batch(), SFTLoss())
    engine.optim_step()


def weights_after_two_steps(case: AnyCase, folder: Path, between: tuple[tuple[Offloadable, ...], ...]) -> Tensors:
    """In a worker: make two steps, and between them offload and bring back each of `between`."""
    engine = case.engine(folder, OPTIMIZER)
    train(engine)
    for what in between:
        freed, allocated = engine.offload(what), engine.onload(what)
        # FSDP has no gradients between steps.
        assert freed == allocated >= (0 if what == ("grads",) else 1)
    train(engine)
    return whole(engine.export_weights())


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("megatron:d2e2", "bfloat16"),
        ("fsdp:d3", "bfloat16"),
        *long(("megatron:p2v2", "float32"), ("megatron:d1", "float32"), ("megatron:d1", "bfloat16")),
    ],
)
def test_training_goes_on_as_if_nothing_had_been_offloaded(
    workers: Workers, models: Path, layout: str, dtype: str
) -> None:
    case, model = case_of(layout, dtype=dtype), models / "qwen3_moe"
    run = workers(case.world_size)
    wanted = run.run(weights_after_two_steps, case, model, ())[0]
    between: tuple[tuple[Offloadable, ...], ...] = (OFFLOADABLE, ("params",), ("grads",), ("optimizer",), OFFLOADABLE)
    got = run.run(weights_after_two_steps, case, model, between)[0]
    assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []


def held(engine: OpenEngine) -> dict[str, int]:
    """Return the bytes that this rank holds of each kind."""
    buffers = engine._buffers.buffers
    state = [tensor for bucket in engine.optimizer.state.buckets for tensor in bucket.stored.values()]
    tensors = {"params": [b.param_data for b in buffers], "grads": [b.grad_data for b in buffers], "optimizer": state}
    return {kind: sum(tensor.untyped_storage().nbytes() for tensor in those) for kind, those in tensors.items()}


def freed(case: Case, folder: Path) -> list[tuple[str, int, dict[str, int], dict[str, int]]]:
    """In a worker: return, for each kind, what `offload` says to have freed, and what is held before and after."""
    engine = case.engine(folder, OPTIMIZER)
    found = []
    for what in OFFLOADABLE:
        before = held(engine)
        n_bytes = engine.offload([what])
        assert engine.offload([what]) == 0
        found.append((what, n_bytes, before, held(engine)))
        engine.onload([what])
        assert held(engine) == before
    return found


def gradients_after_others(case: AnyCase, folder: Path, loses: bool) -> Tensors:
    """In a worker: compute gradients after a step; otherwise than with `loses`, no others were computed and lost."""
    engine = case.engine(folder, OPTIMIZER)
    train(engine)
    if loses:
        engine.forward_backward_of(uneven_batch(seed=1), SFTLoss())
        engine.offload(("grads",))
        engine.onload(("grads",))
    engine.forward_backward_of(uneven_batch(), SFTLoss())
    return whole(engine.gradients())


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_that_were_offloaded_leave_nothing_behind(workers: Workers, models: Path, overlap: bool) -> None:
    case = Case("megatron:d2e2", MegatronConfig(ddp={"overlap_grad_reduce": overlap, "bucket_size": 2000}))
    wanted, got = (
        workers(2).run(gradients_after_others, case, models / "qwen3_moe", loses)[0] for loses in (False, True)
    )
    assert [name for name, tensor in wanted.items() if not got[name].equal(tensor)] == []


@pytest.mark.parametrize("layout", ["megatron:d1", "megatron:d2e2"])
def test_each_kind_is_freed_on_its_own(workers: Workers, models: Path, layout: str) -> None:
    case = Case(layout, dtype="bfloat16")
    for found in workers(case.world_size).run(freed, case, models / "qwen3_moe"):
        for what, n_bytes, before, after in found:
            assert n_bytes == before[what] > 0
            assert after == {**before, what: 0}


def test_state_that_is_on_the_host_anyway_frees_nothing(workers: Workers, models: Path) -> None:
    case = Case("megatron:d1", MegatronConfig(optimizer={"state_on": "host", **SMALL}), dtype="bfloat16")
    (found,) = workers(1).run(freed, case, models / "qwen3_moe")
    assert [n_bytes > 0 for _, n_bytes, _, _ in found] == [True, True, False]


def kept_by_scoring(case: AnyCase, folder: Path) -> tuple[int, int]:
    """In a worker: return the bytes of all tensors, and how many more there are when log-probs have been computed."""
    engine, before = case.engine(folder), bytes_alive()
    engine.logprobs_of(uneven_batch(), temperature=1.0)
    return before, bytes_alive() - before


def bytes_alive() -> int:
    """Return the bytes of all tensors in this process."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("kept", [True, False, 2])
def test_nothing_stays_gathered_when_log_probs_are_computed(workers: Workers, models: Path, kept: bool | int) -> None:
    case = FSDPCase("fsdp:d4", FSDPConfig(reshard_after_forward=kept), dtype="bfloat16")
    for before, more in workers(4).run(kept_by_scoring, case, models / "qwen3_moe"):
        # One gathered layer would be three quarters of the shards of all layers; small caches of the process may stay.
        assert more < before / 20


def use_while_away(case: Case, folder: Path) -> list[str]:
    """In a worker: return the errors of methods that need what is offloaded."""
    engine = case.engine(folder, OPTIMIZER)
    attempts = {
        "params": [lambda: engine.logprobs_of(uneven_batch(), temperature=1.0), lambda: whole(engine.export_weights())],
        "grads": [lambda: engine.forward_backward_of(uneven_batch(), SFTLoss())],
        "optimizer": [engine.optim_step, lambda: [part.get("exp_avg") for part in engine.optimizer.slices()]],
    }
    errors = []
    for what, actions in attempts.items():
        engine.offload([what])
        for act in actions:
            try:
                act()
            except ValueError as error:
                errors.append(str(error))
        engine.onload([what])
    train(engine)
    return errors


def test_what_is_offloaded_cannot_be_used(workers: Workers, models: Path) -> None:
    (errors,) = workers(1).run(use_while_away, Case("megatron:d1"), models / "qwen3_moe")
    assert len(errors) == 5
    assert all("offloaded" in error and "onload" in error for error in errors)


def frozen(case: Case, folder: Path) -> tuple[int, bool]:
    """In a worker: offload a model that is not trained. Returns the bytes freed, and whether its log-probs stay."""
    engine = case.engine(folder)
    before, _ = engine.logprobs_of(uneven_batch(), temperature=1.0)
    n_bytes = engine.offload(OFFLOADABLE)
    assert engine.onload(OFFLOADABLE) == n_bytes
    return n_bytes, torch.equal(before, engine.logprobs_of(uneven_batch(), temperature=1.0)[0])


def test_a_model_that_is_not_trained_has_parameters_to_offload(workers: Workers, models: Path) -> None:
    for n_bytes, is_equal in workers(2).run(frozen, Case("megatron:d2e2"), models / "qwen3_moe"):
        assert n_bytes > 100_000
        assert is_equal
