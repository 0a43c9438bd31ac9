"""How a server gets new weights: from files, or from buckets on the trainer's devices.

interrupt ─> files (`stage_weights`, `swap_weights`) or buckets (`load_buckets`) ─> its version is new, and it resumes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from fivefold.families.sigmoid_experts import is_router_offset
from fivefold.rollout.hf_weights import FileTensor, audited
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers import standstill
from fivefold.rollout.servers.dialect import Dialect
from fivefold.rollout.servers.living import LivingServer
from fivefold.rollout.servers.process import ServerDied
from fivefold.rollout.servers.weights import StagedWeights
from fivefold.weights.cuda_ipc import release, visible_uuids
from fivefold.weights.device_buckets import Checksum, DeviceBucket, check_arrived
from fivefold.weights.folder import WeightFolder
from fivefold.weights.nccl_link import Invitation, Meeting


class UpdatedServer(LivingServer):
    """A server that the trainer sends its weights."""

    def __init__(
        self, dialect: Dialect, spec: ReplicaSpec, tensors: Mapping[str, FileTensor], folder: WeightFolder | None
    ) -> None:
        """Start the server and wait until it is ready.

        Args:
            dialect: how to speak to the server.
            spec: the replica.
            tensors: the model's tensors, by their names in files.
            folder: where its weights come as files, if they do.

        Raises as `LivingServer`.
        """
        self._tensors = tensors
        self._folder = folder
        self._staged: StagedWeights | None = None
        """Weights of the next `swap_weights`."""
        super().__init__(dialect, spec)

    def receive(self, items: Iterator[Any], version: int) -> None:
        """Replace all weights of the server by a transport's items (`RolloutEngine`).

        Raises as `update_weights` and `load_buckets`.
        """
        transport = self._spec.route.transport
        if transport.carries_weights:
            self.update_weights(transport.receiver()(items, torch.device("cpu")), version)
        else:
            self.load_buckets(items, version)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights of the server, cast to its dtype; the server drops what it has cached with other weights.

        Raises:
            ValueError: a tensor that is missing, unknown, sent twice or of the wrong shape. The engine then refuses to
                generate until an update succeeds.
            RuntimeError: the engine is asleep, or the server failed.
        """
        self._state.begin_update()
        self.stage_weights(weights, version)
        self.swap_weights()

    def stage_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write weights, cast to the server's dtype, to the files that it loads in `swap_weights` (`RolloutEngine`).

        The server answers meanwhile.

        Raises:
            ValueError: as `update_weights`; the engine then keeps the weights that it has.
        """
        assert self._folder is not None, "the weights of this replica do not come as files"
        dtype = getattr(torch, self._spec.dtype)
        cast = (
            (name, tensor.to(torch.float32 if is_router_offset(name) else dtype))
            for name, tensor in audited(self._tensors, weights)
        )
        sent = Checksum(cast, self._spec.route.checksum)
        with ExitStack() as files:
            folder = files.enter_context(self._folder.holding(sent, version))
            self._staged = StagedWeights(version, folder, sent, files.pop_all())

    def swap_weights(self) -> None:
        """Let the server load the staged weights, between two tokens of its requests (`RolloutEngine`)."""
        assert self._staged is not None, "stage_weights comes first"
        staged, self._staged = self._staged, None
        with staged.files, self._replacing(staged.version), self._checked(lambda: staged.sent.total):
            keeps_cache = self._spec.keeps_cache
            self._dialect.load(self._server.http, staged.folder, staged.version, keeps_cache=keeps_cache)

    def load_buckets(self, buckets: Iterator[DeviceBucket], version: int) -> None:
        """Replace all weights of the server by those in buckets on the trainer's devices.

        Raises:
            ValueError: a tensor that is missing, unknown, sent twice or of the wrong shape. The engine then refuses to
                generate until an update succeeds.
            RuntimeError: the engine is asleep, the server failed, or what arrived is not what was sent.
        """
        sent: list[DeviceBucket] = []

        def noted() -> Iterator[DeviceBucket]:
            for bucket in buckets:
                sent.append(bucket)
                yield bucket

        with self._replacing(version):
            if self._spec.route.transport.is_collective and not self._server.is_linked:
                raise ServerDied("the server died when its weights were about to come by NCCL")
            with self._checked(lambda: sum(bucket.checksum or 0 for bucket in sent)), self._server.transferring():
                self._server.loader.load(noted(), version, is_paused=self._standstill.is_on)
            for _ in audited(self._tensors, (outline for bucket in sent for outline in bucket.outlines())):
                pass
        if not self._state.has_weights and self._spec.route.transport.passes_handles:
            self._release([*sent, *buckets])

    def _release(self, buckets: Sequence[DeviceBucket]) -> None:
        """Release the handles of a server that has died, which the trainer would keep for it."""
        uuids = set(visible_uuids())
        release(handle for bucket in buckets for uuid, handle in bucket.handles.items() if uuid in uuids)

    @contextmanager
    def _replacing(self, version: int) -> Iterator[None]:
        """Interrupt the server for the block, which replaces its weights by `version`; it then resumes.

        One that dies meanwhile starts again, without weights until the next update. By NCCL it does not: the trainer
        and the other servers wait in a transfer that cannot end.
        """
        self._interrupt()
        self._server.wait_until_ready()
        self._state.begin_update()
        try:
            with self._server.served():
                yield
        except ServerDied as death:
            if self._spec.route.transport.is_collective:
                raise
            self._restart(death)
            return
        self._state.end_update(version)
        self._go_on()

    @property
    def meeting(self) -> Meeting:
        """How the server enters an NCCL group."""
        return self._server.loader.meeting

    def expect_transfer(self) -> bool:
        """Prepare for weights that the trainer is about to send by NCCL; return whether the server is in a group.

        One that has died or hangs starts again, outside any group. To show that it does not hang, a server with
        requests aborts them, and resumes with the weights that come; one without requests samples a token.
        """
        try:
            self._server.check()
            if self._state.has_weights:
                self._interrupt() if self.n_running else self._server.sample_token(standstill.PAUSE_S)
        except ServerDied as death:
            self._restart(death)
        return self._server.is_linked

    def enter(self, invitation: Invitation, rank_offset: int) -> None:
        """Make the server's processes enter an NCCL group as the ranks from `rank_offset` on; wait until they have."""
        with self._server.served(), self._server.transferring():
            self._server.loader.enter(invitation, rank_offset)
        self._server.is_linked = True

    @contextmanager
    def _checked(self, sent: Callable[[], int]) -> Iterator[None]:
        """Compare the checksum of the weights that arrive during the block, if the route has one, with `sent`."""
        if not self._spec.route.checksum:
            yield
            return
        self._dialect.watch_weights(self._server.http)
        yield
        check_arrived(self._dialect.arrived(self._server.http), sent())
