"""The replicas that generate: the driver's handle of them, and the worker in each replica's process.

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
import numpy.typing as npt

from fivefold.bridge.hf_writer import save_hf
from fivefold.cluster.group import Remote, WorkerGroup
from fivefold.cluster.rendezvous import PLACE_ON_NODE, PROCESSES_ON_NODE
from fivefold.config.paths import resolve_model_path
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.rollout.engines import build_engine, weights_device
from fivefold.rollout.hf_model import load_tokenizer
from fivefold.rollout.protocol import GenerationRequest, SamplingParams, group_requests
from fivefold.rollout.replica import ReplicaSpec
from fivefold.sync.buckets import Bucket, unpack
from fivefold.sync.folder import NodePlace
from fivefold.sync.offer import WeightOffer
from fivefold.types import NOT_SAMPLED, Columns, FinishReason, Prompt, Sample, Trajectory


@dataclass(frozen=True, eq=False)
class Generated:
    """Samples without rewards, those of one prompt side by side."""

    samples: list[Sample]
    batch: RemoteBatch
    """The same sequences, in the same order."""


class Rollout:
    """The driver's handle of all replicas."""

    def __init__(self, group: WorkerGroup, shares_devices: bool) -> None:
        self._group = group
        self.shares_devices = shares_devices

    def generate(
        self, prompts: Sequence[Prompt], n_samples: int, sampling: SamplingParams, key: tuple[int | str, ...]
    ) -> Generated:
        """Generate `n_samples` completions of each prompt.

        Args:
            key: decides the random choices, together with a prompt's place and the sample's place in its group.
        """
        asked = [prompt for prompt in prompts for _ in range(n_samples)]
        requests = group_requests([prompt.token_ids for prompt in prompts], n_samples, key)
        size = math.ceil(len(requests) / len(self._group))
        starts = range(0, size * len(self._group), size)
        shares = [(asked[start : start + size], requests[start : start + size], sampling) for start in starts]
        kept = self._group.keep_each(RolloutWorker.generate, shares)
        return generated(asked, kept)

    def take_weights(self, offer: WeightOffer) -> None:
        """Give every replica the weights that the actor offers, bucket by bucket."""
        self._group.feed(RolloutWorker.take_weights, offer.buckets, offer.version)

    def sleep(self) -> None:
        """Drop the weights and leave the devices to the actor."""
        self._group.call(RolloutWorker.sleep)

    def wake(self) -> None:
        """Take the devices back; call `take_weights` next, because `sleep` has dropped the weights."""
        self._group.call(RolloutWorker.wake)


@dataclass(frozen=True, eq=False)
class Responses:
    """What a replica reports of its N trajectories to the driver."""

    texts: list[str]
    """The sampled tokens of each, decoded without special tokens."""
    finish_reasons: list[FinishReason]
    lengths_N: npt.NDArray[np.int64]
    """Tokens of each trajectory."""
    sampled_N: npt.NDArray[np.int64]
    """Tokens of each trajectory that the policy sampled."""
    versions_N2: npt.NDArray[np.int64]
    """Oldest and newest version of the weights that sampled each trajectory."""

    @staticmethod
    def of(trajectories: Sequence[Trajectory], texts: list[str]) -> Responses:
        """Return the report of `trajectories`, whose sampled tokens decode to `texts`."""
        sampled = [trajectory.versions_T[trajectory.mask_T] for trajectory in trajectories]
        return Responses(
            texts=texts,
            finish_reasons=[trajectory.finish_reason for trajectory in trajectories],
            lengths_N=np.array([len(trajectory.tokens_T) for trajectory in trajectories], dtype=np.int64),
            sampled_N=np.array([len(versions) for versions in sampled], dtype=np.int64),
            versions_N2=np.array([_span(versions) for versions in sampled], dtype=np.int64),
        )


def _span(versions: npt.NDArray[np.int32]) -> tuple[int, int]:
    """Return the oldest and the newest of the versions; `NOT_SAMPLED` twice if nothing was sampled."""
    return (int(versions.min()), int(versions.max())) if len(versions) else (NOT_SAMPLED, NOT_SAMPLED)


def generated(asked: Sequence[Prompt], kept: Sequence[tuple[Responses, Remote]]) -> Generated:
    """Combine the results of all replicas. `asked` holds each trajectory's prompt, in the order of the replicas."""
    answered = [(responses, columns) for responses, columns in kept if responses.texts]
    starts = np.cumsum([0, *(len(responses.texts) for responses, _ in answered)])
    pieces = [Piece(columns, np.arange(*starts[i : i + 2])) for i, (_, columns) in enumerate(answered)]
    lengths_N = np.concatenate([responses.lengths_N for responses, _ in answered])
    sampled_N = np.concatenate([responses.sampled_N for responses, _ in answered])
    versions_N2 = np.concatenate([responses.versions_N2 for responses, _ in answered])
    samples = [
        Sample(prompt, text, reason, length, n_sampled, (oldest, newest))
        for prompt, text, reason, length, n_sampled, (oldest, newest) in zip(
            asked,
            (text for responses, _ in answered for text in responses.texts),
            (reason for responses, _ in answered for reason in responses.finish_reasons),
            lengths_N.tolist(),
            sampled_N.tolist(),
            versions_N2.tolist(),
            strict=True,
        )
    ]
    return Generated(samples, RemoteBatch(lengths_N, sampled_N, tuple(pieces)))


class RolloutWorker:
    """One replica of the rollout engine."""

    def __init__(self, spec: ReplicaSpec) -> None:
        place = NodePlace(spec.run, int(os.environ[PLACE_ON_NODE]), int(os.environ[PROCESSES_ON_NODE]))
        save = partial(save_hf, config_source=spec.path, tokenizer_source=spec.tokenizer_path)
        self._device = weights_device(spec)
        self._engine = build_engine(spec, place, save)
        self._tokenizer = load_tokenizer(resolve_model_path(spec.tokenizer_path))

    def generate(
        self, prompts: Sequence[Prompt], requests: Sequence[GenerationRequest], sampling: SamplingParams
    ) -> tuple[Responses, Columns | None]:
        """Generate one trajectory for each request, which asks for the prompt at the same index.

        Returns:
            The report for the driver, and the columns of the trajectories; None if there are no trajectories.
        """
        completions = self._engine.generate(requests, sampling)
        trajectories = [
            Trajectory.single_turn(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)
        ]
        texts = self._tokenizer.batch_decode([c.token_ids.tolist() for c in completions], skip_special_tokens=True)
        return Responses.of(trajectories, texts), Columns.of(trajectories) if trajectories else None

    def take_weights(self, buckets: Iterator[Bucket], version: int) -> None:
        """Replace all weights by those in `buckets`, whose version is `version`."""
        self._engine.update_weights(unpack(buckets, self._device), version)

    def sleep(self) -> None:
        """Drop the weights and leave the devices to the actor."""
        self._engine.sleep()

    def wake(self) -> None:
        """Take the devices back; the weights come with the next `take_weights`."""
        self._engine.wake()
