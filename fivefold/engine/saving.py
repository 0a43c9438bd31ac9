"""The verbs of training engines that write and read a model: exports, Hugging Face folders, training state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import torch

from fivefold.bridge.hf_saver import Block, save_blocks
from fivefold.bridge.hf_writer import HFFolder, classified, tensor_specs
from fivefold.bridge.peft_folder import AdapterFolder
from fivefold.bridge.shard_plan import MAX_SHARD_BYTES
from fivefold.config.schema.engine import EngineConfig
from fivefold.engine.contract import OFFLOADABLE, Offloadable, Snapshot
from fivefold.engine.state.training_state import TrainingState
from fivefold.families.shape import ModelShape
from fivefold.weights.stream import Stack, unstacked


class SavingVerbs(ABC):
    """The part of `EngineBase` that a step does not enter. Engines set these attributes when they build their model."""

    config: EngineConfig
    shape: ModelShape
    _folder: Path
    """Folder of the model's config and tokenizer."""
    _state: TrainingState | None
    """What checkpoints hold; None: the model is not trained."""

    @abstractmethod
    def _require(self, *what: Offloadable) -> None:
        """Check that what a method needs is on the device."""

    @abstractmethod
    def _blocks(self) -> Iterator[Block]:
        """Yield the weights of all ranks in the blocks that this rank writes."""

    @abstractmethod
    def _adapter_blocks(self) -> Iterator[Block]:
        """Yield the adapters of all ranks likewise."""

    @abstractmethod
    def export_stacks(self, readers: frozenset[int] | None = None) -> Iterator[Stack]:
        """Yield every whole weight; see `TrainingEngine.export_stacks`."""

    def export_weights(self, readers: frozenset[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every whole weight under its Hugging Face name; see `TrainingEngine.export_weights`."""
        return unstacked(self.export_stacks(readers))

    def save_hf(
        self,
        folder: str | Path,
        tokenizer_source: str | Path | None = None,
        *,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        """Write the model as a Hugging Face folder that transformers loads. Every rank writes its own pieces.

        The files are the same for every layout. An earlier folder is replaced when the new one is whole.

        Args:
            folder: the folder to write, which all ranks must see.
            tokenizer_source: folder or hub name of its tokenizer; None: the tokenizer of `config.path`.
            max_shard_bytes: most bytes of a weight file, unless a single tensor is larger.

        Raises:
            OSError: on every rank, if a disk is full or one of them cannot write; an earlier folder stays as it was.
        """
        self._require("params")
        new = HFFolder(
            folder,
            tensor_specs(self.shape, getattr(torch, self.config.dtype)),
            self._folder,
            tokenizer_source,
            max_shard_bytes=max_shard_bytes,
            scores=classified(self.shape),
        )
        save_blocks(new, self._blocks())

    def save_adapters(self, folder: Path) -> None:
        """Write the adapters as a folder that PEFT loads; see `TrainingEngine.save_adapters`."""
        self._require("params")
        new = AdapterFolder(folder, self.shape, getattr(torch, self.config.dtype), self.config.path)
        save_blocks(new, (each for piece, content in self._adapter_blocks() for each in new.blocks(piece, content)))

    def snapshot(self, folder: Path, *, copy: bool = True) -> Snapshot:
        """Copy master weights, Adam's moments, counts and random-number generators of this rank to host memory.

        Args:
            folder: the folder of the state.
            copy: False: write the files at once, through little host memory, instead of copying the state.

        Raises:
            ValueError: the last copy still exists and is not written yet, the engine has no optimizer, or its state
                was offloaded.
            OSError: without a copy, a file cannot be written; the error names it.
        """
        self._require("params", "optimizer")
        return self._trained_state("save").snapshot(folder, copy=copy)

    def load(self, folder: Path) -> None:
        """Load the training state in `folder`, of any layout of any engine; accumulated gradients are lost.

        On the same layout, training then continues with the same bits.

        Raises:
            ValueError: the folder holds no complete training state, or another model's; or the engine has no optimizer,
                or its state was offloaded.
        """
        self._require(*OFFLOADABLE)
        self._trained_state("load").load(folder)

    def _trained_state(self, verb: str) -> TrainingState:
        if self._state is None:
            raise no_optimizer(verb)
        return self._state


def no_optimizer(verb: str) -> ValueError:
    """Return the error for a method that needs an optimizer, of an engine that has none."""
    return ValueError(f"this engine was built without an optimizer, so it cannot {verb}: pass its OptimizerConfig")
