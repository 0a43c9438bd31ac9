"""The replicas that generate: the worker's verbs, and the driver's.

driver   prompts ─> requests, shared out over the replicas ─> samples (text, lengths), and the tokens by reference
replica  requests ─> completions ─> trajectories ─> columns, which stay in the object store
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fivefold.bridge.hf_writer import save_hf
from fivefold.cluster.group import WorkerGroup
from fivefold.cluster.rendezvous import PLACE_ON_NODE, PROCESSES_ON_NODE
from fivefold.config.paths import resolve_model_path
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.rollout.engines import build_engine, weights_device
from fivefold.rollout.hf_model import load_tokenizer
from fivefold.rollout.protocol import GenerationRequest, SamplingParams, group_requests
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers.weights import NodePlace
from fivefold.sync.buckets import Bucket, unpack
from fivefold.sync.offer import WeightOffer
from fivefold.types import Columns, FinishReason, Prompt, Sample, Trajectory


@dataclass(frozen=True, eq=False)
class Generated:
    """What a rollout made of some prompts, the group of a prompt side by side. Nothing is judged yet."""

    samples: list[Sample]
    batch: RemoteBatch
    """The same sequences, in the same order."""


class Rollout:
    """Verbs over the replicas."""

    def __init__(self, group: WorkerGroup, shares_devices: bool) -> None:
        self._group = group
        self.shares_devices = shares_devices

    def generate(
        self, prompts: Sequence[Prompt], n_samples: int, sampling: SamplingParams, key: tuple[int | str, ...]
    ) -> Generated:
        """`n_samples` completions of each prompt.

        Args:
            key: decides the random choices, together with a prompt's place and the sample's place in its group.
        """
        asked = [prompt for prompt in prompts for _ in range(n_samples)]
        requests = group_requests([prompt.token_ids for prompt in prompts], n_samples, key)
        size = math.ceil(len(requests) / len(self._group))
        starts = range(0, size * len(self._group), size)
        shares = [(asked[start : start + size], requests[start : start + size], sampling) for start in starts]
        kept = self._group.keep_each(RolloutWorker.generate, shares)
        responses = [response for answered, _ in kept for response in answered]
        pieces = [
            Piece(columns, np.arange(start, start + len(answered)))
            for start, (answered, columns) in zip(starts, kept, strict=True)
            if answered
        ]
        return _generated(asked, responses, pieces)

    def take_weights(self, offer: WeightOffer) -> None:
        """Bring every replica to the weights that the actor offers, piece by piece."""
        self._group.feed(RolloutWorker.take_weights, offer.buckets, offer.version)

    def sleep(self) -> None:
        """Forget the weights and leave the devices to the actor."""
        self._group.call(RolloutWorker.sleep)

    def wake(self) -> None:
        """Take the devices back; the next thing must be new weights."""
        self._group.call(RolloutWorker.wake)


@dataclass(frozen=True)
class Response:
    """What the driver is told of one trajectory."""

    text: str
    """The sampled tokens, decoded without special tokens."""
    finish_reason: FinishReason
    n_tokens: int
    n_sampled: int
    versions: tuple[int, int]
    """Oldest and newest version of the weights that sampled it."""


def _generated(asked: Sequence[Prompt], responses: Sequence[Response], pieces: Sequence[Piece]) -> Generated:
    samples = [
        Sample(prompt, response.text, response.finish_reason, response.n_tokens, response.n_sampled, response.versions)
        for prompt, response in zip(asked, responses, strict=True)
    ]
    batch = RemoteBatch(
        lengths_N=np.array([sample.n_tokens for sample in samples], dtype=np.int64),
        trained_N=np.array([sample.n_sampled for sample in samples], dtype=np.int64),
        pieces=tuple(pieces),
    )
    return Generated(samples, batch)


class RolloutWorker:
    """One replica of the generation engine, and its verbs."""

    def __init__(self, spec: ReplicaSpec) -> None:
        place = NodePlace(spec.run, int(os.environ[PLACE_ON_NODE]), int(os.environ[PROCESSES_ON_NODE]))
        save = partial(save_hf, config_source=spec.path, tokenizer_source=spec.tokenizer_path)
        self._device = weights_device(spec)
        self._engine = build_engine(spec, place, save)
        self._tokenizer = load_tokenizer(resolve_model_path(spec.tokenizer_path))

    def generate(
        self, prompts: Sequence[Prompt], requests: Sequence[GenerationRequest], sampling: SamplingParams
    ) -> tuple[list[Response], Columns | None]:
        """One trajectory for each request, which is for the prompt at the same place.

        Returns:
            What the driver is told of each, and their columns; None for the columns of no trajectory.
        """
        completions = self._engine.generate(requests, sampling)
        trajectories = [
            Trajectory.single_turn(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)
        ]
        texts = self._tokenizer.batch_decode([list(c.token_ids) for c in completions], skip_special_tokens=True)
        responses = [_response(trajectory, text) for trajectory, text in zip(trajectories, texts, strict=True)]
        return responses, Columns.of(trajectories) if trajectories else None

    def take_weights(self, buckets: Iterator[Bucket], version: int) -> None:
        """Replace all weights by those that the actor offers."""
        self._engine.update_weights(unpack(buckets, self._device), version)

    def sleep(self) -> None:
        """Forget the weights and leave the devices to the actor."""
        self._engine.sleep()

    def wake(self) -> None:
        """Take the devices back; the weights come with the next `take_weights`."""
        self._engine.wake()


def _response(trajectory: Trajectory, text: str) -> Response:
    sampled = trajectory.versions_T[trajectory.mask_T]
    return Response(
        text=text,
        finish_reason=trajectory.finish_reason,
        n_tokens=len(trajectory.tokens_T),
        n_sampled=len(sampled),
        versions=(int(sampled.min()), int(sampled.max())),
    )
