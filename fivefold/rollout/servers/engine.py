"""The rollout engine over an inference server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from fivefold.config.paths import resolve_model_path
from fivefold.families.sigmoid_experts import is_router_offset
from fivefold.rollout.checks import check_requests
from fivefold.rollout.hf_model import build_model, end_tokens
from fivefold.rollout.hf_weights import audited, file_tensors
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers import standstill
from fivefold.rollout.servers.dialect import Answer, Ask, Dialect
from fivefold.rollout.servers.memory_share import share_bytes, with_share
from fivefold.rollout.servers.process import ServerDied
from fivefold.rollout.servers.room import answered, asks_of
from fivefold.rollout.servers.running import RunningServer
from fivefold.rollout.servers.standstill import Standstill
from fivefold.rollout.servers.stream import ServerStream
from fivefold.rollout.servers.watch import Watch
from fivefold.rollout.servers.weights import StagedWeights
from fivefold.rollout.state import EngineState
from fivefold.rollout.stopping import StopRule
from fivefold.rollout.tokenizer import load_tokenizer
from fivefold.sync.cuda_ipc import release, visible_uuids
from fivefold.sync.device_buckets import Checksum, DeviceBucket, check_arrived
from fivefold.sync.folder import NodePlace, Save, WeightFolder
from fivefold.sync.nccl_link import Invitation, Meeting
from fivefold.types import Completion


class ServerEngine:
    """A `RolloutEngine` whose model is in an inference server on the devices that this process sees."""

    def __init__(self, dialect: Dialect, spec: ReplicaSpec, place: NodePlace, save: Save) -> None:
        """Start the server and wait until it is ready.

        Args:
            dialect: how to speak to the server.
            spec: the replica, whose backend is the server's.
            place: where the replica stands among those of its node, which share the files of their weights.
            save: writes tensors as a model folder that the server reads.

        Raises:
            RuntimeError: the server ended before it was ready, or another process gets its requests.
            ValueError: a model whose tensor names are not known, too little room for files of its weights, or too long
                a path for its socket.
        """
        self._dialect = dialect
        path = resolve_model_path(spec.path)
        tokenizer_path = resolve_model_path(spec.tokenizer_path)
        # The model's names and shapes are all that is needed here; the server has the weights.
        model, generation = build_model(
            path, dtype=getattr(torch, spec.dtype), device=torch.device("meta"), load_weights=False
        )
        self._config = model.config
        max_length = min(spec.max_length, self._config.max_position_embeddings)
        spec = replace(spec, path=path, tokenizer_path=tokenizer_path, max_length=max_length)
        self._spec = spec = with_share(spec)
        self._tensors = file_tensors(model)
        self._tokenizer = load_tokenizer(tokenizer_path)
        self._end_token_ids = sorted(end_tokens(model, generation, self._tokenizer))
        self._weights: WeightFolder | None = None
        """Where its weights come as files, if they do: those are on one node."""
        if spec.route.transport == "folder" and not spec.followers:
            sizes = (math.prod(tensor.view().shape) for tensor in self._tensors.values())
            self._weights = WeightFolder(place, save, sum(sizes) * model.dtype.itemsize)
        self._stream: ServerStream | None = None
        self._staged: StagedWeights | None = None
        """Weights of the next `swap_weights`."""
        self._lost: dict[int, list[GenerationRequest]] = {}
        """Jobs that died with their server, and that `take_lost` has not told."""
        self._death: ServerDied | None = None
        """How the server died while it slept, until `revive`."""
        self._server = RunningServer(dialect, spec)
        self._watch = Watch(self._beat, spec.server_timeout_s)
        self._begin()
        self._server.wait_until_ready()

    def _begin(self) -> None:
        """Begin with a server that was just started. One that nobody sends weights loads its own, and then goes on."""
        self._state = EngineState(0 if self._spec.load_weights else None)
        self._standstill = Standstill(self._dialect, keeps_cache=self._spec.keeps_cache)
        if self._spec.load_weights:
            self._server.wait_until_ready()
            self._go_on()

    def _restart(self, death: ServerDied) -> None:
        """Start the server again, whose jobs are lost; if it is sent weights, it has none before the next update.

        Raises:
            ServerDied: see `RunningServer.close_after`.
        """
        self._server.close_after(death)
        if self._stream is not None:
            self._lost |= self._stream.lose()
        self._server.start()
        self._begin()

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Completion]:
        """Return one completion for each request, in the order of the requests.

        A server rounds differently in batches of different size, so that the same request need not give the same
        completion twice. Log-probs that are not asked for are NaN.

        Raises:
            ValueError: a request or a sampling that the model cannot take.
            RuntimeError: the engine is asleep or has no weights, or the server failed.
        """
        check_requests(requests, sampling, self._config)
        asks = asks_of(requests, sampling, self._spec.max_batch_size)
        ends = list(accumulate(ask.n for ask in asks))
        jobs = [requests[end - ask.n : end] for ask, end in zip(asks, ends, strict=True)]
        done = dict(self.generate_each(iter(jobs), sampling))
        return [done[number][index] for number, job in enumerate(jobs) for index in range(len(job))]

    def generate_each(
        self, jobs: Iterator[Sequence[GenerationRequest]], sampling: SamplingParams, *, may_end: bool = False
    ) -> Iterator[tuple[int, Mapping[int, Completion]]]:
        """Yield each job's number and its completions, all at once, as jobs finish (`RolloutEngine`).

        Raises as `generate`.
        """
        version = self._state.require_weights()
        most = self._spec.max_batch_size
        stop = StopRule(sampling, frozenset(self._end_token_ids), self._tokenizer, torch.device("cpu"))

        def asks(requests: Sequence[GenerationRequest]) -> list[Ask]:
            check_requests(requests, sampling, self._config)
            return asks_of(requests, sampling, most)

        def complete(ask: Ask) -> list[Completion]:
            answers = self._read(self._send(ask, sampling), ask)
            return [_truly_ended(answer.completion(version), stop) for answer in answers]

        try:
            with self._watch.watching():
                yield from answered(map(asks, jobs), complete, most)
        except ServerDied as death:
            if not may_end:
                raise
            self._restart(death)

    def submit(self, number: int, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> None:
        """Begin to answer the requests of job `number` (`RolloutEngine`).

        Raises:
            ValueError: a request or a sampling that the model cannot take.
            RuntimeError: the engine is asleep or has no weights.
        """
        check_requests(requests, sampling, self._config)
        if self._stream is None or self._stream.sampling != sampling:
            assert self._stream is None or not self._stream.n_running
            most, chunk = self._spec.max_batch_size, self._spec.new_tokens_per_chunk
            self._stream = ServerStream(
                self._send,
                self._read,
                sampling,
                most=most,
                most_tokens=chunk,
                end_token_ids=self._end_token_ids,
                tokenizer=self._tokenizer,
            )
        self._state.require_weights()
        self._stream.submit(number, requests)

    def collect(self, seconds: float) -> list[tuple[int, list[Completion]]]:
        """Wait until a submitted job is done, or `seconds` have passed (`RolloutEngine`).

        Raises:
            RuntimeError: the engine is asleep or has no weights, or the server failed.
        """
        if self._stream is None:
            return []
        if self._standstill.is_on:
            # It stands still until the trainer sends its weights.
            time.sleep(seconds)
            return []
        try:
            done = self._stream.collect(self._state.require_weights(), seconds)
            if self._stream.quiet_s > self._spec.server_timeout_s:
                self._beat()
                self._stream.quiet_s = 0.0
            return done
        except ServerDied as death:
            self._restart(death)
            return []

    def _beat(self) -> None:
        """Let a server that has not answered for long show that it goes on.

        Raises:
            ServerDied: it has died, or does not go on and was ended.
        """
        self._server.beat(standstill.PAUSE_S)

    @property
    def n_running(self) -> int:
        """Number of requests that were submitted and are not answered."""
        return 0 if self._stream is None else self._stream.n_running

    def unfinished(self) -> dict[int, list[GenerationRequest]]:
        """Return the submitted jobs with their tokens up to the last update (`RolloutEngine`)."""
        return self._lost | ({} if self._stream is None else self._stream.unfinished())

    def take_lost(self) -> dict[int, list[GenerationRequest]]:
        """Return the jobs that were lost with their server since the last call (`RolloutEngine`)."""
        lost, self._lost = self._lost, {}
        return lost

    @property
    def has_weights(self) -> bool:
        """Whether the server has weights; one that was started again has none before the next update."""
        return self._state.has_weights

    def _send(self, ask: Ask, sampling: SamplingParams) -> bytes:
        """Ask the server, and return its reply; any thread may."""
        with self._server.served():
            body = self._dialect.request(ask, sampling, self._end_token_ids)
            reply = self._server.http.send("POST", self._dialect.generate_path, body)
        self._watch.answered()
        return reply

    def _read(self, reply: bytes, ask: Ask) -> list[Answer]:
        """Return the answers to an ask."""
        answers = self._dialect.answers(reply, ask)
        if len(answers) != ask.n:
            raise RuntimeError(f"the server gave {len(answers)} completions where {ask.n} were asked for")
        return answers

    def _interrupt(self) -> None:
        """Make the server stand still if it answers jobs of the stream.

        One that has died is started again, without a wait until it is ready.
        """
        self._server.wait_until_ready()
        if self._stream is None or not self._stream.n_running or self._standstill.is_on:
            return
        try:
            with self._server.served():
                self._standstill.begin(self._server.http, self._stream)
        except ServerDied as death:
            self._restart(death)

    def _go_on(self) -> None:
        """Let the server answer with its weights, if it has all of its memory. One that dies of it is started again."""
        is_due = self._standstill.is_on or (self._spec.keeps_cache and self._state.has_weights)
        if not is_due or self._state.memory != "all":
            return
        try:
            with self._server.served():
                self._standstill.end(self._server.http, self._stream, self._state.require_weights())
        except ServerDied as death:
            self._restart(death)

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
            ValueError: as `update_weights`; the engine then goes on with the weights that it has.
        """
        assert self._weights is not None, "the weights of this replica do not come as files"
        dtype = getattr(torch, self._spec.dtype)
        cast = (
            (name, tensor.to(torch.float32 if is_router_offset(name) else dtype))
            for name, tensor in audited(self._tensors, weights)
        )
        sent = Checksum(cast, self._spec.route.checksum)
        with ExitStack() as files:
            folder = files.enter_context(self._weights.holding(sent, version))
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
            if self._spec.route.transport == "nccl" and not self._server.is_linked:
                raise ServerDied("the server died when its weights were about to come by NCCL")
            with self._checked(lambda: sum(bucket.checksum or 0 for bucket in sent)), self._server.transferring():
                self._server.loader.load(noted(), version, is_paused=self._standstill.is_on)
            for _ in audited(self._tensors, (outline for bucket in sent for outline in bucket.outlines())):
                pass
        if not self._state.has_weights and self._spec.route.transport == "ipc":
            self._release([*sent, *buckets])

    def _release(self, buckets: Sequence[DeviceBucket]) -> None:
        """Release the handles of a server that has died, which the trainer would keep for it."""
        uuids = set(visible_uuids())
        release(handle for bucket in buckets for uuid, handle in bucket.handles.items() if uuid in uuids)

    @contextmanager
    def _replacing(self, version: int) -> Iterator[None]:
        """Interrupt the server for the block, which replaces its weights by those of `version`; it then goes on.

        One that dies meanwhile is started again, and has no weights before the next update. By NCCL it is not: the
        trainer and the other servers wait in a transfer that cannot end.
        """
        self._interrupt()
        self._server.wait_until_ready()
        self._state.begin_update()
        try:
            with self._server.served():
                yield
        except ServerDied as death:
            if self._spec.route.transport == "nccl":
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

        One that has died or hangs is started again, and is in none. To show that it does not hang, a server with
        requests aborts them, and goes on with the weights that come; one without requests samples a token.
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

    def sleep(self) -> None:
        """Make the server forget its weights, and give back the memory of weights and cache.

        If no other role uses the devices, the server keeps its memory. An engine that sleeps stays as it is. A server
        that has died is started again before it sleeps.
        """
        while self._state.memory != "none":
            self._interrupt()
            self._server.wait_until_ready()
            self.wake()  # servers cannot give back twice what they have not taken since
            try:
                if self._spec.can_sleep:
                    with self._server.served():
                        self._dialect.sleep(self._server.http)
            except ServerDied as death:
                self._restart(death)
                continue
            self._state.sleep()

    @property
    def device_share(self) -> int | None:
        """Bytes of each of its devices that the awake server takes; None: it settles that itself, or has no GPU."""
        return share_bytes(self._spec)

    def wake_weights(self) -> bool:
        """Make the server take the memory of its weights again. An engine that has it stays as it is.

        Returns False if the server has died while it slept; `revive` then starts it again.
        """
        if self._state.memory != "none":
            return True
        try:
            if self._spec.can_sleep:
                with self._server.served():
                    self._dialect.wake_weights(self._server.http)
        except ServerDied as death:
            self._death = death
            return False
        self._state.wake_weights()
        return True

    def revive(self) -> None:
        """Start a server again that has died while it slept, and let it sleep; one that lives stays as it is.

        Its devices need room for all that it takes while it is awake.
        """
        if self._death is not None:
            death, self._death = self._death, None
            self._restart(death)
            self.sleep()

    def wake(self) -> None:
        """Make the server take all of its memory again. An engine that is awake stays as it is.

        A server that has died is started again, awake and without weights.
        """
        if self._state.memory == "all":
            return
        try:
            if self._spec.can_sleep:
                with self._server.served():
                    if self._state.memory == "none":
                        self._dialect.wake_weights(self._server.http)
                    self._dialect.wake_cache(self._server.http)
        except ServerDied as death:
            self._restart(death)
            return
        self._state.wake()
        self._go_on()

    def close(self) -> None:
        """End the server, and wait until it is gone."""
        self._server.close()

    @contextmanager
    def _checked(self, sent: Callable[[], int]) -> Iterator[None]:
        """Compare the checksum of the weights that arrive during the block, if the route has one, with `sent`."""
        if not self._spec.route.checksum:
            yield
            return
        self._dialect.watch_weights(self._server.http)
        yield
        check_arrived(self._dialect.arrived(self._server.http), sent())


def _truly_ended(completion: Completion, stop: StopRule) -> Completion:
    """Return a completion that ends as `stop` says with its last token also where that is the last one it may have.

    SGLang looks at the limit first, and says `length`.
    """
    if completion.finish_reason == "length" and stop.has_ended(completion.token_ids.tolist()):
        return replace(completion, finish_reason="stop")
    return completion
