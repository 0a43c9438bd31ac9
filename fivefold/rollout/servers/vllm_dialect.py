"""vLLM's OpenAI-compatible server, its endpoints for reinforcement learning, and one of Fivefold's own to generate.

The endpoints for weights and sleep exist only in development mode. Whoever reaches them can run code as the user, so
the server listens at a socket that the user alone can reach.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.bridge.kept import draft_files, tower_files
from fivefold.config.schema.rollout import SpeculativeConfig
from fivefold.json_text import parsed
from fivefold.layout.backends import BACKENDS
from fivefold.rollout.protocol import SamplingParams, ServerCounts
from fivefold.rollout.replica import ReplicaNode, ReplicaSpec
from fivefold.rollout.servers.client import Address, HttpClient, json_of
from fivefold.rollout.servers.dialect import REQUEST_SEEDS, SERVER_SEEDS, Answer, Ask, counted, finish_reason
from fivefold.rollout.servers.place import Place, private_socket
from fivefold.rollout.servers.vllm_weights import PAUSE, RESUME, VLLMWeights
from fivefold.rollout.servers.weights import WeightLoader

if TYPE_CHECKING:
    from fivefold.families.served import ServedAdapters

INSIDE = Path(__file__).with_name("inside_vllm")
"""Folder of the code that runs inside vLLM's processes."""
GENERATE = "fivefold_generate.Generate"
"""The class there that answers requests to generate, and holds them."""
BEAT = "/fivefold/beat"
"""Its endpoint that answers once a token was sampled."""
HOLD, GO_ON = "/fivefold/hold", "/fivefold/go_on"
"""Its endpoints between which nothing is generated, and all requests stay as they are."""
ADAPTERS = "/fivefold/adapters"
"""Its endpoint that takes adapters from a folder, with which all later requests are answered."""
WEIGHTS = "fivefold_weights.WorkerWeights"
"""The class there that loads experts together, and tells a checksum of what arrives."""
SCHEDULER = "fivefold_scheduler.scheduler"
"""What makes vLLM's scheduler there, which sends log-probs several at a time."""
CAPTURE = "fivefold_capture.Worker"
"""The class there of workers that tell routes with the second model runner."""
TELLS_ROUTES = (0, 28)
"""First release whose second model runner tells routes."""
_COUNTS = {
    b"vllm:spec_decode_num_draft_tokens": "drafted", b"vllm:spec_decode_num_accepted_tokens": "accepted",
    b"vllm:prefix_cache_queries": "prompt", b"vllm:prefix_cache_hits": "cached",
}  # fmt: skip
"""vLLM's counts of tokens, among its metrics."""
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""The variable that chooses vLLM's model runner."""
START = "VLLM_WORKER_MULTIPROC_METHOD"
"""The variable that says how vLLM's API server starts the engine, and the engine its workers."""
BYTES = 4
"""Size of a token id and of a log-prob in a reply."""


def _transfer(spec: ReplicaSpec) -> str:
    return json.dumps({"backend": spec.route.transport.name})


def _speculation(config: SpeculativeConfig) -> str:
    return json.dumps({"method": config.method, "num_speculative_tokens": config.n_tokens})


def _second_runner(spec: ReplicaSpec) -> str:
    """Return 1 where vLLM's second model runner is to be used: on GPUs, the only devices that it knows.

    By itself, vLLM uses it for dense models and for few families of experts. It takes less of the host's time for a
    step, on which the speed of small models depends, and has its own sampler. It drafts no tokens by n-grams.
    """
    drafts_by_ngrams = spec.speculative is not None and spec.speculative.method == "ngram"
    return "1" if os.environ.get("CUDA_VISIBLE_DEVICES") and not drafts_by_ngrams else "0"


def _runner(spec: ReplicaSpec) -> dict[str, str]:
    """Return the variable that says which model runner vLLM uses, if it does not choose."""
    if chosen := os.environ.get(RUNNER):
        return {RUNNER: chosen}
    # Which of them sees images, or by itself returns routes, depends on vLLM's release.
    if spec.sees or (spec.returns_routes and not _captures(spec)):
        return {}
    return {RUNNER: _second_runner(spec)}


def _captures(spec: ReplicaSpec) -> bool:
    """Return whether Fivefold's own worker tells routes, because vLLM's second model runner tells none."""
    if not spec.returns_routes or spec.sees:
        return False
    runner = os.environ.get(RUNNER) or _second_runner(spec)
    return runner == "1" and _release(spec.python or sys.executable) < TELLS_ROUTES


@cache
def _release(python: str) -> tuple[int, ...]:
    """Return the first two numbers of the release of vLLM that a Python has.

    Raises:
        ValueError: it does not tell.
    """
    command = [python, "-c", "from importlib.metadata import version; print(version('vllm'))"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    numbers = told.stdout.strip().split(".")[:2]
    if told.returncode or not all(number.isdecimal() for number in numbers):
        raise ValueError(
            f"{python} does not tell its release of vLLM, on which routes for router replay depend: it must run "
            f"`{command[-1]}`, and ended with {told.stderr.strip()[-200:]!r}"
        )
    return tuple(map(int, numbers))


def _for_routes(spec: ReplicaSpec) -> list[str]:
    """Return the arguments for routes."""
    if not spec.returns_routes:
        return []
    return ["--worker-cls", CAPTURE] if _captures(spec) else ["--enable-return-routed-experts"]


def _for_images(spec: ReplicaSpec) -> list[str]:
    """Return the arguments for prompts with images.

    vLLM sizes its caches for the largest image that its processor makes, and for a video, which no prompt has.
    """
    pixels = [] if spec.most_pixels is None else ["--mm-processor-kwargs", json.dumps({"max_pixels": spec.most_pixels})]
    return ["--limit-mm-per-prompt", json.dumps({"video": 0}), *pixels]


def _passes_features(spec: ReplicaSpec) -> bool:
    """Return whether the model may pass features of images to its first layers, which it also does without images."""
    config = parsed((resolve_model_folder(spec.path) / "config.json").read_text())
    vision = config.get("vision_config")
    return bool(vision) and vision.get("deepstack_visual_indexes") != []


def _for_adapters(adapters: ServedAdapters) -> list[str]:
    """Return the arguments for adapters next to the weights.

    Without names of layers, vLLM gives all layers room for adapters, and computes with it. Experts have one tensor
    each, also in models whose files hold all of a layer in one.
    """
    rank = BACKENDS["vllm"].adapter_room(adapters.rank)
    return [
        *("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank), "--enable-mixed-moe-lora-format"),
        *("--lora-target-modules", *adapters.modules),
    ]


def _over_nodes(node: ReplicaNode) -> list[str]:
    """Return the arguments of one node of several."""
    if node.n_nodes == 1:
        return []
    return [
        *("--nnodes", str(node.n_nodes), "--node-rank", str(node.rank)),
        *("--master-addr", node.master_host, "--master-port", str(node.master_port)),
    ]


def _route_form(head: Mapping[str, Any]) -> tuple[np.dtype[Any], list[int]] | None:
    """Return the dtype and the shape of the routes at the end of a reply; None: it has none."""
    if "routes" not in head:
        return None
    dtype, *shape = head["routes"]
    return np.dtype(dtype).newbyteorder("<"), shape


def _versions(head: Mapping[str, Any], n_tokens: int) -> npt.NDArray[np.int32] | None:
    """Return the versions [T] of the weights that sampled a completion; None: the server was never told them.

    Raises:
        RuntimeError: it has versions for more or fewer tokens.
    """
    if "versions" not in head:
        return None
    spans = np.array(head["versions"], np.int32)
    if spans[:, 1].sum() != n_tokens:
        raise RuntimeError(f"the server's answer tells the versions {head['versions']} of {n_tokens} tokens")
    return np.repeat(spans[:, 0], spans[:, 1])


class VLLMDialect:
    """The `Dialect` of vLLM."""

    package = "vllm"
    generate_path = "/fivefold/generate"
    aliases = frozenset(
        {"-tp", "-pp", "-n", "-r", "-sc", "--headless", "--host", "--port", "--spec-method", "--spec-tokens"}
    )
    images_key = "images"
    adapters_of_one_rank = False

    def place(self) -> Place:
        return private_socket()

    def program(self, node: ReplicaNode) -> list[str]:
        # Only the command line of `vllm serve` can do without an API server, which only node 0 has.
        if node.rank > 0:
            return ["vllm.entrypoints.cli.main", "serve", "--headless"]
        return ["vllm.entrypoints.openai.api_server"]

    def arguments(self, spec: ReplicaSpec, address: Address) -> list[str]:
        return [
            *("--model", spec.path, "--tokenizer", spec.tokenizer_path),
            *(["--trust-remote-code"] if spec.trust_remote_code else []),
            *("--uds", str(address)),
            *("--dtype", spec.dtype, "--seed", str(spec.seed % SERVER_SEEDS)),
            *("--tensor-parallel-size", str(spec.tp), "--pipeline-parallel-size", str(spec.pp)),
            *("--max-num-seqs", str(spec.max_batch_size), "--max-model-len", str(spec.max_length)),
            # The recipe alone says how to sample; without this, generation_config.json would too.
            *("--generation-config", "vllm"),
            # Log-probs of the sampling distribution, not of the model's logits.
            *("--logprobs-mode", "processed_logprobs"),
            *("--middleware", GENERATE),
            # Among its statistics is how many of the drafted tokens are accepted.
            *([] if spec.counts else ["--disable-log-stats"]),
            *("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
            *("--worker-extension-cls", WEIGHTS, "--scheduler-cls", SCHEDULER),
            *_for_routes(spec),
            *([] if spec.route.transport.carries_weights else ["--weight-transfer-config", _transfer(spec)]),
            *([] if spec.loads_files else ["--load-format", "dummy"]),
            *([] if spec.adapters is None else _for_adapters(spec.adapters)),
            *([] if spec.speculative is None else ["--speculative-config", _speculation(spec.speculative)]),
            *([] if spec.quantization is None else ["--quantization", spec.quantization]),
            *(_for_images(spec) if spec.sees else []),
            *(["--enable-sleep-mode"] if spec.can_sleep else []),
            *(["--gpu-memory-utilization", str(spec.memory_fraction)] if spec.memory_fraction is not None else []),
            *_over_nodes(spec.node),
        ]

    def environment(self, spec: ReplicaSpec) -> Mapping[str, str]:
        path = [str(INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "PYTHONPATH": os.pathsep.join(path),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **_runner(spec),
            # A process that is forked has imported vLLM, which takes 20 s. vLLM itself spawns them where it must.
            START: os.environ.get(START, "fork"),
            # Connections are idle while the actor trains, and must stay open.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "86400",
            # Handles of CUDA IPC travel as pickles.
            **({"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if spec.route.transport.passes_handles else {}),
            # The processes of other nodes connect to this address.
            **({"VLLM_HOST_IP": spec.node.host} if spec.node.n_nodes > 1 else {}),
        }

    def prepare(self, http: HttpClient, spec: ReplicaSpec) -> None:
        if spec.can_sleep and _passes_features(spec):
            self._on_workers(http, "fivefold_keep_features", {})
        # A server that waits for an actor's weights has random ones in these layers too.
        if spec.drafts_by_layers and not spec.load_weights:
            files = draft_files(resolve_model_folder(spec.path))
            self._on_workers(http, "fivefold_load_draft", {"files": files})
        if spec.sees and not spec.loads_files:
            self._on_workers(http, "fivefold_load_tower", {"files": tower_files(resolve_model_folder(spec.path))})

    def request(self, ask: Ask, sampling: SamplingParams, end_token_ids: Sequence[int]) -> dict[str, Any]:
        first = 0 if ask.routes is None else ask.routes.first
        return {
            "token_ids": list(ask.token_ids),
            **({} if ask.routes is None else {"route_layers": list(ask.routes.layers)}),
            "sampling_params": {
                "max_tokens": sampling.max_new_tokens,
                "min_tokens": sampling.min_new_tokens,
                # With temperature 0 the log-probs are log softmax of the logits as the model gave them.
                "temperature": 0.0 if sampling.greedy else sampling.temperature,
                "top_p": 1.0 if sampling.greedy else sampling.top_p,
                "top_k": 0 if sampling.greedy else sampling.top_k,
                **sampling.of_servers,
                "stop_token_ids": sorted({*end_token_ids, *sampling.stop_token_ids}),
                "stop": list(sampling.stop),
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,
                "detokenize": bool(sampling.stop),
                **({} if ask.seed is None else {"seed": ask.seed % REQUEST_SEEDS}),
                # 0: the log-prob of the sampled token, and of no other token.
                **({"logprobs": 0} if ask.wants_logprobs else {}),
                **({"routed_experts_prompt_start": first} if first else {}),
            },
        }

    def answer(self, reply: bytes, ask: Ask) -> Answer:
        # `inside_vllm/fivefold_generate.py` describes the form.
        line, _, packed = reply.partition(b"\n")
        head = json_of(line, self.generate_path)
        n_tokens = head["n_tokens"]
        n_numbers = BYTES * n_tokens * (1 + head["has_logprobs"])
        form = _route_form(head)
        announced = n_numbers + (0 if form is None else form[0].itemsize * math.prod(form[1]))
        if announced != len(packed):
            raise RuntimeError(f"the server's answer has {len(packed)} bytes of numbers where it announces {announced}")
        token_ids_T = np.frombuffer(packed, "<i4", n_tokens).copy()
        logprobs_T = None
        if ask.wants_logprobs:
            logprobs_T = np.frombuffer(packed[token_ids_T.nbytes : n_numbers], "<f4").copy()
        routes = None if form is None else np.frombuffer(packed[n_numbers:], form[0]).reshape(form[1])
        return Answer(token_ids_T, logprobs_T, finish_reason(head["finish_reason"]), _versions(head, n_tokens), routes)

    def counts(self, http: HttpClient) -> ServerCounts:
        return counted(http.send("GET", "/metrics"), _COUNTS)

    def pause(self, http: HttpClient, limit_s: float) -> None:
        http.post(PAUSE, limit_s=limit_s)

    def resume(self, http: HttpClient) -> None:
        http.post(RESUME)

    def beat(self, http: HttpClient, limit_s: float) -> None:
        http.post(BEAT, limit_s=limit_s)

    def hold(self, http: HttpClient, limit_s: float) -> None:
        http.post(HOLD, limit_s=limit_s)

    def go_on(self, http: HttpClient, version: int) -> None:
        http.post(GO_ON, {"version": version})

    def load(self, http: HttpClient, folder: Path, version: int, *, keeps_cache: bool) -> None:
        # Without a load format, a server that began with dummy weights would make up dummy weights again.
        self._on_workers(http, "update_config", {"overrides": {"load_config": {"load_format": "safetensors"}}})
        self._on_workers(http, "reload_weights", {"weights_path": str(folder)})
        # What is kept is salted with its version; vLLM drops nothing as long as requests have some of it.
        if not keeps_cache:
            http.post("/reset_prefix_cache")

    def load_adapters(
        self, http: HttpClient, folder: Path, version: int, asked: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        http.post(ADAPTERS, {"path": str(folder), "version": version})
        reply = http.post("/collective_rpc", {"method": "fivefold_unused_adapters"})
        # A layer is on one of the pipeline's stages.
        unused = set.intersection(*map(set, reply["results"]))
        if unused:
            raise RuntimeError(
                f"vLLM has no layer for {len(unused)} adapters, {min(unused)!r} among them, and would answer without "
                "them: set rollout.weight_transport=auto, or leave the layers out of actor.lora.targets"
            )
        # All requests are answered with the adapters that the server has.
        return {}

    def devices(self, spec: ReplicaSpec) -> list[str]:
        return []

    def loader(self, http: HttpClient, spec: ReplicaSpec, devices: Sequence[str]) -> WeightLoader:
        return VLLMWeights(http, by_ipc=spec.route.transport.passes_handles)

    def watch_weights(self, http: HttpClient) -> None:
        self._on_workers(http, "fivefold_watch_weights", {})

    def arrived(self, http: HttpClient) -> Sequence[int]:
        reply = http.post("/collective_rpc", {"method": "fivefold_weight_checksum"})
        return [int(checksum) for checksum in reply["results"]]

    def sleep(self, http: HttpClient, *, keeps_weights: bool) -> None:
        # Level 1 copies the weights to host memory; level 2 drops them, because the actor sends all of them again.
        http.post(f"/sleep?level={1 if keeps_weights else 2}")

    def wake_weights(self, http: HttpClient) -> None:
        http.post("/wake_up?tags=weights")

    def wake_cache(self, http: HttpClient) -> None:
        http.post("/wake_up?tags=kv_cache")

    @staticmethod
    def _on_workers(http: HttpClient, method: str, kwargs: dict[str, Any]) -> None:
        http.post("/collective_rpc", {"method": method, "kwargs": kwargs})
