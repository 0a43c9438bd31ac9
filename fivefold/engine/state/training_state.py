"""Training state of an optimizer whose state is split over ranks, on disk and free of any layout.

    slice of a parameter on this rank ──pieces of its mapping──> rectangles of Hugging Face tensors ──> state_store

The optimizer holds a flat slice of each parameter's master weight and moments on every rank that it is split over. Each
rank copies, writes and reads its slices only: nothing is gathered or reduced, and gradients stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.bridge.dcp_folder import DCPFolder
from fivefold.bridge.parameters import Parameters
from fivefold.bridge.pieces import Piece
from fivefold.engine.state.loss_scale import LossScale
from fivefold.engine.state.optimizer_state import STATE_KINDS, StateKind
from fivefold.engine.state.slices import FixedSlice, StateSlice
from fivefold.engine.state.state_store import HostSnapshot, StateWriter, StoredRange, WrittenSnapshot
from fivefold.engine.state.stored_state import StoredState
from fivefold.layout.parallel import ParallelLayout

_COUNTS = "counts"
"""Key of the optimizer's steps and updates, int64 [2], which rank 0 stores."""
_SCALE = "loss_scale"
"""Key of a float16 model's loss scale, float64 [2], which rank 0 stores."""
_LAYOUT = "layout"
"""Key of the degrees of parallelism, int64 [8], which rank 0 stores."""


class SavedOptimizer(Protocol):
    """What the training state needs of an optimizer."""

    steps: int
    """Steps made, skipped ones included: the place in the schedule."""
    updates: int
    """Steps that changed the weights: Adam's own count, for its bias correction."""

    loss_scale: LossScale
    """Factor of the loss."""

    def slices(self) -> Iterator[StateSlice | FixedSlice]:
        """Yield this rank's slice of every parameter whose optimizer state it holds, and what no gradient changes.

        After all slices were set, set `updates` and `steps`, then call `finish_loading`.
        """

    def finish_loading(self) -> None:
        """Bring the weights of all ranks in line with the slices that were set. All ranks call it together."""

    def zero_grad(self) -> None:
        """Clear all accumulated gradients."""


class Generators(Protocol):
    """The random-number generators of a rank."""

    def states(self) -> dict[str, Tensor]:
        """Return the state of each generator by name, uint8 on the CPU."""

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Set the generators to states that `states` has returned."""


class TorchGenerators:
    """The generators that torch has on every rank: the CPU's and its GPU's."""

    def states(self) -> dict[str, Tensor]:
        """Return the state of each generator by name, uint8 on the CPU."""
        states = {"torch": torch.get_rng_state()}
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Set the generators to states that `states` has returned."""
        torch.set_rng_state(states["torch"])
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])


class TrainingState:
    """Saves and loads the state of an optimizer and this rank's random-number generators.

    Args:
        optimizer: the optimizer.
        parameters: the model's parameters on this rank; trained ones are saved.
        layout: the layout of all ranks.
        generators: this rank's random-number generators.
    """

    def __init__(
        self,
        optimizer: SavedOptimizer,
        parameters: Parameters[Any],
        layout: ParallelLayout,
        generators: Generators,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._generators = generators
        self._layout = torch.tensor([value for value in astuple(layout) if isinstance(value, int)])
        self._stored: set[str] = set()
        self._writer: StateWriter | None = None

    def snapshot(self, folder: Path, *, copy: bool) -> HostSnapshot | WrittenSnapshot:
        """Copy this rank's part of the state to host memory, to be written to `folder`; or write it there at once.

        Args:
            folder: the folder of the state.
            copy: whether to copy.

        Raises:
            ValueError: the last copy still exists and is not written yet.
            OSError: without a copy, a file cannot be written; the error names it.
        """
        if self._writer is None:
            self._writer = self._plan()
        small = self._generator_states()
        if dist.get_rank() == 0:
            small[_COUNTS] = torch.tensor([self._optimizer.steps, self._optimizer.updates])
            small[_LAYOUT] = self._layout
            if self._optimizer.loss_scale.is_needed:
                small[_SCALE] = self._optimizer.loss_scale.saved()
        if not copy:
            return self._writer.write(folder, self._tensors(), small)
        return self._writer.snapshot(folder, self._tensors(), small)

    def load(self, folder: Path) -> None:
        """Load what all ranks of this layout or any other have written; gradients are cleared.

        Each rank's random-number generators continue where they were, if the layout and the kind of device are
        the same. Otherwise they stay as they are, because the states of other ranks would have no meaning for them.

        Raises:
            ValueError: the folder holds no complete training state, or another model's.
        """
        with DCPFolder(folder) as files:
            kinds = {kind: StoredState(files, kind) for kind in STATE_KINDS}
            for stored in kinds.values():
                stored.check(self._parameters.trained_shapes)
            if missing := {_COUNTS, _LAYOUT} - files.names:
                raise ValueError(f"{folder} holds no training state of Fivefold: it lacks {', '.join(sorted(missing))}")
            self._fill(kinds)
            self._optimizer.steps, self._optimizer.updates = files.read(_COUNTS, slice(0, 2)).tolist()
            if self._optimizer.loss_scale.is_needed and _SCALE in files.names:
                self._optimizer.loss_scale.restore(files.read(_SCALE, slice(0, 2)))
            self._optimizer.finish_loading()
            self._optimizer.zero_grad()
            if files.read(_LAYOUT, slice(0, len(self._layout))).equal(self._layout):
                self._set_generators(files)

    def _plan(self) -> StateWriter:
        """Work out what this rank stores; it stays the same as long as the layout does."""
        ranges = []
        for part in self._optimizer.slices():
            pieces = self._parameters[part.name].mapping.stored_pieces(self._parameters.groups)
            within = tuple(cut for piece in pieces for cut in piece.within(part.start, part.end))
            if within and part.is_stored:
                self._stored.add(part.name)
                ranges += [StoredRange(kind, part.start, part.end - part.start, within) for kind in STATE_KINDS]
        return StateWriter(dist.get_rank(), ranges)

    def _tensors(self) -> Iterator[Tensor]:
        """Yield the state of each range of the plan."""
        for part in self._optimizer.slices():
            if part.name in self._stored:
                yield from (part.get(kind) for kind in STATE_KINDS)

    def _fill(self, kinds: Mapping[StateKind, StoredState]) -> None:
        """Read this rank's slices."""
        slices = list(self._optimizer.slices())
        largest = max((part.end - part.start for part in slices), default=0)
        buffer = torch.empty(largest, dtype=torch.float32, pin_memory=torch.cuda.is_available())
        for part in slices:
            values = buffer[: part.end - part.start]
            targets = [(piece, piece.view(values, part.start)) for piece in self._pieces(part)]
            if sum(piece.n_elements for piece, _ in targets) < len(values):
                values.zero_()  # the padding of the vocabulary
            for kind, stored in kinds.items():
                stored.fill(targets)
                part.set(kind, values)

    def _pieces(self, part: StateSlice | FixedSlice) -> Iterator[Piece]:
        for piece in self._parameters[part.name].mapping.pieces(self._parameters.groups):
            yield from piece.within(part.start, part.end)

    def _generator_states(self) -> dict[str, Tensor]:
        """Return the states of this rank's random-number generators by key."""
        return {f"{_prefix()}{name}": state.clone() for name, state in self._generators.states().items()}

    def _set_generators(self, files: DCPFolder) -> None:
        """Set this rank's generators to the stored states, unless there are others than on this engine and device."""
        stored = {key for key in files.names if key.startswith(_prefix())}
        if stored == self._generator_states().keys():
            states = {key.removeprefix(_prefix()): files.read(key, slice(0, files.shape(key)[0])) for key in stored}
            self._generators.set_states(states)


def _prefix() -> str:
    return f"generators/{dist.get_rank()}/"
