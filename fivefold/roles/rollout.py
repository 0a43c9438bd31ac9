"""What a rollout process holds: one replica of the generation engine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial

from fivefold.bridge.hf_writer import save_hf
from fivefold.cluster.rendezvous import PLACE_ON_NODE, PROCESSES_ON_NODE
from fivefold.rollout.engines import build_engine, weights_device
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers.weights import NodePlace
from fivefold.sync.buckets import Bucket, unpack
from fivefold.types import Completion


class RolloutWorker:
    """The verbs of the rollout's side of the loop."""

    def __init__(self, spec: ReplicaSpec) -> None:
        place = NodePlace(spec.run, int(os.environ[PLACE_ON_NODE]), int(os.environ[PROCESSES_ON_NODE]))
        save = partial(save_hf, config_source=spec.path, tokenizer_source=spec.tokenizer_path)
        self._device = weights_device(spec)
        self._engine = build_engine(spec, place, save)

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Completion]:
        """One completion for each request."""
        return self._engine.generate(requests, sampling)

    def update_weights(self, buckets: Iterator[Bucket], version: int) -> None:
        """Replace all weights by those of the actor."""
        self._engine.update_weights(unpack(buckets, self._device), version)

    def sleep(self) -> None:
        """Forget the weights and leave the devices to the actor."""
        self._engine.sleep()

    def wake(self) -> None:
        """Take the devices back; the weights come with the next `update_weights`."""
        self._engine.wake()
