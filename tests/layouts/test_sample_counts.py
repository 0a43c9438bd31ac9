"""Every sample of an epoch reaches the loss exactly once on every layout, as counted where the loss is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from cases import AnyCase, case_of
from megatron_cases import Case
from tiny_models import VOCAB
from worker_pool import Workers

from fivefold.algorithms.loss import LossInputs
from fivefold.algorithms.metrics import Metric, Metrics
from fivefold.batch import Batch, Totals
from fivefold.config.schema.engine import MicroBatchConfig, OptimizerConfig
from fivefold.data.sampler import EpochSampler
from fivefold.data.sft import SFTExample, sft_columns
from fivefold.layout.grid import rank_grid
from fivefold.layout.parser import parse_backend
from fivefold.roles.trainer_worker import TrainerWorker
from tests.rows import long

N_SAMPLES, BATCH_SIZE = 12, 6
MICRO_BATCHES = {
    "one sequence each": MicroBatchConfig(max_tokens_per_mb=1),
    "packed": MicroBatchConfig(max_tokens_per_mb=60),
    "more than there are sequences": MicroBatchConfig(max_tokens_per_mb=1000, n_mbs=4),
}


@dataclass
class Recorder:
    """A loss that records the samples it gets; the field `sample` holds a sample's number on each token."""

    temperature: float = 1.0
    entropy_gradient: bool = False
    divergence: None = None
    before: None = None
    seen: list[int] = field(default_factory=list)

    def normalizer(self, totals: Totals) -> float:
        return float(totals.n_sequences)

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        samples = inputs.fields["sample"].split(list(inputs.lengths)) if inputs.lengths else ()
        for sample_L in samples:
            assert sample_L.unique().numel() == 1, "a sequence was torn, or mixed with another"
            self.seen.append(int(sample_L[0]))
        counts = {
            "sequences": Metric(torch.tensor(float(len(inputs.lengths))), reduce="sum"),
            "tokens": Metric(inputs.mask_T.sum(), reduce="sum"),
        }
        return -(inputs.predictions["logprobs"] * inputs.mask_T).sum(), counts


@dataclass(frozen=True)
class Seen:
    """Samples of an epoch that one rank's loss got, and the counts among the metrics that each step returned."""

    coordinates: tuple[int, int]
    """(tp, cp) rank."""
    is_last_stage: bool
    samples: list[int]
    counts: list[tuple[float, float]]
    """(sequences, trained tokens) of each step."""
    expected_counts: list[tuple[float, float]]


def examples() -> list[SFTExample]:
    """Return examples of lengths 3 to 20, of which no two neighbours are equal."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3 + (7 * number) % 18 for number in range(N_SAMPLES)]
    tokens = [tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()) for n in lengths]
    return [SFTExample(ids[:2], ids[2:]) for ids in tokens]


def as_batch(chosen: list[SFTExample]) -> Batch:
    columns = sft_columns(chosen)
    tokens_T, mask_T = (torch.from_numpy(columns.values[name]) for name in ("tokens", "mask"))
    return Batch(tuple(columns.lengths_N.tolist()), tokens_T.long(), mask_T.float())


def train_an_epoch(case: Case, folder: Path) -> Seen:
    """In a worker: train one epoch of the examples, in shuffled batches."""
    engine, recorder = case.engine(folder, OptimizerConfig()), Recorder()
    sampler = EpochSampler(list(enumerate(examples())), batch_size=BATCH_SIZE, shuffle=True, seed=5)
    counts, expected_counts = [], []
    while sampler.place[0] == 0:
        chosen = sampler.next_batch()
        batch = as_batch([example for _, example in chosen])
        numbers = torch.tensor([float(number) for number, _ in chosen])
        batch = batch.with_fields(sample=numbers.repeat_interleave(torch.tensor(batch.lengths)))
        metrics = engine.forward_backward_of(batch, recorder)
        engine.optim_step()
        counts.append((metrics["sequences"], metrics["tokens"]))
        expected_counts.append((float(BATCH_SIZE), float(batch.mask_T.sum())))
    groups = engine.groups
    coordinates = (groups.tp.rank(), groups.cp.rank())
    return Seen(coordinates, groups.pp.rank() == groups.pp.size() - 1, recorder.seen, counts, expected_counts)


@pytest.mark.parametrize(
    ("layout", "split"),
    [
        *((layout, split) for layout in ("megatron:d2", "megatron:p2v2") for split in MICRO_BATCHES),
        ("megatron:d2c2", "packed"),
        ("megatron:d2p2v2", "more than there are sequences"),
        *long(
            ("megatron:d4", "more than there are sequences"),
            *(("megatron:d2p2", split) for split in MICRO_BATCHES),
            ("megatron:t2d2", "packed"),
            ("megatron:d2c2", "more than there are sequences"),
            ("megatron:d2p2v2", "one sequence each"),
            ("megatron:d2p2c2", "packed"),
        ),
    ],
)
def test_every_sample_trains_once_an_epoch(workers: Workers, models: Path, layout: str, split: str) -> None:
    case = Case(layout, micro_batches=MICRO_BATCHES[split])
    ranks = workers(case.world_size).run(train_an_epoch, case, models / "qwen3")
    for rank in ranks:
        assert rank.counts == rank.expected_counts
        assert rank.is_last_stage or not rank.samples
    for coordinates in {rank.coordinates for rank in ranks}:
        replicas = [rank for rank in ranks if rank.is_last_stage and rank.coordinates == coordinates]
        assert sorted(sample for rank in replicas for sample in rank.samples) == list(range(N_SAMPLES))


def gathered(case: AnyCase, folder: Path) -> tuple[int, list[list[float]]]:
    """In a worker: give as many numbers as the replica's index says. Returns the index, and what all have given."""
    engine = case.engine(folder)
    replica = rank_grid(parse_backend(case.layout))[torch.distributed.get_rank()].dp
    worker = cast(TrainerWorker, SimpleNamespace(engine=engine))
    tensors = TrainerWorker._gather(worker, torch.full((replica + 1,), 0.5))
    assert [n.item() for n in TrainerWorker._gather(worker, torch.tensor(7 + replica))] == [7, 8]
    return replica, [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("layout", ["megatron:d2t2", "megatron:d2p2", "megatron:(attn:d2c2|ffn:e4)", "fsdp:d2t2"])
def test_losses_that_look_at_the_whole_mini_batch_hear_of_each_replica_once(
    workers: Workers, models: Path, layout: str
) -> None:
    ranks = workers(4).run(gathered, case_of(layout), models / "qwen3_moe")
    assert sorted(replica for replica, _ in ranks) == [0, 0, 1, 1]
    assert all(found == [[0.5], [0.5, 0.5]] for _, found in ranks)
