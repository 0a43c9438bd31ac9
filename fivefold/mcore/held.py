"""What an engine on Megatron-Core does with its model besides computing: it sends, saves, loads and offloads it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from fivefold.bridge.bridge import Bridge
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.hf_saver import Block, shared_blocks
from fivefold.bridge.parameters import Parameter, Parameters
from fivefold.engine.base import EngineBase
from fivefold.engine.contract import OFFLOADABLE, Offloadable
from fivefold.engine.ema import EMAWeights
from fivefold.mcore.buffers import ChunkBuffers
from fivefold.mcore.optimizer import Optimizer
from fivefold.weights.stream import Stack


class HeldModel(EngineBase[Optimizer]):
    """The part of `MegatronEngine` that does not compute."""

    parameters: Parameters[Parameter]
    _bridge: Bridge
    _shards: ShardGroups
    _buffers: ChunkBuffers
    _device: torch.device
    _load_LE: torch.Tensor | None
    """Tokens that each expert has got since the last update; None: no mini-batch was computed."""
    _away: set[Offloadable]
    """What is offloaded."""

    def export_adapters(self, readers: frozenset[int] | None = None) -> Iterator[Stack]:
        """Yield every whole matrix of the adapters; see `TrainingEngine.export_adapters`."""
        if not self._buffers.has_frozen:
            self._require("params")
        export = self._bridge.export_adapters(self.parameters.tensors, self._shards, self._device, readers=readers)
        return self._from_host(export) if "params" in self._away else iter(export)

    def _from_host(self, export: Iterable[Stack]) -> Iterator[Stack]:
        """Yield whole weights that were offloaded: at once, only what is trained comes back to the device."""
        with self._buffers.trained_on_device():
            yield from export

    def ema_weights(self, decay: float) -> EMAWeights:
        """Return this model's weights as an EMA, with this decay, of a model that they follow."""
        return EMAWeights(self.parameters, decay)

    def held_weights(self) -> dict[str, torch.Tensor]:
        """Return the elements of each weight that this rank holds, flat, by the weight's name."""
        return {parameter.name: parameter.values_N for parameter in self.parameters}

    def _blocks(self) -> Iterator[Block]:
        own = (each for each in self.parameters if not each.mapping.is_adapter)
        return shared_blocks(map(self._merged, own), self._shards)

    def _merged(self, parameter: Parameter) -> Parameter:
        """Return a parameter with its adapters merged."""
        merge = self._bridge.merging.get(parameter.name)
        return parameter if merge is None else replace(parameter, tensor=merge(parameter.tensor.detach(), 0))

    def held_adapters(self) -> list[Parameter]:
        """Return the parameters of adapters; see `TrainingEngine.held_adapters`."""
        return [parameter for parameter in self.parameters if parameter.mapping.is_adapter]

    def _adapter_blocks(self) -> Iterator[Block]:
        return shared_blocks(self.held_adapters(), self._shards)

    def load(self, folder: Path) -> None:
        """Load the training state; see `SavingVerbs.load`."""
        super().load(folder)
        self._buffers.has_gradients = False
        self._load_LE = None

    def offload(self, what: Collection[Offloadable] = OFFLOADABLE) -> int:
        """Give device memory back; see `TrainingEngine.offload`.

        A model without an optimizer has parameters only, and optimizer state that is always on the host stays there.
        """
        freed = self._buffers.park(what)
        if "grads" in what:
            self._load_LE = None
        if "optimizer" in what and self.optimizer is not None:
            freed += self.optimizer.state.park()
        self._away |= set(what)
        torch.cuda.empty_cache()
        return freed

    def onload(self, what: Collection[Offloadable] = OFFLOADABLE) -> int:
        """Bring back what `offload` moved; see `TrainingEngine.onload`."""
        allocated = self._buffers.fetch(what)
        if "optimizer" in what and self.optimizer is not None:
            allocated += self.optimizer.state.fetch()
        self._away -= set(what)
        return allocated
