"""Passes without gradients may have larger micro-batches than those that train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.config.schema.engine import TrainedMicroBatchConfig
from fivefold.engine.packing import BatchPlanner
from fivefold.engine.scores import Logprobs
from fivefold.layout.parser import parse_backend
from fivefold.roles.models import Trainer
from fivefold.roles.remote_batch import Piece, RemoteBatch

LENGTHS = np.full(16, 10)


class CountingGroup:
    """Processes that note the micro-batches of their orders, and compute nothing."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def call_each(self, _method: Callable[..., Any], arguments: list[Any], wanted: list[int]) -> list[Any]:
        self.counts.append(len(arguments[0][0].micro_batches))
        return [(None, None) for _ in wanted]

    keep_each = call_each


@pytest.mark.parametrize(("layout", "infer"), [("megatron:d2", 2), ("megatron:d2p2v2", 2), ("fsdp:d2", 2)])
def test_log_probs_have_micro_batches_of_their_own_budget(layout: str, infer: int) -> None:
    counts = {}
    for most in (None, 40):
        config = TrainedMicroBatchConfig(max_tokens_per_mb=10, max_tokens_per_infer_mb=most)
        group = CountingGroup()
        trainer = Trainer(group, BatchPlanner.of(config, parse_backend(layout), quadratic_at=1e9))  # type: ignore[arg-type]
        batch = RemoteBatch(LENGTHS, LENGTHS, (Piece(None, np.arange(len(LENGTHS))),))
        trainer.score(batch, Logprobs())
        trainer.score(batch, Logprobs(), "reference")
        trainer.update(batch, SFTLoss())
        counts[most] = group.counts
    assert counts == {None: [8, 8, 8], 40: [infer, infer, 8]}
