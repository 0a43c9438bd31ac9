"""vLLM's endpoints for weights, which changed with 0.26.

    /pause  /start_weight_update  /update_weights ...  /finish_weight_update  /resume

    0.25     each bucket says how it is packed; an NCCL group is entered through a store
    0.26     the first call says how all buckets are packed; an NCCL group is entered by its id; there are versions

Taken from the sources of 0.25.1 and 0.32.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from fivefold.rollout.servers import weights
from fivefold.rollout.servers.client import HttpClient
from fivefold.rollout.servers.weights import check_version
from fivefold.weights.device_buckets import DeviceBucket
from fivefold.weights.nccl_link import Invitation, Meeting

PAUSE, RESUME = "/pause?mode=abort", "/resume"
"""Endpoints between which nothing is generated. The first ends all requests, and drops what was cached."""
NEWER = (0, 26)
"""First release with the newer form."""
SLOW = (0, 25)
"""The release parts of whose loading `inside_vllm/fivefold_weights.py` replaces."""
_WHOLE = 2**62
"""Bytes of a packed buffer that no bucket reaches, so that each is one broadcast."""


class Form(Protocol):
    """What differs between vLLM's releases."""

    meeting: Meeting

    def ipc(self) -> dict[str, Any]:
        """Return the first call's content with CUDA IPC."""

    def nccl(self, invitation: Invitation, rank_offset: int) -> dict[str, Any]:
        """Return the first call's content with NCCL."""

    def packing(self, bucket: DeviceBucket) -> dict[str, Any]:
        """Return what a bucket says of its packing."""

    def finish(self, http: HttpClient, version: int) -> None:
        """End an update, and check the server's version where it has one."""


class Form25:
    """vLLM 0.25."""

    meeting: Meeting = "vllm_store"

    def ipc(self) -> dict[str, Any]:
        return {}

    def nccl(self, invitation: Invitation, rank_offset: int) -> dict[str, Any]:
        return {
            "master_address": invitation.address,
            "master_port": invitation.port,
            "rank_offset": rank_offset,
            "world_size": invitation.world_size,
        }

    def packing(self, bucket: DeviceBucket) -> dict[str, Any]:
        if bucket.handles:
            return {"packed": True}
        return {"packed": True, "packed_buffer_size_bytes": _WHOLE, "packed_num_buffers": 1}

    def finish(self, http: HttpClient, version: int) -> None:
        http.post("/finish_weight_update", limit_s=weights.BUCKET_S)


class Form26:
    """vLLM 0.26 and later."""

    meeting: Meeting = "unique_id"

    def ipc(self) -> dict[str, Any]:
        return {"packed": True}

    def nccl(self, invitation: Invitation, rank_offset: int) -> dict[str, Any]:
        return {
            "nccl_unique_id_b64": invitation.unique_id_b64,
            "rank_offset": rank_offset,
            "world_size": invitation.world_size,
            "packed": True,
            "packed_buffer_size_bytes": _WHOLE,
            "packed_num_buffers": 1,
        }

    def packing(self, bucket: DeviceBucket) -> dict[str, Any]:
        return {}

    def finish(self, http: HttpClient, version: int) -> None:
        http.post("/finish_weight_update", {"weight_version": str(version)}, weights.BUCKET_S)
        check_version(http.get("/weight_info", weights.READY_S)["weight_version"], version)


class VLLMWeights:
    """The `WeightLoader` of vLLM."""

    def __init__(self, http: HttpClient, *, by_ipc: bool) -> None:
        """Ask the server for its release, and prepare it for the transport."""
        self._http = http
        release = tuple(int(part) for part in http.get("/version")["version"].split(".")[:2])
        self._form: Form = Form26() if release >= NEWER else Form25()
        self.meeting: Meeting = self._form.meeting
        http.post("/collective_rpc", {"method": "fivefold_guard_updates"})
        if release == SLOW:
            http.post("/collective_rpc", {"method": "fivefold_load_faster"})
        if by_ipc:
            self._begin(self._form.ipc())

    def enter(self, invitation: Invitation, rank_offset: int) -> None:
        self._begin(self._form.nccl(invitation, rank_offset))

    def load(self, buckets: Iterator[DeviceBucket], version: int, *, is_paused: bool) -> None:
        # Nothing is generated meanwhile; the pause, or the one before, drops what was cached with other weights.
        if not is_paused:
            self._http.post(PAUSE, limit_s=weights.READY_S)
        self._http.post("/start_weight_update", limit_s=weights.READY_S)
        for bucket in buckets:
            self._http.post("/update_weights", {"update_info": self._update_info(bucket)}, weights.BUCKET_S)
        self._form.finish(self._http, version)
        if not is_paused:
            self._http.post(RESUME, limit_s=weights.READY_S)

    def _update_info(self, bucket: DeviceBucket) -> dict[str, Any]:
        info = {
            "names": list(bucket.names),
            "dtype_names": [bucket.dtype] * len(bucket.names),
            "shapes": [list(shape) for shape in bucket.shapes],
            **self._form.packing(bucket),
        }
        if bucket.handles:
            info |= {"tensor_sizes": bucket.sizes, "ipc_handles_pickled": bucket.pickled_handles()}
        return info

    def _begin(self, init_info: dict[str, Any]) -> None:
        self._http.post("/init_weight_transfer_engine", {"init_info": init_info}, weights.BUCKET_S)
