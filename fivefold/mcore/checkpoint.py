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
from typing import Any

import torch
import torch.distributed as dist

from fivefold.bridge.bridge import Bridge
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.hf_reader import HFWeights
from fivefold.bridge.hf_writer import save_hf
from fivefold.mcore.optimizer import Optimizer

KINDS = ("param", "exp_avg", "exp_avg_sq")
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
    for kind in KINDS:
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
    for kind in KINDS:
        with HFWeights(folder / kind) as weights:
            bridge.load(_buffers(parameters), weights, groups)
        for state, buffer in _slices(optimizer):
            state[kind].copy_(buffer)
            if "step" in state:
                state["step"].fill_(optimizer.updates)
    optimizer.zero_grad()


def _buffers(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return the float32 gradient buffer of each parameter."""
    return {name: vars(parameter)["main_grad"] for name, parameter in parameters.items()}


def _gather_slices(optimizer: Optimizer, kind: str) -> None:
    """Fill the gradient buffers with one kind of state, whole on every rank."""
    optimizer.zero_grad()
    for state, buffer in _slices(optimizer):
        buffer.copy_(state[kind])
    for chunk in optimizer.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            dist.all_reduce(buffer.grad_data, group=buffer.data_parallel_group)


def _slices(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Yield this rank's slice of each parameter: its state by kind, created if missing, and its part of the buffer."""
    for part in optimizer.megatron.chained_optimizers:
        for parameter, (group, order) in part.model_param_group_index_map.items():
            main = part.optimizer.param_groups[group]["params"][order]
            state = part.optimizer.state[main]
            if not state:
                state |= {
                    "step": torch.zeros((), dtype=torch.float32, device=main.device),
                    "exp_avg": torch.zeros_like(main.data),
                    "exp_avg_sq": torch.zeros_like(main.data),
                }
            where = part._get_model_param_range_map(parameter)["param"]
            yield {**state, "param": main.data}, parameter.main_grad.view(-1)[where.start : where.end]
