"""Patches of PyTorch's FSDP2, each with its symptom, its cause and the condition for its removal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

_SHARES = "_get_post_forward_mesh_info"


@contextmanager
def sharing_between_passes(mesh: DeviceMesh | None) -> Iterator[None]:
    """Inside the block, `fully_shard(reshard_after_forward=n)` keeps weights on `mesh`, [ranks / n, n].

    Symptom: with `reshard_after_forward=n` and tensor parallelism, all ranks wait for each other while the model is
    built. Without it, each layer has its own process groups, each with a communicator's memory on GPUs.
    Cause: `fully_shard` makes a mesh of n neighbours, and with it process groups, each time it is called, and only for
    the ranks of its mesh, though all processes must make process groups together.
    Remove when: `fully_shard` takes the mesh on which weights are kept.
    """
    original = vars(_fully_shard)[_SHARES]

    def shares(kept: bool | int, mesh_info: FSDPMeshInfo) -> FSDPMeshInfo | None:
        if isinstance(kept, bool) or mesh is None:
            info: FSDPMeshInfo | None = original(kept, mesh_info)
            return info
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    setattr(_fully_shard, _SHARES, shares)
    try:
        yield
    finally:
        setattr(_fully_shard, _SHARES, original)
