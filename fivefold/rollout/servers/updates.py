"""What a server gets with an update of its weights: files in a folder, or buckets on the trainer's devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.families.read import load_shape
from fivefold.families.sigmoid_experts import is_router_offset
from fivefold.rollout.hf_names import file_tensors
from fivefold.rollout.hf_weights import FileTensor, audited
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers.dialect import Dialect
from fivefold.rollout.servers.life import ServerLife
from fivefold.rollout.servers.weights import StagedWeights
from fivefold.weights.cuda_ipc import release, visible_uuids
from fivefold.weights.device_buckets import Checksum, DeviceBucket, check_arrived
from fivefold.weights.folder import NodePlace, Save, WeightFolder


class ServerUpdates:
    """Gives weights to a server that lives, and compares what arrives with what was sent."""

    def __init__(
        self,
        dialect: Dialect,
        spec: ReplicaSpec,
        tensors: Mapping[str, FileTensor],
        place: NodePlace,
        save: Save,
        n_bytes: int | None = None,
    ) -> None:
        """Prepare the folder of the files, if weights come as files.

        Args:
            dialect: how to speak to the server.
            spec: the replica.
            tensors: the tensors of an update, by their names.
            place: the replica's index on its node, whose replicas share the files.
            save: writes tensors as a folder that the server reads.
            n_bytes: bytes of the files; None: they hold the tensors and little else.

        Raises:
            ValueError: too little room for the files.
        """
        self._dialect = dialect
        self._spec = spec
        self._tensors = tensors
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._folder: WeightFolder | None = None
        if spec.route.transport.carries_weights and not spec.followers:  # files are on one node
            n_values = sum(math.prod(tensor.view().shape) for tensor in tensors.values())
            self._folder = WeightFolder(place, save, n_bytes or n_values * self._dtype.itemsize)

    def staged(self, weights: Iterable[tuple[str, Tensor]], version: int) -> StagedWeights:
        """Write weights, cast to the server's dtype, to files.

        Raises:
            ValueError: a tensor that is missing, unknown, sent twice or of the wrong shape.
        """
        assert self._folder is not None, "the weights of this replica do not come as files"
        cast = (
            (name, tensor.to(torch.float32 if is_router_offset(name) else self._dtype))
            for name, tensor in audited(self._tensors, weights)
        )
        sent = Checksum(cast, self._spec.route.checksum)
        with ExitStack() as files:
            folder = files.enter_context(self._folder.holding(sent, version))
            return StagedWeights(version, folder, sent, files.pop_all())

    def load_files(self, life: ServerLife, staged: StagedWeights) -> None:
        """Let the server load staged weights.

        Raises:
            RuntimeError: what arrived is not what was sent.
        """
        if self._spec.adapters is not None:
            life.asked = self._dialect.load_adapters(life.http, staged.folder, staged.version, life.asked)
            return
        with self._checked(life, lambda: staged.sent.total):
            self._dialect.load(life.http, staged.folder, staged.version, keeps_cache=self._spec.keeps_cache)

    def load_buckets(
        self,
        life: ServerLife,
        buckets: Iterator[DeviceBucket],
        version: int,
        sent: list[DeviceBucket],
        *,
        is_paused: bool,
    ) -> None:
        """Let the server load buckets on the trainer's devices; each is added to `sent` first.

        Raises:
            ValueError: a tensor that is missing, unknown, sent twice or of the wrong shape.
            RuntimeError: what arrived is not what was sent.
        """

        def noted() -> Iterator[DeviceBucket]:
            for bucket in buckets:
                sent.append(bucket)
                yield bucket

        with self._checked(life, lambda: sum(bucket.checksum or 0 for bucket in sent)), life.transferring():
            life.loader.load(noted(), version, is_paused=is_paused)
        for _ in audited(self._tensors, (outline for bucket in sent for outline in bucket.outlines())):
            pass

    def release(self, buckets: Iterable[DeviceBucket]) -> None:
        """Release the handles of a server that has died, which the trainer would keep for it."""
        uuids = set(visible_uuids())
        release(handle for bucket in buckets for uuid, handle in bucket.handles.items() if uuid in uuids)

    @contextmanager
    def _checked(self, life: ServerLife, sent: Callable[[], int]) -> Iterator[None]:
        """Compare the checksum of the weights that arrive in the block, if the route has one, with `sent`."""
        if not self._spec.route.checksum:
            yield
            return
        self._dialect.watch_weights(life.http)
        yield
        check_arrived(self._dialect.arrived(life.http), sent())


def updates_of(
    dialect: Dialect, spec: ReplicaSpec, model: PreTrainedModel, place: NodePlace, save: Save
) -> ServerUpdates:
    """Return what gives the server of `spec` the weights of a model, or adapters next to them.

    Args:
        dialect: how to speak to the server.
        spec: the replica.
        model: the model; only its names and shapes are read.
        place: the replica's index on its node, whose replicas share the files.
        save: writes whole weights as a model folder that the server reads.

    Raises:
        ValueError: names that are not known, or too little room for the files.
    """
    if spec.adapters is None:
        return ServerUpdates(dialect, spec, file_tensors(model), place, save)
    # Imported by who has adapters.
    from fivefold.bridge.served_folder import ServedFolder

    shape = replace(load_shape(resolve_model_folder(spec.path)), adapters=spec.adapters.shape)
    folder = ServedFolder(shape, getattr(torch, spec.dtype), one_rank=dialect.adapters_of_one_rank)
    sent = {name: FileTensor(torch.empty(full, device="meta")) for name, full in folder.sent.items()}
    return ServerUpdates(dialect, spec, sent, place, folder.save, folder.n_bytes)
