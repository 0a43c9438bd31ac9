"""The rollout engine over an inference server."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from fivefold.config.paths import resolve_model_path
from fivefold.rollout.checks import check_requests
from fivefold.rollout.hf_model import build_model, end_tokens
from fivefold.rollout.hf_names import file_tensors
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers.dialect import Answer, Ask, Dialect
from fivefold.rollout.servers.memory_share import with_share
from fivefold.rollout.servers.process import ServerDied
from fivefold.rollout.servers.stream import ServerStream
from fivefold.rollout.servers.updates import UpdatedServer
from fivefold.rollout.stopping import StopRule
from fivefold.rollout.tokenizer import load_tokenizer
from fivefold.types import Completion
from fivefold.weights.folder import NodePlace, Save, WeightFolder


class ServerEngine(UpdatedServer):
    """A `RolloutEngine` whose model is in an inference server on the devices that this process sees."""

    def __init__(self, dialect: Dialect, spec: ReplicaSpec, place: NodePlace, save: Save) -> None:
        """Start the server and wait until it is ready.

        Args:
            dialect: how to speak to the server.
            spec: the replica, whose backend is the server's.
            place: where the replica stands among those of its node, which share the files of their weights.
            save: writes tensors as a model folder that the server reads.

        Raises:
            RuntimeError: the server ended before it was ready, or another process gets its requests.
            ValueError: a model whose tensor names are not known, too little room for files of its weights, or too long
                a path for its socket.
        """
        path = resolve_model_path(spec.path)
        tokenizer_path = resolve_model_path(spec.tokenizer_path)
        # The model's names and shapes are all that is needed here; the server has the weights.
        model, generation = build_model(
            path, dtype=getattr(torch, spec.dtype), device=torch.device("meta"), load_weights=False
        )
        self._config = model.config
        max_length = min(spec.max_length, self._config.max_position_embeddings)
        spec = with_share(replace(spec, path=path, tokenizer_path=tokenizer_path, max_length=max_length))
        tensors = file_tensors(model)
        self._tokenizer = load_tokenizer(tokenizer_path)
        self._end_token_ids = sorted(end_tokens(model, generation, self._tokenizer))
        folder = None
        if spec.route.transport.carries_weights and not spec.followers:  # files are on one node
            sizes = (math.prod(tensor.view().shape) for tensor in tensors.values())
            folder = WeightFolder(place, save, sum(sizes) * model.dtype.itemsize)
        self._stream = ServerStream(
            self._send,
            self._read,
            self._stop_rule,
            most=spec.max_batch_size,
            most_tokens=spec.new_tokens_per_chunk,
        )
        super().__init__(dialect, spec, tensors, folder)

    def submit(self, number: int, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> None:
        """Begin to answer the requests of job `number` (`RolloutEngine`).

        Raises:
            ValueError: a request or a sampling that the model cannot take.
            RuntimeError: the engine is asleep or has no weights.
        """
        check_requests(requests, sampling, self._config)
        self._state.require_weights()
        if not self._stream.n_running:
            self._watch.begin_anew()
        self._stream.submit(number, requests, sampling)

    def collect(self, seconds: float) -> list[tuple[int, list[Completion]]]:
        """Wait until a submitted job is done, or `seconds` have passed (`RolloutEngine`).

        A server rounds differently in batches of different size, so that the same request need not give the same
        completion twice. Log-probs that are not asked for are NaN.

        Raises:
            RuntimeError: the engine is asleep or has no weights, or the server failed.
        """
        if self._standstill.is_on:
            # It stands still until the trainer sends its weights.
            time.sleep(seconds)
            return []
        try:
            done = self._stream.collect(self._state.require_weights(), seconds)
            if self._stream.n_running:
                self._watch.check()
            return done
        except ServerDied as death:
            self._restart(death)
            return []

    def _send(self, ask: Ask, sampling: SamplingParams) -> bytes:
        """Ask the server, and return its reply; any thread may."""
        with self._server.served():
            body = self._dialect.request(ask, sampling, self._end_token_ids)
            reply = self._server.http.send("POST", self._dialect.generate_path, body)
        self._watch.begin_anew()
        return reply

    def _read(self, reply: bytes, ask: Ask) -> list[Answer]:
        """Return the answers to an ask."""
        answers = self._dialect.answers(reply, ask)
        if len(answers) != ask.n:
            raise RuntimeError(f"the server gave {len(answers)} completions where {ask.n} were asked for")
        return answers

    def _stop_rule(self, sampling: SamplingParams) -> StopRule:
        return StopRule(sampling, frozenset(self._end_token_ids), self._tokenizer, torch.device("cpu"))
