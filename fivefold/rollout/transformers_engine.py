"""The embedded rollout engine: Hugging Face transformers on the CPU or on one GPU, in waves of requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fivefold.bridge.text_config import family_of
from fivefold.config.paths import resolve_model_path
from fivefold.rollout.embedded_stream import EmbeddedStream
from fivefold.rollout.hf_model import build_model, end_tokens
from fivefold.rollout.hf_names import file_tensors
from fivefold.rollout.hf_weights import audited, receive_weights
from fivefold.rollout.protocol import GenerationRequest, SamplingParams, ServerCounts, check_request
from fivefold.rollout.receiving import receiver_of
from fivefold.rollout.routes import RouteRecorder
from fivefold.rollout.state import EngineState
from fivefold.rollout.stopping import StopRule
from fivefold.rollout.tokenizer import load_tokenizer
from fivefold.types import Completion
from fivefold.weights.host_memory import THROUGH_HOST
from fivefold.weights.stream import Receiver
from fivefold.weights.transport import Transport

if TYPE_CHECKING:
    from fivefold.vision.tower import VisionTower


class TransformersEngine:
    """A `RolloutEngine` over a transformers causal language model."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        end_token_ids: Iterable[int],
        max_batch_size: int,
        weight_version: int | None,
        keeps_weights: bool = False,
        recomputes: bool = False,
        receiver: Receiver | None = None,
        records_routes: bool = False,
        tower: VisionTower | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            model: the model that `build_model` returns.
            tokenizer: decodes completions to look for stop texts; it may be None if there are none.
            end_token_ids: tokens after which a completion ends.
            max_batch_size: most rows that are decoded at one time.
            weight_version: version of the weights in `model`; None: it has none before the first `update_weights`.
            keeps_weights: whether its weights are on the host while it sleeps; otherwise they are forgotten.
            recomputes: whether new weights compute the keys and values of submitted requests again.
            receiver: takes weights from a transport's items; None: from the buckets of host memory.
            records_routes: whether completions tell the experts of their tokens.
            tower: sees the images of prompts; None: the model reads text alone.

        Raises:
            ValueError: routes of a model without experts.
        """
        self._model = model
        self._tokenizer = tokenizer
        self._end_token_ids = frozenset(end_token_ids)
        recorder = RouteRecorder(model) if records_routes else None
        self._stream = EmbeddedStream(
            model, self._stop_rule, max_rows=max_batch_size, recomputes=recomputes, recorder=recorder, tower=tower
        )
        self._tower = tower
        self._state = EngineState(weight_version)
        self._keeps_weights = keeps_weights
        self._tensors = file_tensors(model)
        self._receiver = receiver or THROUGH_HOST.transport.receiver()
        self._staged: tuple[int, list[tuple[str, Tensor]]] | None = None
        """Version and tensors of the next `swap_weights`."""
        self._shapes = [parameter.shape for parameter in model.parameters()]
        self._device = model.device

    @classmethod
    def from_path(
        cls,
        path: str,
        *,
        dtype: str,
        device: str | torch.device,
        max_batch_size: int,
        tokenizer_path: str | None,
        load_weights: bool,
        trust_remote_code: bool = False,
        recomputes: bool = False,
        transport: Transport = THROUGH_HOST.transport,
        records_routes: bool = False,
    ) -> TransformersEngine:
        """Build the engine of a model.

        Args:
            path: model folder, hub name or `package:<name>`.
            dtype: `float32` or `bfloat16`.
            device: device of the model.
            max_batch_size: most rows that are decoded at one time.
            tokenizer_path: like `path`; None: `path`.
            load_weights: True: the checkpoint's weights, as version 0, which it keeps while it sleeps. False: the
                config alone is read, and the engine waits for `update_weights`.
            trust_remote_code: whether code of the tokenizer's folder is run.
            recomputes: whether new weights compute the keys and values of submitted requests again.
            transport: how weights come.
            records_routes: whether completions tell the experts of their tokens.

        Raises:
            ValueError: a path without a model or a tokenizer, or a model that cannot run here.
        """
        folder = resolve_model_path(path)
        model, generation = build_model(
            folder, dtype=getattr(torch, dtype), device=torch.device(device), load_weights=load_weights
        )
        source = folder if tokenizer_path is None else resolve_model_path(tokenizer_path)
        tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
        return cls(
            model,
            tokenizer,
            end_token_ids=end_tokens(model, generation, tokenizer),
            max_batch_size=max_batch_size,
            weight_version=0 if load_weights else None,
            keeps_weights=load_weights,
            recomputes=recomputes,
            receiver=receiver_of(transport, folder),
            records_routes=records_routes,
            tower=_tower(folder, model),
        )

    def submit(self, number: int, request: GenerationRequest, sampling: SamplingParams) -> None:
        """Begin to answer request `number`, in parallel with those in progress.

        Raises:
            ValueError: a request or a sampling that the model cannot take.
            RuntimeError: the engine is asleep or has no weights.
        """
        check_request(request, sampling, self._model.config)
        self._state.require_weights()
        self._stream.submit(number, request, sampling)

    def collect(self, seconds: float) -> list[tuple[int, Completion]]:
        """Work on submitted requests until some are answered, or about `seconds` have passed (`RolloutEngine`).

        Log-probs belong to the sampling distribution; of greedy completions, to the model's own logits. A
        request gives the same completion whichever requests share its batch, up to the rounding of matmuls.

        Raises:
            RuntimeError: the engine is asleep or has no weights, or the model's logits are not finite.
        """
        return self._stream.collect(self._state.require_weights(), seconds) if self._stream.n_running else []

    @property
    def n_running(self) -> int:
        """Number of requests that were submitted and that `collect` has not returned."""
        return self._stream.n_running

    def unfinished(self) -> dict[int, GenerationRequest]:
        """Return nothing: the random numbers of a request decide its completion, wherever it begins again."""
        return {}

    def take_lost(self) -> dict[int, GenerationRequest]:
        """Return nothing: the engine is in this process, which ends with it."""
        return {}

    def take_restarts(self) -> list[str]:
        """Return nothing: there is no server."""
        return []

    def take_counts(self) -> ServerCounts:
        """Return zeros: nothing is drafted, and no prefix is kept (`RolloutEngine`)."""
        return ServerCounts()

    @property
    def has_weights(self) -> bool:
        """Whether the engine has a complete set of weights."""
        return self._state.has_weights

    def _stop_rule(self, sampling: SamplingParams) -> StopRule:
        return StopRule(sampling, self._end_token_ids, self._tokenizer, self._device)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy `weights`, named as in Hugging Face files, into the model in place, cast to its dtype.

        Nothing is allocated, and no parameter moves.

        Raises:
            ValueError: a tensor that is missing, unknown, sent twice or of the wrong shape. The engine then refuses to
                generate until an update succeeds.
            RuntimeError: the engine is asleep.
        """
        self._state.begin_update()
        receive_weights(self._tensors, weights)
        self._state.end_update(version)

    def stage_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Keep `weights` for `swap_weights`, without a copy of them (`RolloutEngine`).

        Raises:
            ValueError: as `update_weights`; the engine then keeps the weights that it has.
        """
        self._staged = version, list(audited(self._tensors, weights))

    def swap_weights(self) -> None:
        """Copy the staged weights into the model, and forget them (`RolloutEngine`)."""
        assert self._staged is not None, "stage_weights comes first"
        (version, weights), self._staged = self._staged, None
        self.update_weights(weights, version)

    def receive(self, items: Iterator[Any], version: int) -> None:
        """Copy the weights out of a transport's items (`RolloutEngine`)."""
        self.update_weights(self._receiver(items, self._device), version)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return the weights under their names in Hugging Face files, as views that an update changes.

        Raises:
            RuntimeError: the engine is asleep or has no weights.
        """
        self._state.require_weights()
        return ((name, tensor.view()) for name, tensor in self._tensors.items())

    def sleep(self) -> None:
        """Forget the weights, and the keys and values of submitted requests, and free their memory.

        Weights that it has loaded itself are moved to the host, because nobody sends them again.
        Buffers such as rotary frequencies stay: they are small, and no update brings them.
        """
        self._state.sleep(keeps_weights=self._keeps_weights)
        self._stream.forget()
        for parameter in self._model.parameters():
            parameter.data = parameter.data.cpu() if self._keeps_weights else parameter.data.new_empty(0)
        if self._tower is not None:
            self._tower.sleep()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_weights(self) -> bool:
        """Take the weights back, or allocate them for `update_weights`. An engine that has them stays as it is."""
        if self._state.memory != "none":
            return True
        for parameter, shape in zip(self._model.parameters(), self._shapes, strict=True):
            kept = parameter.data.to(self._device) if self._keeps_weights else None
            parameter.data = parameter.data.new_empty(shape) if kept is None else kept
        if self._tower is not None:
            self._tower.wake()
        self._state.wake_weights()
        return True

    def wake(self) -> None:
        """Do what `wake_weights` does, and allow `generate`, which allocates its cache itself."""
        self.wake_weights()
        self._state.wake()


def _tower(path: str, model: PreTrainedModel) -> VisionTower | None:
    """Return the vision tower of a model at `path` (folder or hub name); None: it reads text alone."""
    family = family_of(path)
    if family is None or not family.sees:
        return None
    from fivefold.vision.tower import VisionTower  # by models that see images

    return VisionTower(path, model.dtype, model.device)
