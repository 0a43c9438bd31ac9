"""SGLang's endpoints for weights, in buckets that it calls flattened. Taken from the sources of 0.5.17."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing import reductions

from fivefold.families.latent_attention import loaded_together
from fivefold.rollout.servers import weights
from fivefold.rollout.servers.client import HttpClient
from fivefold.rollout.servers.weights import check_version
from fivefold.weights.cuda_ipc import on_device
from fivefold.weights.device_buckets import DeviceBucket, Handle
from fivefold.weights.nccl_link import Invitation, Meeting
from fivefold.weights.stand_in import pickled

_FORMAT = "flattened_bucket"


@dataclass
class FlattenedTensorMetadata:
    """SGLang's record of a tensor in a bucket, which it reads as an object of its class."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start_idx: int
    """First byte in the bucket."""
    end_idx: int
    numel: int
    """Number of bytes."""


FlattenedTensorMetadata.__module__ = "sglang.srt.weight_sync.tensor_bucket"


class _Shared:
    """Unpickles to the tensor of a handle."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __reduce__(self) -> tuple[Any, ...]:
        return reductions.rebuild_cuda_tensor, self._handle


class SGLangWeights:
    """The `WeightLoader` of SGLang."""

    meeting: Meeting = "torch_group"

    def __init__(self, http: HttpClient, uuids: Sequence[str], *, drafts: bool = False) -> None:
        """Keep how to reach the server.

        Args:
            http: its connections.
            uuids: the UUIDs of its devices, one for each of its processes; none are needed with NCCL.
            drafts: whether it has layers that draft tokens, which keep their weights.
        """
        self._http = http
        self._uuids = uuids
        # Otherwise it gives each bucket to these layers first.
        self._target: dict[str, Any] = {"disable_draft_model": True} if drafts else {}
        self._group: str | None = None
        """Name of the NCCL group."""

    def enter(self, invitation: Invitation, rank_offset: int) -> None:
        body = {
            "master_address": invitation.address,
            "master_port": invitation.port,
            "rank_offset": rank_offset,
            "world_size": invitation.world_size,
            "group_name": invitation.group,
            "backend": "nccl",
        }
        self._http.post("/init_weights_update_group", body, weights.BUCKET_S)
        self._group = invitation.group

    def load(self, buckets: Iterator[DeviceBucket], version: int, *, is_paused: bool) -> None:
        for bucket in buckets:
            _check_fused(bucket.names)
            if bucket.handles:
                tensors = [_serialized(bucket, uuid) for uuid in self._uuids]
                body = {"serialized_named_tensors": tensors, "load_format": _FORMAT, "flush_cache": False}
                body |= self._target
                self._http.post("/update_weights_from_tensor", body, weights.BUCKET_S)
            else:
                body = _announced(bucket, self._group)
                self._http.post("/update_weights_from_distributed", body, weights.BUCKET_S)
        self._http.send("POST", "/flush_cache", {}, weights.READY_S)
        told = {"new_version": str(version), "abort_all_requests": False}
        self._http.post("/update_weight_version", told, weights.READY_S)
        check_held(self._http, version)


def check_held(http: HttpClient, version: int) -> None:
    """Check that the server's weights have the version of an update.

    Raises:
        RuntimeError: they have another one.
    """
    check_version(http.get("/model_info", weights.READY_S)["weight_version"], version)


def _check_fused(names: Sequence[str]) -> None:
    """Check that a bucket has both of the projections that SGLang fuses; it would drop one alone, and say nothing.

    Raises:
        RuntimeError: it has one of them.
    """
    groups = Counter(loaded_together(name) for name in names)
    for name in names:
        # A model whose queries have no latent has the other projection alone, which is fused with nothing.
        if name.endswith(".q_a_proj.weight") and groups[loaded_together(name)] < 2:
            other = name.replace("q_a_proj", "kv_a_proj_with_mqa")
            raise RuntimeError(
                f"a bucket has {name} without {other}, which SGLang fuses with it: send one behind the other, or set "
                "rollout.weight_transport=folder"
            )


def _announced(bucket: DeviceBucket, group: str | None) -> dict[str, Any]:
    return {
        "names": list(bucket.names),
        "dtypes": [bucket.dtype] * len(bucket.names),
        "shapes": [list(shape) for shape in bucket.shapes],
        "group_name": group,
        "load_format": _FORMAT,
        "flush_cache": False,
    }


def _serialized(bucket: DeviceBucket, uuid: str) -> str:
    """Return the bucket as the server's process on the device `uuid` reads it."""
    metadata, start = [], 0
    for name, shape, size in zip(bucket.names, bucket.shapes, bucket.sizes, strict=True):
        dtype = getattr(torch, bucket.dtype)
        metadata.append(FlattenedTensorMetadata(name, shape, dtype, start, start + size, size))
        start += size
    # The server looks for a device of this UUID; its indices of devices differ from the trainer's.
    shared = _Shared(on_device(bucket.handles[uuid], uuid))
    value = {"flattened_tensor": shared, "metadata": metadata}
    return base64.b64encode(pickled(value, FlattenedTensorMetadata)).decode()
