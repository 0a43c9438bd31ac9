"""Adapters with made-up matrices, and completions that a server samples with them: what `run.adapter_probe` compares.

The actor's own matrices B wait in host memory meanwhile.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from math import sqrt

import torch

from fivefold.bridge.parameters import Parameter
from fivefold.cluster.role import Part
from fivefold.families.adapters import MATRICES, adapter_name
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import tensors
from fivefold.roles.rollout_worker import RolloutWorker
from fivefold.roles.trainer_worker import TrainerWorker
from fivefold.rollout.contract import complete
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.types import Completion

_B = adapter_name("", MATRICES[1])


def kind_of(matrix: str) -> str:
    """Return what matrices of one kind of layer have in common in their names, such as `mlp.experts.up_proj`."""
    layer = re.sub(r"^.*layers\.\d+\.", "", matrix.removesuffix(_B))
    return re.sub(r"experts\.(\d+|\{expert\})\.", "experts.", layer)


def kinds_of(shape: ModelShape) -> list[str]:
    """Return the kinds of layers of a model that have adapters, in its order."""
    return list(dict.fromkeys(kind_of(tensor.name) for tensor in tensors(shape) if tensor.name.endswith(_B)))


class MadeUpAdapters(Part):
    """The actor's end. All ranks take part in every method, and the weights must be on the devices."""

    def __init__(self, worker: TrainerWorker) -> None:
        """Keep nothing yet."""
        self._engine = worker.engine
        assert worker.spec.options.adapters is not None, "this model has no adapters"
        self._shape = worker.spec.options.adapters
        self._kept: dict[str, torch.Tensor] = {}

    def put(self, strength: float, *without: str) -> None:
        """Put normal noise into each B, the same whenever it is asked for, and 0 where an adapter is left out.

        Args:
            strength: about the share of a layer's inputs that its adapter adds to its outputs. 0: no adapter has any.
            without: kinds of layers whose adapters are left out.
        """
        for parameter in self._matrices():
            self._kept.setdefault(parameter.name, parameter.values_N.cpu())
            b = parameter.mapping.tensors[0]
            is_out = strength == 0 or kind_of(b.name) in without
            size = 0.0 if is_out else strength / (sqrt(b.shape[1]) * self._shape.scale(b.shape[1]))
            # What several ranks hold begins at the same element on each, and gets the same numbers.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{parameter.name} {parameter.begin}".encode()))
            noise_N = torch.randn(len(parameter.values_N), generator=generator)
            parameter.values_N.copy_(size * noise_N)

    def restore(self) -> None:
        """Put the actor's own matrices back."""
        for parameter in self._matrices():
            parameter.values_N.copy_(self._kept.pop(parameter.name))

    def _matrices(self) -> Iterator[Parameter]:
        return (each for each in self._engine.held_adapters() if each.mapping.tensors[0].name.endswith(_B))


class Samples(Part):
    """A replica's end."""

    def __init__(self, worker: RolloutWorker) -> None:
        """Take the replica, which has no requests."""
        self._worker = worker

    def sample(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Completion]:
        """Return a completion of each request."""
        return complete(self._worker.interrupted(), requests, sampling)
