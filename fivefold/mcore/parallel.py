"""Process groups of a layout and random-number generators of a rank, as Megatron-Core makes them."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from fivefold.bridge.groups import ShardGroups
from fivefold.engine.state.training_state import TorchGenerators
from fivefold.layout.parallel import ParallelLayout

_TRACKED = "megatron/"
"""How the names of the generators begin that Megatron-Core tracks."""


def initialize_parallel(layout: ParallelLayout, seed: int, timeout_s: float) -> ProcessGroupCollection:
    """Return Megatron-Core's groups for `layout`, created by the first call. A second model needs the same layout.

    Raises:
        ValueError: the number of processes is not the layout's world size, or another layout was made here before.
    """
    if dist.get_world_size() != layout.world_size:
        raise ValueError(
            f"the layout has {layout.world_size} ranks, but {dist.get_world_size()} processes were started: "
            "start one process a rank"
        )
    degrees = (layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.etp)
    if parallel_state.is_initialized():
        if _current_degrees() != degrees:
            raise ValueError(
                f"these processes are laid out as tp, pp, vpp, cp, ep, etp = {_current_degrees()}, and a model with "
                f"{degrees} cannot share them: give it its own processes"
            )
        return ProcessGroupCollection.use_mpu_process_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        order="tp-cp-ep-dp-pp",
        distributed_timeout_minutes=timeout_s / 60,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return ProcessGroupCollection.use_mpu_process_groups()


def _current_degrees() -> tuple[int, ...]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )


def shard_groups(groups: ProcessGroupCollection) -> ShardGroups:
    """Return this rank's place in each group, for the weight bridge."""
    return ShardGroups(
        tp_rank=groups.tp.rank(),
        tp_size=groups.tp.size(),
        tp_group=groups.tp,
        etp_rank=groups.expt_tp.rank(),
        etp_size=groups.expt_tp.size(),
        etp_group=groups.expt_tp,
        ep_rank=groups.ep.rank(),
        ep_size=groups.ep.size(),
        ep_group=groups.ep,
        pp_rank=groups.pp.rank(),
        pp_size=groups.pp.size(),
        pp_group=groups.pp,
    )


class MegatronGenerators(TorchGenerators):
    """Torch's generators, and those that Megatron-Core tracks, whose names begin with `megatron/`."""

    def states(self) -> dict[str, Tensor]:
        """Return the state of each generator by name, uint8 on the CPU."""
        tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
        return super().states() | {f"{_TRACKED}{name}": state for name, state in tracked.items()}

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Set the generators to states that `states` has returned."""
        super().set_states(states)
        tracked = {name: state for name, state in states.items() if name.startswith(_TRACKED)}
        tensor_parallel.get_cuda_rng_tracker().set_states(
            {name.removeprefix(_TRACKED): state for name, state in tracked.items()}
        )
