"""The server of an engine over all its lives: it is started again when it dies, and stands still, sleeps and wakes.

answers its stream ──interrupt──> stands still: its weights may change ──go on──> answers its stream
                   ──sleep──> has no memory ──wake──> has memory for weights, then all
dies or hangs ──restart──> begins anew: its jobs are lost, and so are weights that it was sent
"""

from __future__ import annotations

from fivefold.rollout.protocol import GenerationRequest
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers import standstill
from fivefold.rollout.servers.dialect import Dialect
from fivefold.rollout.servers.memory_share import share_bytes
from fivefold.rollout.servers.process import ServerDied
from fivefold.rollout.servers.running import RunningServer
from fivefold.rollout.servers.standstill import Standstill
from fivefold.rollout.servers.stream import ServerStream
from fivefold.rollout.servers.watch import Watch
from fivefold.rollout.state import EngineState


class LivingServer:
    """A server with what it has: weights, memory, and a stream of jobs that it answers."""

    _stream: ServerStream
    """The jobs, which an engine sets before the server is started."""

    def __init__(self, dialect: Dialect, spec: ReplicaSpec) -> None:
        """Start the server and wait until it is ready.

        Raises:
            RuntimeError: the server ended before it was ready, or another process gets its requests.
            ValueError: too long a path for its socket.
        """
        self._dialect = dialect
        self._spec = spec
        self._lost: dict[int, list[GenerationRequest]] = {}
        """Jobs that died with it, and that `take_lost` has not told."""
        self._death: ServerDied | None = None
        """How it died while it slept, until `revive`."""
        self._watch = Watch(self._beat, spec.server_timeout_s)
        self._server = RunningServer(dialect, spec)
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
        self._lost |= self._stream.lose()
        self._server.start()
        self._begin()

    @property
    def n_running(self) -> int:
        """Number of requests that were submitted and are not answered."""
        return self._stream.n_running

    def unfinished(self) -> dict[int, list[GenerationRequest]]:
        """Return the submitted jobs with their tokens up to the last update (`RolloutEngine`)."""
        return self._lost | self._stream.unfinished()

    def take_lost(self) -> dict[int, list[GenerationRequest]]:
        """Return the jobs that were lost with their server since the last call (`RolloutEngine`)."""
        lost, self._lost = self._lost, {}
        return lost

    @property
    def has_weights(self) -> bool:
        """Whether the server has weights; one that was started again has none before the next update."""
        return self._state.has_weights

    def _beat(self) -> None:
        """Let a server that has not answered for long show that it goes on.

        Raises:
            ServerDied: it has died, or does not go on and was ended.
        """
        self._server.beat(standstill.PAUSE_S)

    def _interrupt(self) -> None:
        """Make the server stand still if it answers jobs of the stream.

        One that has died is started again, without a wait until it is ready.
        """
        self._server.wait_until_ready()
        if not self._stream.n_running or self._standstill.is_on:
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
            self._watch.begin_anew()
        except ServerDied as death:
            self._restart(death)

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
