"""SGLang's server and its native endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers.client import HOST, HttpClient
from fivefold.rollout.servers.dialect import REQUEST_SEEDS, SERVER_SEEDS, Answer, finish_reason

ALL_TOKENS = -1
"""SGLang's `top_k` for no top-k."""


class SGLangDialect:
    """The `Dialect` of SGLang.

    With top-k or top-p, the log-probs are those before the cut: SGLang gives those after it only together with a list,
    for every token, of all tokens that are left. SGLang heeds seeds only with `--enable-deterministic-inference`.
    """

    module = "sglang.launch_server"
    generate_path = "/generate"
    # Connections are idle while the actor trains, and must stay open.
    environment: Mapping[str, str] = {"SGLANG_TIMEOUT_KEEP_ALIVE": "86400"}

    aliases = frozenset(
        {"--model", "--tokenizer", "--tp", "--tensor-parallel-size", "--pp", "--pipeline-parallel-size"}
    )

    def arguments(self, spec: ReplicaSpec, port: int) -> list[str]:
        return [
            *("--model-path", spec.path, "--tokenizer-path", spec.tokenizer_path),
            *("--host", HOST, "--port", str(port)),
            *("--dtype", spec.dtype, "--random-seed", str(spec.seed % SERVER_SEEDS)),
            *("--tp-size", str(spec.tp), "--pp-size", str(spec.pp)),
            *("--max-running-requests", str(spec.max_batch_size), "--context-length", str(spec.max_length)),
            *("--log-level", "warning"),
            *([] if spec.load_weights else ["--load-format", "dummy"]),
            *(["--enable-memory-saver"] if spec.can_sleep else []),
            *(["--mem-fraction-static", str(spec.memory_fraction)] if spec.memory_fraction is not None else []),
        ]

    def request(
        self, request: GenerationRequest, sampling: SamplingParams, end_token_ids: Sequence[int]
    ) -> dict[str, Any]:
        return {
            "input_ids": list(request.token_ids),
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "min_new_tokens": sampling.min_new_tokens,
                "temperature": 0.0 if sampling.greedy else sampling.temperature,
                "top_p": 1.0 if sampling.greedy else sampling.top_p,
                "top_k": sampling.top_k if sampling.top_k and not sampling.greedy else ALL_TOKENS,
                "sampling_seed": request.seed % REQUEST_SEEDS,
                "stop_token_ids": sorted({*end_token_ids, *sampling.stop_token_ids}),
                "stop": list(sampling.stop),
                "no_stop_trim": True,
                "skip_special_tokens": False,
            },
        }

    def answer(self, reply: Any) -> Answer:
        meta = reply["meta_info"]
        reason = finish_reason(meta["finish_reason"]["type"])
        logprobs = tuple(entry[0] for entry in meta["output_token_logprobs"])
        return Answer(tuple(reply["output_ids"]), logprobs, reason)

    def load(self, http: HttpClient, folder: Path, version: int) -> None:
        update = {"model_path": str(folder), "weight_version": str(version)}
        # Without a load format, a server that began with dummy weights would make up dummy weights again.
        http.post("/update_weights_from_disk", {**update, "load_format": "safetensors", "flush_cache": True})

    def sleep(self, http: HttpClient) -> None:
        http.post("/release_memory_occupation")

    def wake(self, http: HttpClient) -> None:
        http.post("/resume_memory_occupation")
