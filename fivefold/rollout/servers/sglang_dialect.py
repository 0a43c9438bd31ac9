"""SGLang's server and its native endpoints."""

from __future__ import annotations

import base64
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fivefold.rollout.protocol import SamplingParams, ServerCounts
from fivefold.rollout.replica import ReplicaNode, ReplicaSpec
from fivefold.rollout.servers import weights
from fivefold.rollout.servers.client import HOST, Address, HttpClient, ServerHangs
from fivefold.rollout.servers.dialect import (
    PAUSE_S,
    REQUEST_SEEDS,
    SERVER_SEEDS,
    Answer,
    Ask,
    AskedRoutes,
    counted,
    finish_reason,
    floats,
    found,
    integers,
)
from fivefold.rollout.servers.place import Place
from fivefold.rollout.servers.port import claim_port
from fivefold.rollout.servers.sglang_weights import SGLangWeights, check_held
from fivefold.rollout.servers.weights import WeightLoader
from fivefold.weights.cuda_ipc import visible_uuids

if TYPE_CHECKING:
    from fivefold.families.served import ServedAdapters

INSIDE = Path(__file__).with_name("inside_sglang")
"""Code of ours that runs inside the server."""
PROCESSORS = "fivefold_processors"
"""The package there that makes prompts with images."""
BEAT = "/health_generate"
"""SGLang's endpoint that answers once a token was sampled."""
ALL_TOKENS = -1
"""SGLang's `top_k` for no top-k."""
_KEPT = 6
"""Places of its context that SGLang gives to no prompt, and two of them to no completion. It says nothing of them."""
_ADAPTERS = "lora_path"
"""SGLang's key for the name of the adapters that answer a request."""
_WEIGHTS, _CACHE = ["weights"], ["kv_cache", "cuda_graph"]
"""SGLang's names for what it releases. It resumes each of them exactly once."""


_COUNTS = {b"sglang:prompt_tokens": "prompt", b"sglang:cached_tokens": "cached"}
"""SGLang's counts of tokens, among its metrics. Of drafts it tells shares alone."""
_TOKEN_IDS = re.compile(rb'"output_ids":\s*\[([\d,\s]*)\]')
_FINISH_REASON = re.compile(rb'"finish_reason":\s*\{\s*"type":\s*"(\w+)"')
_LOGPROBS = re.compile(rb'"output_token_logprobs":\s*\[((?:[\s,]*\[[^\]]*\])*)\s*\]')
_PROMPT = re.compile(rb'"prompt_tokens":\s*(\d+)')
_ROUTES = re.compile(rb'"routed_experts":\s*"([\w+/=]+)"')
_FIRST = re.compile(rb"\[\s*(-?[\d.][\d.eE+-]*)")


def _logprobs(rows: bytes) -> npt.NDArray[np.float32]:
    """Return the first number of each row, which is `[log-prob, token, null]`."""
    return floats(b",".join(_FIRST.findall(rows))).astype(np.float32)


def _routes(reply: bytes, asked: AskedRoutes) -> npt.NDArray[np.int32] | None:
    """Return the routes in a reply; None: it has none.

    Raises:
        RuntimeError: they are of another number of layers or experts.
    """
    text = _ROUTES.search(reply)
    if text is None:
        return None
    numbers = np.frombuffer(base64.b64decode(text[1]), "<i4")
    if numbers.size % (asked.n_layers * asked.top_k):
        raise RuntimeError(
            f"the server's answer has {numbers.size} experts, which are not {asked.top_k} for each of the "
            f"{asked.n_layers} layers of each token"
        )
    return numbers.reshape(-1, asked.n_layers, asked.top_k)[:, list(asked.layers)]


def _loads_files(spec: ReplicaSpec) -> bool:
    """Return whether the server reads the model's files, from which alone a tower that sees images comes."""
    return spec.loads_files or spec.sees


def _check_prompt(reply: bytes, ask: Ask) -> None:
    """Check that the server completed a prompt with images of the request's length.

    Raises:
        RuntimeError: it did not.
    """
    if ask.images and (found_tokens := int(found(_PROMPT, reply))) != len(ask.token_ids):
        raise RuntimeError(
            f"SGLang made {found_tokens} tokens of a prompt with images that has {len(ask.token_ids)}, and the trainer "
            "would see other positions: use rollout.backend=transformers:d1"
        )


def _for_adapters(adapters: ServedAdapters) -> list[str]:
    """Return the arguments for adapters next to the weights.

    Only one of SGLang's kernels computes experts' adapters. It has room for one set: a batch with and one without
    adapters never run together.
    """
    return [
        *("--enable-lora", "--max-loras-per-batch", "1", "--max-lora-rank", str(adapters.rank)),
        *("--lora-backend", "triton", "--lora-strict-loading"),
        *("--lora-target-modules", *adapters.projections),
    ]


def _over_nodes(node: ReplicaNode) -> list[str]:
    """Return the arguments of one node of several."""
    if node.n_nodes == 1:
        return []
    host = f"[{node.master_host}]" if ":" in node.master_host else node.master_host
    return [
        *("--nnodes", str(node.n_nodes), "--node-rank", str(node.rank)),
        *("--dist-init-addr", f"{host}:{node.master_port}"),
    ]


def _speculation(spec: ReplicaSpec) -> list[str]:
    """Return the arguments with which layers for multi-token prediction draft tokens, in a chain.

    The server reads these layers from the model's files even where other weights come from an actor, and copies them to
    host memory while it sleeps.
    """
    if spec.speculative is None:
        return []
    n_tokens = spec.speculative.n_tokens
    return [
        *("--speculative-algorithm", "NEXTN", "--speculative-draft-model-path", spec.path),
        *("--speculative-num-steps", str(n_tokens), "--speculative-eagle-topk", "1"),
        # The last token of the model's own is among them.
        *("--speculative-num-draft-tokens", str(n_tokens + 1)),
        *("--speculative-draft-load-format", "auto"),
        *(["--enable-draft-weights-cpu-backup"] if spec.can_sleep else []),
    ]


class SGLangDialect:
    """The `Dialect` of SGLang.

    With top-k or top-p, the log-probs are those before the cut: SGLang gives those after it only together with a list,
    for every token, of all tokens that are left. SGLang heeds seeds only with `--enable-deterministic-inference`.
    """

    package = "sglang"
    generate_path = "/generate"
    aliases = frozenset(
        {
            *("--model", "--tokenizer", "--tp", "--tensor-parallel-size", "--pp", "--pipeline-parallel-size"),
            *("--nccl-init-addr", "--api-key", "--admin-api-key", "--speculative-draft-model"),
        }
    )
    images_key = "image_data"
    adapters_of_one_rank = True

    def place(self) -> Place:
        return claim_port()

    def program(self, node: ReplicaNode) -> list[str]:
        return ["fivefold_sglang"]

    def arguments(self, spec: ReplicaSpec, address: Address) -> list[str]:
        return [
            *("--model-path", spec.path, "--tokenizer-path", spec.tokenizer_path),
            *(["--trust-remote-code"] if spec.trust_remote_code else []),
            *("--host", HOST, "--port", str(address)),
            *("--dtype", spec.dtype, "--random-seed", str(spec.seed % SERVER_SEEDS)),
            *("--tp-size", str(spec.tp), "--pp-size", str(spec.pp)),
            *("--max-running-requests", str(spec.max_batch_size), "--context-length", str(spec.max_length + _KEPT)),
            *("--log-level", "warning"),
            *([] if spec.needs_text else ["--skip-tokenizer-init"]),
            *(["--enable-metrics"] if spec.counts else []),
            *([] if _loads_files(spec) else ["--load-format", "dummy"]),
            *([] if spec.adapters is None else _for_adapters(spec.adapters)),
            *(["--enable-return-routed-experts"] if spec.returns_routes else []),
            # Otherwise its scheduler polls while it sleeps, and keeps a core from the role that works then.
            *(["--enable-memory-saver", "--sleep-on-idle"] if spec.can_sleep else []),
            # Weights that it has loaded itself are copied back when it wakes; otherwise the actor sends them.
            *(["--enable-weights-cpu-backup"] if spec.can_sleep and _loads_files(spec) else []),
            *(["--mem-fraction-static", str(spec.memory_fraction)] if spec.memory_fraction is not None else []),
            *_speculation(spec),
            *_over_nodes(spec.node),
        ]

    def environment(self, spec: ReplicaSpec) -> Mapping[str, str]:
        # Connections are idle while the actor trains, and must stay open.
        path = [str(INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONPATH": os.pathsep.join(path), "SGLANG_TIMEOUT_KEEP_ALIVE": "86400"}
        # It says that it is not well after its own limit, which is 20 s, while kernels may be compiled.
        environment["SGLANG_HEALTH_CHECK_TIMEOUT"] = str(math.ceil(PAUSE_S))
        if spec.sees:
            environment["SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"] = PROCESSORS
        # A sequence never has more tokens than the model has positions; the context with `_KEPT` may.
        environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        if spec.route.transport.is_collective:
            # NCCL must share memory in the same way at both ends of a group, else its first broadcast fails with
            # "invalid argument". Unless this is set, SGLang forbids the way that NCCL takes where it can (-2).
            environment["NCCL_CUMEM_ENABLE"] = os.environ.get("NCCL_CUMEM_ENABLE") or "-2"
        # The processes of other nodes connect to this address.
        return environment | ({"SGLANG_HOST_IP": spec.node.host} if spec.node.n_nodes > 1 else {})

    def prepare(self, http: HttpClient, spec: ReplicaSpec) -> None:
        pass

    def request(self, ask: Ask, sampling: SamplingParams, end_token_ids: Sequence[int]) -> dict[str, Any]:
        first = 0 if ask.routes is None else ask.routes.first
        return {
            "input_ids": list(ask.token_ids),
            "return_logprob": ask.wants_logprobs,
            **({} if ask.routes is None else {"return_routed_experts": True}),
            **({"routed_experts_start_len": first} if first else {}),
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "min_new_tokens": sampling.min_new_tokens,
                "temperature": 0.0 if sampling.greedy else sampling.temperature,
                "top_p": 1.0 if sampling.greedy else sampling.top_p,
                "top_k": sampling.top_k if sampling.top_k and not sampling.greedy else ALL_TOKENS,
                **sampling.of_servers,
                **({} if ask.seed is None else {"sampling_seed": ask.seed % REQUEST_SEEDS}),
                "stop_token_ids": sorted({*end_token_ids, *sampling.stop_token_ids}),
                "stop": list(sampling.stop),
                "no_stop_trim": True,
                "skip_special_tokens": False,
            },
        }

    def answer(self, reply: bytes, ask: Ask) -> Answer:
        _check_prompt(reply, ask)
        # Patterns find nothing in the completion's text, in which quotes are escaped.
        return Answer(
            integers(found(_TOKEN_IDS, reply)),
            _logprobs(found(_LOGPROBS, reply)) if ask.wants_logprobs else None,
            finish_reason(found(_FINISH_REASON, reply).decode()),
            routes=None if ask.routes is None else _routes(reply, ask.routes),
        )

    def counts(self, http: HttpClient) -> ServerCounts:
        return counted(http.send("GET", "/metrics"), _COUNTS)

    def pause(self, http: HttpClient, limit_s: float) -> None:
        http.post("/pause_generation", {"mode": "abort"}, limit_s)

    def resume(self, http: HttpClient) -> None:
        http.post("/continue_generation")

    def beat(self, http: HttpClient, limit_s: float) -> None:
        # It asks its scheduler for a token, which one that is busy takes from any request.
        if not http.is_healthy(limit_s, BEAT):
            raise ServerHangs(f"the server did not sample a token within {limit_s:g} s")

    def hold(self, http: HttpClient, limit_s: float) -> None:
        raise ValueError("SGLang reads the tokens so far again when weights change: drop rollout.recompute_kv_cache")

    def go_on(self, http: HttpClient, version: int) -> None:
        raise ValueError("SGLang does not know with which weights it continues: drop rollout.recompute_kv_cache")

    def load(self, http: HttpClient, folder: Path, version: int, *, keeps_cache: bool) -> None:
        update = {"model_path": str(folder), "weight_version": str(version)}
        # Without a load format, a server that began with dummy weights would make up dummy weights again.
        http.post("/update_weights_from_disk", {**update, "load_format": "safetensors", "flush_cache": not keeps_cache})
        check_held(http, version)

    def load_adapters(
        self, http: HttpClient, folder: Path, version: int, asked: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        # A new name, so that no request is answered with others by mistake. Its cache belongs to the adapters.
        name = f"fivefold-{version}"
        if before := asked.get(_ADAPTERS):
            http.post("/unload_lora_adapter", {"lora_name": before}, weights.BUCKET_S)
        http.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, weights.BUCKET_S)
        http.send("POST", "/flush_cache", {}, weights.READY_S)
        return {_ADAPTERS: name}

    def devices(self, spec: ReplicaSpec) -> list[str]:
        return visible_uuids() if spec.route.transport.passes_handles else []

    def loader(self, http: HttpClient, spec: ReplicaSpec, devices: Sequence[str]) -> WeightLoader:
        return SGLangWeights(http, devices, drafts=spec.speculative is not None)

    def watch_weights(self, http: HttpClient) -> None:
        raise ValueError("SGLang does not tell what arrived: drop rollout.verify_weights")

    def arrived(self, http: HttpClient) -> Sequence[int]:
        raise ValueError("SGLang does not tell what arrived: drop rollout.verify_weights")

    def sleep(self, http: HttpClient, *, keeps_weights: bool) -> None:
        # Whether it keeps them is settled by its command line.
        http.post("/release_memory_occupation", {"tags": [*_WEIGHTS, *_CACHE]})

    def wake_weights(self, http: HttpClient) -> None:
        http.post("/resume_memory_occupation", {"tags": _WEIGHTS})

    def wake_cache(self, http: HttpClient) -> None:
        http.post("/resume_memory_occupation", {"tags": _CACHE})
