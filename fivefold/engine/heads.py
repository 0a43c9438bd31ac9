"""The last layer of a model, and what a pass asks of it.

    last hidden states [N, hidden] ──Asked.predict──> predictions [N] ──engine──> whole sequences [T] ──> loss
                                                                                                     └──> Score.columns

A training pass asks for what its loss needs (`passes.asked_by`). A pass without gradient asks for a `Score`, which also
names the columns that its predictions become. Each score is one class with its own computation: `Logprobs` is here,
and `values.py`, `energies.py` and `distillation.py` hold the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fivefold.config.schema.fsdp import FSDPConfig
from fivefold.config.schema.megatron import MegatronConfig
from fivefold.engine.logprobs import Vocabulary
from fivefold.engine.sequences import MicroBatch

Predictions = Mapping[str, torch.Tensor]
"""Tensors float32 [N], by name."""


@dataclass(frozen=True)
class OutputLayer:
    """This rank's part of a model's last layer."""

    weight_VH: torch.Tensor
    """Rows of the vocabulary, or the one row of a value head."""
    bias_V: torch.Tensor | None = None
    """Bias of each row; None if there is none."""


@dataclass(frozen=True)
class Head:
    """How a model's last layer is computed: as logits over the vocabulary, or as one value for each token."""

    vocabulary: Vocabulary
    is_value: bool = False
    """Whether the layer is a value head: a critic's or a reward model's."""

    @staticmethod
    def of(vocab: int, section: MegatronConfig | FSDPConfig, group: dist.ProcessGroup, *, is_value: bool) -> Head:
        """Return the head of a model, with the options in the engine's section of the recipe."""
        return Head(Vocabulary(vocab, group, section.logprob_chunk_size, section.logprob_recompute), is_value)

    @property
    def predicts(self) -> str:
        """What the head predicts, as a text."""
        return "values" if self.is_value else "logprobs, entropy"


class Asked(ABC):
    """What a pass asks of a head."""

    @abstractmethod
    def predict(self, head: Head, hidden_NH: torch.Tensor, output: OutputLayer, micro_batch: MicroBatch) -> Predictions:
        """Predict the N trained tokens of this rank, `micro_batch.local.targets_N`.

        Args:
            head: the model's head.
            hidden_NH: the hidden state before each token, the same on all tensor-parallel ranks. Its gradient must be
                this rank's part of a sum over the tensor-parallel group.
            output: this rank's part of the output layer.
            micro_batch: the sequences.
        """
