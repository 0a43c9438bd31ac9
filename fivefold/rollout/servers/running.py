"""An inference server that runs, with the connections to it, and that can be started again when it has died.

This process is on the server's first node, which has its HTTP API.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fivefold.config.schema.rollout import GenerationConfig
from fivefold.observe.progress import counting
from fivefold.rollout.protocol import SamplingParams
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers.client import HttpClient, ServerGone, ServerHangs, ServerRefused
from fivefold.rollout.servers.command import server_command
from fivefold.rollout.servers.dialect import Ask, Dialect
from fivefold.rollout.servers.follower import Follower
from fivefold.rollout.servers.place import Place
from fivefold.rollout.servers.port import claim_port
from fivefold.rollout.servers.process import ServerDied, ServerProcess
from fivefold.rollout.servers.weights import WeightLoader

DEATH_S = 60.0
"""Seconds that a server may take to end after its connections have broken."""

GRACE_S = 60.0
"""Seconds that a server has, besides `rollout.server_timeout_s`, to load weights, to sleep or to wake."""

WELL_S = 2.0
"""Seconds that a server has to say that it is well, when it has not taken its weights."""


class RunningServer:
    """A server's processes, its connections, and what gives it weights."""

    http: HttpClient
    """Connections to the server of the last start."""

    def __init__(self, dialect: Dialect, spec: ReplicaSpec) -> None:
        """Start the server, without waiting until it is ready."""
        self._dialect = dialect
        self._spec = spec
        self._n_restarts = 0
        self.start()

    def start(self) -> None:
        """Start the server, without waiting until it is ready."""
        listening = self._dialect.place()
        # For a stream, for other requests beside it, and for what controls the server.
        self.http = HttpClient(
            listening.address,
            n_connections=2 * self._spec.max_batch_size + 1,
            limit_s=self._spec.server_timeout_s + GRACE_S,
        )
        places: list[Place] = [listening]
        specs = [self._spec]
        if self._spec.followers:
            places.append(meeting := claim_port())
            specs = self._spec.by_node(meeting.number)
        own, *others = specs
        followers = [Follower(address, spec) for address, spec in zip(self._spec.followers, others, strict=True)]
        command = server_command(self._dialect, own, listening.address)
        self._process = ServerProcess(command, self._dialect.environment(own), places, followers)
        self._loader: WeightLoader | None = None
        self.is_linked = False
        """Whether it is in an NCCL group with the trainer."""
        self._is_ready = False

    def wait_until_ready(self) -> None:
        """Return once the server of the last start is ready. One that was started again may be so once more.

        Raises:
            ServerDied: the server ended before that, at its first start or too often.
            RuntimeError: another process gets its requests.
        """
        if self._is_ready:
            return
        with counting("starting the server"):
            while not self._has_become_ready():
                self.start()
        if not self._spec.route.transport.carries_weights:
            devices = [uuid for follower in self._spec.followers for uuid in follower.devices]
            self._loader = self._dialect.loader(self.http, self._spec, [*self._dialect.devices(self._spec), *devices])
        self._is_ready = True

    def _has_become_ready(self) -> bool:
        """Wait until the server is ready, and return True; False: it has died, and may be started again."""
        try:
            self._process.wait_until_ready(self.http)
        except ServerDied as death:
            if self._n_restarts == 0:
                raise
            self.close_after(death)
            return False
        return True

    @property
    def loader(self) -> WeightLoader:
        """What gives the server weights from devices, once it is ready."""
        self.wait_until_ready()
        assert self._loader is not None, "it loads them from files"
        return self._loader

    def close_after(self, death: ServerDied) -> None:
        """End what is left of a server that has died and is to be started again.

        Raises:
            ServerDied: it has died too often.
        """
        self._n_restarts += 1
        if self._n_restarts > self._spec.max_restarts:
            raise death
        print(f"{death}; it is started again ({self._n_restarts} of {self._spec.max_restarts} times)", flush=True)
        self.close()

    def check(self) -> None:
        """Raise ServerDied if the server has ended."""
        self._process.check()

    @contextmanager
    def served(self) -> Iterator[None]:
        """Report a server that dies inside this context as dead; its broken connection alone says less.

        Raises:
            ServerDied: it has died, or did not answer and was ended.
        """
        try:
            yield
        except ServerHangs as hang:
            cause = f"{hang}, and was ended"
            self._process.close(cause)
            raise ServerDied(cause) from None
        except ServerGone as gone:
            self._check_end()
            raise gone from None
        except ServerRefused as refusal:
            # vLLM's API server refuses all requests once its engine has died, and ends seconds later.
            if refusal.is_its_own_fault and not self.http.is_healthy():
                self._check_end()
            raise refusal from None

    def _check_end(self) -> None:
        """Raise ServerDied if the server ends soon."""
        try:
            self._process.check(DEATH_S)
        except ServerDied as death:
            raise death from None

    @contextmanager
    def transferring(self) -> Iterator[None]:
        """Say of a server that does not take weights inside this context whether it may only wait for another one.

        Raises:
            ServerDied: it does not, and weights travel by NCCL, so that nobody else can go on.
        """
        try:
            yield
        except ServerHangs as hang:
            if not self._spec.route.transport.is_collective:
                raise
            # By these words, the run takes the server for one that waits for the cause.
            waits = ", though it is well: perhaps it has timed out because another server or the trainer hangs"
            is_well = self.http.is_healthy(WELL_S)
            raise ServerDied(f"{hang}, for weights that travel by NCCL{waits if is_well else ''}") from None

    def beat(self, limit_s: float) -> None:
        """Return once a server that may have requests has sampled a token since, or if it has nothing to sample.

        Raises:
            ServerDied: it has died, or did not within `limit_s` seconds and was ended.
        """
        with self.served():
            self._dialect.beat(self.http, limit_s)

    def sample_token(self, limit_s: float) -> None:
        """Let a server that has weights and no requests sample one token.

        Raises:
            ServerDied: it has died, or did not within `limit_s` seconds and was ended.
        """
        ask = Ask((0,), n=1, seed=0, wants_logprobs=False)
        sampling = SamplingParams.from_config(GenerationConfig(max_new_tokens=1, greedy=True))
        with self.served():
            body = self._dialect.request(ask, sampling, ())
            self.http.send("POST", self._dialect.generate_path, body, limit_s)

    def close(self) -> None:
        """End the server, and wait until it is gone."""
        self._process.close()
