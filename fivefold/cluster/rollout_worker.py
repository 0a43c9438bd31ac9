"""What a rollout process holds: one replica of the generation engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.transformers_engine import TransformersEngine
from fivefold.sync.buckets import Bucket, unpack
from fivefold.types import Completion


class RolloutWorker:
    """The verbs of the rollout's side of the loop."""

    def __init__(self, path: str, tokenizer_path: str, dtype: str, max_batch_size: int, load_weights: bool) -> None:
        """
        Args:
            path: model folder; its weights are read only with `load_weights`, else they come from the actor.
            dtype: `float32` or `bfloat16`.
        """
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._engine = TransformersEngine.from_path(
            path,
            dtype=dtype,
            device=self._device,
            max_batch_size=max_batch_size,
            tokenizer_path=tokenizer_path,
            load_weights=load_weights,
        )

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Completion]:
        """One completion for each request."""
        return self._engine.generate(requests, sampling)

    def update_weights(self, buckets: Iterator[Bucket], version: int) -> None:
        """Replace all weights by those of the actor."""
        self._engine.update_weights(unpack(buckets, self._device), version)

    def sleep(self) -> None:
        """Forget the weights and leave the device to the actor."""
        self._engine.sleep()

    def wake(self) -> None:
        """Take the device back; the weights come with the next `update_weights`."""
        self._engine.wake()
