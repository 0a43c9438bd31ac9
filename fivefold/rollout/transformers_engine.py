"""The embedded rollout engine: Hugging Face transformers on the CPU or one GPU, in waves of ragged prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fivefold.config.paths import resolve_model_path
from fivefold.rollout.attention import rollout_kernels
from fivefold.rollout.checks import check_requests
from fivefold.rollout.decode import Decoded, decode_wave
from fivefold.rollout.hf_model import build_model, end_tokens, load_tokenizer
from fivefold.rollout.hf_weights import file_tensors, receive_weights
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.state import EngineState
from fivefold.rollout.stopping import StopRule
from fivefold.types import Completion


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
    ) -> None:
        """
        Args:
            model: built by `build_model`.
            tokenizer: needed for stop texts alone.
            end_token_ids: tokens after which a completion ends.
            max_batch_size: most rows decoded at one time.
            weight_version: version of the weights in `model`; None: it has none yet, and waits for `update_weights`.
        """
        self._model = model
        self._tokenizer = tokenizer
        self._end_token_ids = frozenset(end_token_ids)
        self._max_batch_size = max_batch_size
        self._state = EngineState(weight_version)
        self._tensors = file_tensors(model)
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
    ) -> TransformersEngine:
        """The engine for a model folder, hub name or `package:<name>`.

        Args:
            dtype: `float32` or `bfloat16`.
            tokenizer_path: None: `path`.
            load_weights: True: the checkpoint's weights, as version 0. False: the config alone is read, and the engine
                waits for `update_weights`.
        """
        folder = resolve_model_path(path)
        model, generation = build_model(
            folder, dtype=getattr(torch, dtype), device=torch.device(device), load_weights=load_weights
        )
        tokenizer = load_tokenizer(folder if tokenizer_path is None else resolve_model_path(tokenizer_path))
        return cls(
            model,
            tokenizer,
            end_token_ids=end_tokens(model, generation, tokenizer),
            max_batch_size=max_batch_size,
            weight_version=0 if load_weights else None,
        )

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Completion]:
        """One completion for each request, in the order of the requests.

        Log-probs are those of the sampling distribution; greedy completions carry log softmax of the logits as the
        model gave them. The same request gives the same completion whatever it shares the batch with, up to the
        rounding of the matmuls.

        Raises ValueError for a request or a sampling that the model cannot take, RuntimeError while asleep or without
        weights.
        """
        version = self._state.require_weights()
        check_requests(requests, sampling, self._model.config)
        stop = StopRule(sampling, self._end_token_ids, self._tokenizer, self._device)
        # Long prompts first, so that memory runs out at once or never; equal prompts side by side, to be computed once.
        order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].token_ids), requests[i].token_ids))
        decoded: dict[int, Decoded] = {}
        with torch.inference_mode(), rollout_kernels():
            for start in range(0, len(order), self._max_batch_size):
                wave = order[start : start + self._max_batch_size]
                answers = decode_wave(self._model, [requests[i] for i in wave], sampling, stop)
                decoded.update(zip(wave, answers, strict=True))
        return [
            Completion(decoded[i].token_ids, decoded[i].logprobs, decoded[i].finish_reason, version)
            for i in range(len(requests))
        ]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy `weights`, named as in Hugging Face files, into the model in place, cast to its dtype.

        Nothing is allocated and no parameter moves. Raises ValueError if a tensor is missing, unknown, sent twice or of
        the wrong shape; the engine then has no version and refuses to generate. Raises RuntimeError while asleep.
        """
        self._state.begin_update()
        receive_weights(self._tensors, weights)
        self._state.end_update(version)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights in use under their names in Hugging Face files, as views: an update changes them.

        Raises RuntimeError while asleep or without weights.
        """
        self._state.require_weights()
        return ((name, tensor.view()) for name, tensor in self._tensors.items())

    def sleep(self) -> None:
        """Forget the weights and free their memory; the cache lives only within `generate`.

        Buffers, such as rotary frequencies, stay: they are small, and no update brings them.
        """
        self._state.sleep()
        for parameter in self._model.parameters():
            parameter.data = parameter.data.new_empty(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Allocate the weights, with nothing in them until `update_weights`. Nothing happens to an engine awake."""
        if self._state.is_awake:
            return
        for parameter, shape in zip(self._model.parameters(), self._shapes, strict=True):
            parameter.data = parameter.data.new_empty(shape)
        self._state.wake()
