"""The worker in the process of one replica of the rollout."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fivefold.batch import Columns
from fivefold.bridge.hf_writer import save_hf
from fivefold.cluster.role import HOST, NODE, PLACE_ON_NODE, PROCESSES_ON_NODE
from fivefold.config.paths import resolve_model_path
from fivefold.engine.deterministic import make_deterministic
from fivefold.environments.build import build_environment
from fivefold.environments.play import SETTLE_S, Player, tasks_of
from fivefold.environments.transcript import transcript_text
from fivefold.roles.responses import Job, Responses
from fivefold.rollout.contract import RolloutEngine
from fivefold.rollout.engines import DIALECTS, build_engine
from fivefold.rollout.protocol import GenerationRequest, ServerCounts
from fivefold.rollout.replica import FollowerAddress, ReplicaNode, ReplicaSpec
from fivefold.rollout.tokenizer import decoded, load_tokenizer
from fivefold.types import Episode
from fivefold.weights.folder import NodePlace

if TYPE_CHECKING:
    from fivefold.rollout.servers.engine import ServerEngine


class RolloutWorker:
    """One replica of the rollout engine. Its weights come through a part of it, `weight_sync.ReceivesWeights`."""

    def __init__(self, spec: ReplicaSpec, followers: Sequence[tuple[FollowerAddress, ...]] = ()) -> None:
        """Build the engine; a server is ready when this returns.

        Args:
            spec: the replica.
            followers: the further nodes of each replica; nothing if all replicas are on one node.
        """
        if spec.deterministic:
            make_deterministic()
        run = f"{spec.run}-{os.environ[NODE]}"
        place = NodePlace(run, int(os.environ[PLACE_ON_NODE]), int(os.environ[PROCESSES_ON_NODE]))
        save = partial(save_hf, config_source=spec.path, tokenizer_source=spec.tokenizer_path)
        self.spec = spec
        if followers:
            own = followers[int(os.environ["RANK"])]
            spec = replace(spec, node=ReplicaNode(host=os.environ[HOST]), followers=own)
        self.engine = build_engine(spec, place, save)
        tokenizer_path = resolve_model_path(spec.tokenizer_path)
        self._tokenizer = load_tokenizer(tokenizer_path, trust_remote_code=spec.trust_remote_code)
        spec.chat.apply(self._tokenizer)
        self._answers_beside = spec.backend in DIALECTS
        """Whether the engine, a server, continues with a stream between two calls."""
        environment = build_environment(spec.environment, self._tokenizer)
        self._player = Player(self.engine, environment, 0.0 if self._answers_beside else SETTLE_S)
        self._jobs: dict[int, Job] = {}
        """Jobs that are not done, by their number."""
        self._told: dict[int, list[GenerationRequest]] = {}
        """Jobs that were lost, as the last report tells, which the driver may not have read before the next call."""
        self._reported_at: float | None = None
        """When the last report left such a server with requests, if nothing has interrupted it since."""

    def advance(self, jobs: Sequence[Job], seconds: float) -> tuple[Responses, Columns | None]:
        """Begin further jobs, and continue with all of them until one is done or about `seconds` have passed.

        Returns:
            The report on the jobs that are done, and the columns of their episodes.
        """
        began, self._reported_at = self._reported_at or time.perf_counter(), None
        if not self.engine.has_weights:
            # Its server has died while it took weights, which is reported here.
            self._told = self._take_lost() | {job.number: list(job.requests) for job in jobs}
            report, _ = self._reported((), began)
            return replace(report, lost=self._told, has_weights=False, restarts=self.engine.take_restarts()), None
        for job in jobs:
            self._jobs[job.number] = job
            self._player.begin(job.number, tasks_of(job.prompt, job.requests, job.sampling))
        waited = self._player.waited_s
        done = self._player.advance(seconds)
        report, columns = self._reported([(self._jobs.pop(number), episodes) for number, episodes in done], began)
        self._told = self._take_lost()
        n_running, has_weights = self._player.n_running, self.engine.has_weights
        if self._answers_beside and n_running:
            self._reported_at = time.perf_counter()
        counts = self.engine.take_counts() if done else ServerCounts()
        waited = self._player.waited_s - waited
        report = replace(report, n_running=n_running, lost=self._told, has_weights=has_weights, counts=counts)
        report = replace(report, waited_s=waited)
        return replace(report, restarts=self.engine.take_restarts()), columns

    def _take_lost(self) -> dict[int, list[GenerationRequest]]:
        """Forget the jobs that the engine has lost; return their requests with what is known of their completions."""
        lost = self._player.take_lost()
        for number in lost:
            del self._jobs[number]
        return lost

    def can_generate(self) -> bool:
        """Return whether the engine has weights; a server that was started again has none before the next update."""
        return self.engine.has_weights

    def unfinished(self) -> dict[int, list[GenerationRequest]]:
        """Return the requests of the jobs that are not done, by the job's number, with their tokens so far."""
        return self._told | self._player.unfinished()

    def _reported(self, done: Sequence[tuple[Job, list[Episode]]], began: float) -> tuple[Responses, Columns | None]:
        """Return the report on jobs with their episodes, and the columns of these."""
        episodes = [episode for _, own in done for episode in own]
        texts = decoded(self._tokenizer, [episode.sampled_tokens for episode in episodes])
        numbers = [job.number for job, _ in done]
        transcripts = [
            None if self.spec.environment is None else transcript_text(self._tokenizer, episode) for episode in episodes
        ]
        report = Responses.of(numbers, episodes, texts, time.perf_counter() - began, transcripts)
        return report, Columns.of(episodes) if episodes else None

    def interrupted(self) -> RolloutEngine:
        """Return the engine, whose work on its requests is interrupted."""
        self._reported_at = None
        return self.engine

    def sleep(self) -> None:
        """Drop the weights and leave the devices to the actor."""
        self.interrupted().sleep()

    def wake_weights(self) -> bool:
        """Take the device memory of the weights back; they come with the next `ReceivesWeights.take`.

        Returns False if a server has died while it slept: see `revive`.
        """
        return self.engine.wake_weights()

    def revive(self) -> None:
        """Start a server again that has died while it slept, on devices with room for all that it takes."""
        self._server().revive()

    def wake(self) -> None:
        """Take the rest of the device memory back."""
        self.engine.wake()

    def device_share(self) -> int | None:
        """Return the bytes of each of its devices that the awake engine takes; None: it settles that itself."""
        from fivefold.rollout.servers.engine import ServerEngine

        return self.engine.device_share if isinstance(self.engine, ServerEngine) else None

    def _server(self) -> ServerEngine:
        """Return the engine, which is a server: no other engine enters an NCCL group."""
        from fivefold.rollout.servers.engine import ServerEngine

        assert isinstance(self.engine, ServerEngine)
        return self.engine
