"""Training state on disk, free of any layout: master weights and Adam's moments under Hugging Face names.

    <folder>/param, exp_avg, exp_avg_sq     a Hugging Face folder each, float32; `param` loads in transformers as it is
    <folder>/state.json                     number of optimizer steps, and of those that changed the weights

The distributed optimizer holds a slice of each of these on every data-parallel rank. The gradient buffers have the
parameters' shapes and are free between steps: every rank writes its slices into them, an all-reduce makes them whole,
and the weight bridge exports them. Loading goes the same way back, on any layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from fivefold.bridge.bridge import Bridge
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.hf_reader import HFWeights
from fivefold.bridge.hf_writer import save_hf
from fivefold.mcore.optimizer import Optimizer, StateSlice
from fivefold.mcore.optimizer_state import STATE_KINDS, StateKind

_STATE = "state.json"


def save_state(
    folder: Path,
    optimizer: Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    bridge: Bridge,
    groups: ShardGroups,
    config_source: Path,
) -> None:
    """Write the training state. All ranks take part, rank 0 writes; accumulated gradients are lost."""
    if dist.get_rank() == 0:
        (folder / _STATE).unlink(missing_ok=True)
    for kind in STATE_KINDS:
        _gather_slices(optimizer, kind)
        weights = bridge.export(_buffers(parameters), groups)
        if dist.get_rank() == 0:
            save_hf(folder / kind, weights, config_source)
        else:
            for _ in weights:
                pass
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        # Written last, so that a folder that has this file is complete.
        (folder / _STATE).write_text(json.dumps({"steps": optimizer.steps, "updates": optimizer.updates}))
    dist.barrier()


def load_state(
    folder: Path,
    optimizer: Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    bridge: Bridge,
    groups: ShardGroups,
) -> None:
    """Load what `save_state` wrote, on any layout. Accumulated gradients are lost.

    Raises:
        ValueError: the folder holds no complete training state, or that of another model.
    """
    if not (folder / _STATE).is_file():
        raise ValueError(
            f"{folder} holds no complete training state: {_STATE}, which is written last, is missing; give the folder "
            "of a save that was finished"
        )
    counts = json.loads((folder / _STATE).read_text())
    optimizer.steps, optimizer.updates = counts["steps"], counts["updates"]
    with HFWeights(folder / "param") as weights:
        bridge.load(parameters, weights, groups)
    for kind in STATE_KINDS:
        with HFWeights(folder / kind) as weights:
            bridge.load(_buffers(parameters), weights, groups)
        for part in optimizer.slices():
            part.set(kind, _buffer(part))
    optimizer.finish_loading()
    optimizer.zero_grad()


def _buffers(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return the float32 gradient buffer of each parameter."""
    return {name: vars(parameter)["main_grad"] for name, parameter in parameters.items()}


def _gather_slices(optimizer: Optimizer, kind: StateKind) -> None:
    """Fill the gradient buffers with one kind of state, whole on every rank."""
    optimizer.zero_grad()
    for part in optimizer.slices():
        _buffer(part).copy_(part.get(kind))
    for chunk in optimizer.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            dist.all_reduce(buffer.grad_data, group=buffer.data_parallel_group)


def _buffer(part: StateSlice) -> torch.Tensor:
    """Return the slice's part of the gradient buffer."""
    return vars(part.parameter)["main_grad"].view(-1)[part.start : part.end]
