"""One life of an inference server: from its start until its processes are gone.

This process is on the server's first node, which has its HTTP API.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import fivefold.rollout.servers.dialect as dialects
from fivefold.config.schema.rollout import GenerationConfig
from fivefold.rollout.protocol import SamplingParams
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers.client import KEY, HttpClient, ServerGone, ServerHangs, ServerRefused
from fivefold.rollout.servers.command import server_command
from fivefold.rollout.servers.dialect import Ask, Dialect
from fivefold.rollout.servers.follower import Follower
from fivefold.rollout.servers.place import Place
from fivefold.rollout.servers.port import claim_port
from fivefold.rollout.servers.process import ServerDied, ServerProcess, last_said
from fivefold.rollout.servers.weights import WeightLoader

DEATH_S = 60.0
"""Seconds that a server may take to end after its connections have broken."""
GRACE_S = 60.0
"""Seconds that a server has, besides `rollout.server_timeout_s`, to load weights, to sleep or to wake."""
WELL_S = 2.0
"""Seconds that a server has to say that it is well, when it has not taken its weights."""


class Restarts:
    """The starts of a server after its first one."""

    def __init__(self, most: int) -> None:
        """Allow `most` of them."""
        self._most = most
        self._n = 0
        self._told: list[str] = []
        """Why they were, as far as `take` has not told."""

    @property
    def count(self) -> str:
        """Which of them is the last one, as in ` again (1 of 3 times)`; nothing before the first."""
        return f" again ({self._n} of {self._most} times)" if self._n else ""

    def add(self, death: ServerDied) -> None:
        """Allow one more, after a death.

        Raises:
            ServerDied: it is one too many.
        """
        if self._n == self._most:
            raise death
        self._n += 1
        note = f"{death}; it is started{self.count}"
        self._told.append(f"{note}. Its last messages:\n{last_said()}")
        print(note, flush=True)

    def take(self) -> list[str]:
        """Return why they were since the last call, each with the server's last messages."""
        told, self._told = self._told, []
        return told


class ServerLife:
    """A server's processes, its connections, and what gives it weights."""

    def __init__(self, dialect: Dialect, spec: ReplicaSpec) -> None:
        """Start the server, without waiting until it is ready.

        Raises:
            ValueError: too long a path for its socket.
        """
        self._dialect = dialect
        self._spec = spec
        listening = dialect.place()
        # Every user of the machine reaches a port.
        key = secrets.token_hex(32) if isinstance(listening.address, int) else None
        # For a stream, for other requests next to it, and for what controls the server.
        self.http = HttpClient(
            listening.address,
            n_connections=2 * spec.max_batch_size + 1,
            limit_s=spec.server_timeout_s + GRACE_S,
            key=key,
        )
        places: list[Place] = [listening]
        specs = [spec]
        if spec.followers:
            places.append(meeting := claim_port())
            specs = spec.by_node(meeting.number)
        own, *others = specs
        followers = [Follower(address, spec) for address, spec in zip(spec.followers, others, strict=True)]
        command = server_command(dialect, own, listening.address)
        environment = {**dialect.environment(own), **({} if key is None else {KEY: key})}
        self._process = ServerProcess(command, environment, places, followers)
        self._loader: WeightLoader | None = None
        self.is_linked = False
        """Whether it is in an NCCL group with the trainer."""
        self.is_ready = False
        self.asked: Mapping[str, Any] = {}
        """What every request says besides: the adapters that answer it."""
        self._quiet_since = 0.0
        """When it last showed that it works, on the clock of `time.monotonic`."""

    def wait_until_ready(self) -> None:
        """Return once the server is ready.

        Raises:
            ServerDied: the server ended before that.
            RuntimeError: another process gets its requests.
        """
        if self.is_ready:
            return
        self._process.wait_until_ready(self.http)
        self._dialect.prepare(self.http, self._spec)
        if not self._spec.route.transport.carries_weights:
            devices = [uuid for follower in self._spec.followers for uuid in follower.devices]
            self._loader = self._dialect.loader(self.http, self._spec, [*self._dialect.devices(self._spec), *devices])
        self.is_ready = True

    @property
    def loader(self) -> WeightLoader:
        """What gives the server, which is ready, weights from devices."""
        assert self._loader is not None, "it is not ready, or loads them from files"
        return self._loader

    def check(self) -> None:
        """Raise ServerDied if the server has ended."""
        self._process.check()

    @contextmanager
    def served(self) -> Iterator[None]:
        """Report a server that dies in this context as dead; its broken connection alone says less.

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
        """Say of a server that does not take weights in this context whether it may only wait for another one.

        Raises:
            ServerDied: it does not, and weights travel by NCCL, so that nobody else can continue.
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

    def works_now(self) -> None:
        """Note that the server has answered, was asked or continues; any thread may."""
        self._quiet_since = time.monotonic()

    def check_beat(self) -> None:
        """Let a server that has requests and was quiet for long show that it still samples tokens.

        That it does not answer says little, because an answer comes as a whole, and a long one after many minutes.

        Raises:
            ServerHangs: it does not.
        """
        if time.monotonic() - self._quiet_since >= self._spec.server_timeout_s:
            self._dialect.beat(self.http, dialects.PAUSE_S)
            self.works_now()

    def sample_token(self, limit_s: float) -> None:
        """Let a server that has weights and no requests sample one token.

        Raises:
            ServerHangs: it did not within `limit_s` seconds.
        """
        sampling = SamplingParams.from_config(GenerationConfig(max_new_tokens=1, greedy=True))
        body = self._dialect.request(Ask((0,), seed=0, wants_logprobs=False), sampling, ())
        self.http.send("POST", self._dialect.generate_path, {**body, **self.asked}, limit_s)

    def close(self) -> None:
        """End the server, and wait until it is gone."""
        self._process.close()
