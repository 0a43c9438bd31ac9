"""The rollout engine over an inference server, which is in one of these states:

    starting ──> awake <──hold, resume──> held: it pauses, and its weights may change
                   │  ^
               sleep  wake_weights, wake
                   v  │
                  asleep ──dies──> dead ──revive──> starting

A server that dies or hangs in any other state is started again (`_recover`): its requests are lost, and so are weights
that it was sent. New weights come while it is held, or while it wakes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import fivefold.rollout.servers.dialect as dialects
from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.config.paths import resolve_model_path
from fivefold.families.read import load_shape
from fivefold.observe.progress import counting
from fivefold.rollout.hf_model import build_model, end_tokens
from fivefold.rollout.protocol import GenerationRequest, SamplingParams, ServerCounts, check_request
from fivefold.rollout.receiving import receiver_of
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers.dialect import Ask, AskedRoutes, Dialect
from fivefold.rollout.servers.images import SharedImages
from fivefold.rollout.servers.life import Restarts, ServerLife
from fivefold.rollout.servers.memory_share import share_bytes, with_share
from fivefold.rollout.servers.process import ServerDied
from fivefold.rollout.servers.stream import ServerStream
from fivefold.rollout.servers.updates import updates_of
from fivefold.rollout.servers.weights import StagedWeights
from fivefold.rollout.state import EngineState
from fivefold.rollout.stopping import StopRule
from fivefold.rollout.tokenizer import load_tokenizer
from fivefold.types import Completion
from fivefold.weights.device_buckets import DeviceBucket
from fivefold.weights.folder import NodePlace, Save
from fivefold.weights.nccl_link import Invitation, Meeting


class ServerEngine:
    """A `RolloutEngine` whose model is in an inference server on the devices that this process sees."""

    def __init__(self, dialect: Dialect, spec: ReplicaSpec, place: NodePlace, save: Save) -> None:
        """Start the server and wait until it is ready.

        Args:
            dialect: how to speak to the server.
            spec: the replica, whose backend is the server's.
            place: the replica's index on its node, whose replicas share the files of their weights.
            save: writes tensors as a model folder that the server reads.

        Raises:
            RuntimeError: the server ended before it was ready, or another process gets its requests.
            ValueError: a model whose tensor names are not known, too little room for files of its weights, or too long
                a path for its socket.
        """
        path, tokenizer_path = resolve_model_path(spec.path), resolve_model_path(spec.tokenizer_path)
        # The model's names and shapes are all that is needed here; the server has the weights.
        model, generation = build_model(
            path, dtype=getattr(torch, spec.dtype), device=torch.device("meta"), load_weights=False
        )
        self._config = model.config
        max_length = min(spec.max_length, self._config.max_position_embeddings)
        spec = with_share(replace(spec, path=path, tokenizer_path=tokenizer_path, max_length=max_length))
        self._dialect = dialect
        self._spec = spec
        self._tokenizer = load_tokenizer(tokenizer_path, trust_remote_code=spec.trust_remote_code)
        self._end_token_ids = sorted(end_tokens(model, generation, self._tokenizer))
        self._updates = updates_of(dialect, spec, model, place, save)
        self._images = SharedImages(getattr(torch, spec.dtype), dialect.images_key)
        self._staged: StagedWeights | None = None
        """Weights of the next `swap_weights`."""
        self._stream = ServerStream(
            self._send,
            dialect.answer,
            self._stop_rule,
            most=spec.max_batch_size,
            most_tokens=spec.new_tokens_per_chunk,
            routes=AskedRoutes.of(load_shape(resolve_model_folder(path))) if spec.returns_routes else None,
        )
        self._lost: dict[int, GenerationRequest] = {}
        """Requests that died with the server, and that `take_lost` has not returned."""
        self._restarts = Restarts(spec.max_restarts)
        self._counts = ServerCounts()
        """What the server had counted at the last call of `take_counts`."""
        self._start()
        self._wait_until_ready()

    # Requests

    def submit(self, number: int, request: GenerationRequest, sampling: SamplingParams) -> None:
        """Begin to answer request `number` (`RolloutEngine`).

        Raises:
            ValueError: a request or a sampling that the model cannot take.
            RuntimeError: the engine is asleep or has no weights.
        """
        check_request(request, sampling, self._config)
        self._state.require_weights()
        if not self._stream.n_running:
            self._life.works_now()
        self._stream.submit(number, request, sampling)

    def collect(self, seconds: float) -> list[tuple[int, Completion]]:
        """Wait until a submitted request is answered, or `seconds` have passed (`RolloutEngine`).

        A server rounds differently in batches of different size, so that the same request need not give the same
        completion twice. Log-probs that are not asked for are NaN.

        Raises:
            RuntimeError: the engine is asleep or has no weights, or the server failed.
        """
        if self._is_held:
            # It pauses until the trainer sends its weights.
            time.sleep(seconds)
            return []
        done: list[tuple[int, Completion]] = []
        with self._alive():
            done = self._stream.collect(self._state.require_weights(), seconds)
            if self._stream.n_running:
                self._life.check_beat()
        return done

    @property
    def n_running(self) -> int:
        """Number of requests that were submitted and that `collect` has not returned."""
        return self._stream.n_running

    def unfinished(self) -> dict[int, GenerationRequest]:
        """Return the requests that are not answered, with their tokens up to the last update (`RolloutEngine`)."""
        return self._lost | self._stream.unfinished()

    def take_lost(self) -> dict[int, GenerationRequest]:
        """Return the requests that were lost with their server since the last call (`RolloutEngine`)."""
        lost, self._lost = self._lost, {}
        return lost

    def take_restarts(self) -> list[str]:
        """Return why the server was started again since the last call, each with its last messages."""
        return self._restarts.take()

    def take_counts(self) -> ServerCounts:
        """Return what the server has counted since the last call (`RolloutEngine`)."""
        if not self._spec.counts:
            return ServerCounts()
        with self._alive():
            now, before = self._dialect.counts(self._life.http), self._counts
            self._counts = now
            return now - before
        return ServerCounts()  # the server has died, and with it its count

    def _send(self, ask: Ask, sampling: SamplingParams) -> bytes:
        """Ask the server, and return its reply; any thread may."""
        life = self._life
        with life.served(), self._images.held(ask.images) as images:
            body = self._dialect.request(ask, sampling, self._end_token_ids)
            reply = life.http.send("POST", self._dialect.generate_path, {**body, **images, **life.asked})
        life.works_now()
        return reply

    def _stop_rule(self, sampling: SamplingParams) -> StopRule:
        return StopRule(sampling, frozenset(self._end_token_ids), self._tokenizer, torch.device("cpu"))

    # Life and death

    def _start(self) -> None:
        """Start the server, without a wait until it is ready. One that nobody sends weights loads its own."""
        self._life = ServerLife(self._dialect, self._spec)
        self._counts = ServerCounts()
        self._state = EngineState(0 if self._spec.load_weights else None)
        self._is_held = False
        self._death: ServerDied | None = None
        """How it died while it slept, until `revive`."""
        if self._spec.load_weights:
            self._resume()

    def _wait_until_ready(self) -> None:
        """Return once the server is ready; one that was started again before may be so once more.

        Raises:
            ServerDied: the server ended before that, at its first start or too often.
            RuntimeError: another process gets its requests.
        """
        if self._life.is_ready:
            return
        with counting(f"starting the server{self._restarts.count}"):
            while not self._life.is_ready:
                try:
                    self._life.wait_until_ready()
                except ServerDied as death:
                    if not self._restarts.count:
                        raise
                    self._restart(death)

    @contextmanager
    def _alive(self, *, recovers: bool = True) -> Iterator[None]:
        """Run a block with a server that is ready; if it dies in the block, the block ends there, and it recovers.

        Raises:
            ServerDied: it has died too often; or once, unless it `recovers`.
        """
        self._wait_until_ready()
        try:
            with self._life.served():
                yield
        except ServerDied as death:
            if not recovers:
                raise
            self._recover(death)

    def _recover(self, death: ServerDied) -> None:
        """Start the server again. One that slept stays dead until `revive`: its devices may have no room for it.

        Raises as `_restart`.
        """
        if self._state.memory == "none":
            self._death = death
        else:
            self._restart(death)

    def _restart(self, death: ServerDied) -> None:
        """Start the server again, whose requests are lost; if it is sent weights, it has none before the next update.

        Raises:
            ServerDied: it has died too often.
        """
        self._restarts.add(death)
        self._life.close()
        self._lost |= self._stream.lose()
        self._start()

    def close(self) -> None:
        """End the server, and wait until it is gone."""
        self._life.close()

    # Hold and resume

    def _hold(self) -> None:
        """Make the server pause, if it answers requests.

        It aborts them, and their rest is asked for later; or it keeps them with their keys and values
        (`rollout.recompute_kv_cache: false`).
        """
        if not self._stream.n_running or self._is_held:
            return
        with self._alive():
            http = self._life.http
            if self._spec.keeps_cache:
                self._dialect.hold(http, dialects.PAUSE_S)
            else:
                self._stream.hold()
                self._dialect.pause(http, dialects.PAUSE_S)
                self._stream.interrupted()
            self._is_held = True

    def _resume(self) -> None:
        """Let the server answer with its weights, if it has all of its memory.

        A server that keeps caches gets its version even if it was not held, because nothing was running.
        """
        is_due = self._is_held or (self._spec.keeps_cache and self._state.has_weights)
        if not is_due or self._state.memory != "all":
            return
        with self._alive():
            version = self._state.require_weights()
            self._stream.resumed(version)
            if self._spec.keeps_cache:
                self._dialect.go_on(self._life.http, version)
            else:
                self._dialect.resume(self._life.http)
            self._is_held = False
            self._life.works_now()

    # Weights

    @property
    def has_weights(self) -> bool:
        """Whether the server has weights; one that was started again has none before the next update."""
        return self._state.has_weights

    def receive(self, items: Iterator[Any], version: int) -> None:
        """Replace all weights of the server by a transport's items (`RolloutEngine`).

        Raises as `update_weights` and `load_buckets`.
        """
        transport = self._spec.route.transport
        if transport.carries_weights:
            self.update_weights(receiver_of(transport, self._spec.path)(items, torch.device("cpu")), version)
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
        """Write weights to the files that the server loads in `swap_weights`; it answers meanwhile (`RolloutEngine`).

        Raises:
            ValueError: as `update_weights`; the engine then keeps the weights that it has.
        """
        self._staged = self._updates.staged(weights, version)

    def swap_weights(self) -> None:
        """Let the server load the staged weights, between two tokens of its requests (`RolloutEngine`)."""
        assert self._staged is not None, "stage_weights comes first"
        staged, self._staged = self._staged, None
        with staged.files, self._replacing(staged.version):
            self._updates.load_files(self._life, staged)

    def load_buckets(self, buckets: Iterator[DeviceBucket], version: int) -> None:
        """Replace all weights of the server by those in buckets on the trainer's devices.

        Raises:
            ValueError: a tensor that is missing, unknown, sent twice or of the wrong shape. The engine then refuses to
                generate until an update succeeds.
            RuntimeError: the engine is asleep, the server failed, or what arrived is not what was sent.
        """
        transport = self._spec.route.transport
        sent: list[DeviceBucket] = []
        with self._replacing(version):
            if transport.is_collective and not self._life.is_linked:
                raise ServerDied("the server died when its weights were about to come by NCCL")
            self._updates.load_buckets(self._life, buckets, version, sent, is_paused=self._is_held)
        if transport.passes_handles and not self.has_weights:
            self._updates.release([*sent, *buckets])

    @contextmanager
    def _replacing(self, version: int) -> Iterator[None]:
        """Hold the server for the block, which replaces its weights by `version`; it then resumes.

        One that dies meanwhile starts again, without weights until the next update. By NCCL it does not: the trainer
        and the other servers wait in a transfer that cannot end.
        """
        self._hold()
        with self._alive(recovers=not self._spec.route.transport.is_collective):
            self._state.begin_update()
            yield
            self._state.end_update(version)
        self._resume()

    @property
    def meeting(self) -> Meeting:
        """How the server enters an NCCL group."""
        self._wait_until_ready()
        return self._life.loader.meeting

    def expect_transfer(self) -> bool:
        """Prepare for weights that the trainer is about to send by NCCL; return whether the server is in a group.

        One that has died or hangs starts again, outside any group. To show that it does not hang, a server with
        requests aborts them, and resumes with the weights that come; one without requests samples a token.
        """
        with self._alive():
            self._life.check()
            if self._state.has_weights and not self.n_running:
                self._life.sample_token(dialects.PAUSE_S)
        if self._state.has_weights:
            self._hold()
        return self._life.is_linked

    def enter(self, invitation: Invitation, rank_offset: int) -> None:
        """Make the server's processes enter an NCCL group as the ranks from `rank_offset` on; wait until they have."""
        self._wait_until_ready()
        with self._life.served(), self._life.transferring():
            self._life.loader.enter(invitation, rank_offset)
        self._life.is_linked = True

    # Memory

    @property
    def device_share(self) -> int | None:
        """Bytes of each of its devices that the awake server takes; None: it settles that itself, or has no GPU."""
        return share_bytes(self._spec)

    def sleep(self) -> None:
        """Make the server forget its weights, and give back the memory of weights and cache.

        Weights that it has loaded itself stay in host memory, because nobody sends them again.
        If no other role uses the devices, the server keeps its memory. An engine that sleeps stays as it is. A server
        that has died is started again before it sleeps.
        """
        while self._state.memory != "none":
            self._hold()
            self.wake()  # servers cannot give back twice what they have not taken since
            with self._alive():
                if self._spec.can_sleep:
                    self._dialect.sleep(self._life.http, keeps_weights=self._spec.loads_files)
                self._state.sleep(keeps_weights=self._spec.load_weights)

    def wake_weights(self) -> bool:
        """Make the server take the memory of its weights again. An engine that has it stays as it is.

        Returns False if the server has died while it slept; `revive` then starts it again.
        """
        if self._state.memory == "none":
            with self._alive():
                if self._spec.can_sleep:
                    self._dialect.wake_weights(self._life.http)
                self._state.wake_weights()
        return self._state.memory != "none"

    def revive(self) -> None:
        """Start a server again that has died while it slept, and let it sleep; one that lives stays as it is.

        Its devices need room for all that it takes while it is awake.
        """
        if self._death is not None:
            self._restart(self._death)
            self.sleep()

    def wake(self) -> None:
        """Make the server take all of its memory again. An engine that is awake stays as it is.

        A server that has died is started again, awake and without weights.
        """
        if not self.wake_weights():
            assert self._death is not None
            self._restart(self._death)
        if self._state.memory == "all":
            return
        with self._alive():
            if self._spec.can_sleep:
                self._dialect.wake_cache(self._life.http)
            self._state.wake()
        self._resume()
