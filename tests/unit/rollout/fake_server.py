"""A stand-in for the servers of vLLM and SGLang: their command lines, endpoints and replies, without a model.

    PYTHON -m vllm.entrypoints.openai.api_server --flags...        PYTHON is a script that `write_python` makes

A server over several nodes waits until the processes of all nodes have met, and does nothing when one of them dies.

It takes only the flags and the sampling keys that the real servers have, forgets and caches weights as they do, and
answers by `answer_to`. Its log (`Log`) has all requests. It fails on demand: by the first token of a prompt, by a file
in its folder, or by a variable of its environment. It needs only the standard library.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
import os
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from socketserver import TCPServer
from typing import Any

FOLDER = "FAKE_SERVER_FOLDER"
"""Variable: folder of the log and of the file `REFUSAL`."""
DIES_IN = "FAKE_SERVER_DIES_IN"
"""Variable: `start`, or the endpoint at whose first request the server dies."""
DIES_ONCE = "FAKE_SERVER_DIES_ONCE"
"""Variable: if set, only the first server of a folder dies in a request."""
HOW = "FAKE_SERVER_HOW"
"""Variable: what it does instead of its end in the request. `hangs`: it answers nothing any more. `engine`: as vLLM's
API server when its engine has died, it answers with status 500, is not well, and ends later. `cuts`: it sends the first
half of its answer as if that were all."""
ENGINE_DEATH_S = 1.0
"""Seconds from the answer that the engine has died to the server's end."""
HAS_CHILD = "FAKE_SERVER_HAS_CHILD"
"""Variable: if set, the server starts a process that SIGTERM does not end."""
RELEASE = "FAKE_SERVER_RELEASE"
"""Variable: the release of vLLM that the server is; 0.25.1 without it."""
FORGETFUL = "forgetful"
"""File in the folder: while it exists, the server says that its weights have no version."""
CHECKSUM = "checksum"
"""File in the folder: the checksum of what arrived."""
HANGS = "hangs"
"""File in the folder: the id of the process that answers nothing any more but GET requests that need no token."""
STUCK = "stuck"
"""File in the folder: while it exists, no token is sampled, though the servers answer other requests."""
UNUSED = "unused"
"""File in the folder: JSON of the adapters for which each of vLLM's workers has no layer."""
REFUSAL = "refusal"
"""File in the folder: while it exists, weights are refused with the status in it."""

COUNTS = """# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="a b"}} 99.0
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="a b"}} {drafted}
vllm:spec_decode_num_draft_tokens_created{{engine="0",model_name="a b"}} 1.79e+09
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="a b"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="a b",position="0"}} 88.0
vllm:prefix_cache_queries_total{{engine="0",model_name="a b"}} {queries}
vllm:prefix_cache_queries_created{{engine="0",model_name="a b"}} 1.79e+09
vllm:prefix_cache_hits_total{{engine="0",model_name="a b"}} {hits}
vllm:external_prefix_cache_hits_total{{engine="0",model_name="a b"}} 77.0
"""
"""What vLLM tells of tokens among its metrics. Here each request has three drafts, two of which are accepted, and 20
tokens of a prompt, 16 of which are in the cache."""

SGLANG_COUNTS = """# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{{model_name="a b",is_streaming="false"}} {queries}
sglang:cached_tokens_total{{model_name="a b",cache_source="device"}} {device}
sglang:cached_tokens_total{{model_name="a b",cache_source="host"}} {host}
sglang:num_requests_total{{model_name="a b"}} 5.0
"""
"""What SGLang tells, if it was asked to at its start: the same tokens of prompts, from two caches."""

STATUS_AT_START = 3
STATUS_IN_REQUEST = 7

ABORTED, ABORTED_AT_ONCE, NOT_FINITE, CUT_SHORT, DEADLY, LATE, TOGETHER = range(60, 67)
"""First tokens of prompts with a special answer. In this order: the answer ends with `abort` after two tokens, or after
none; its last log-prob is no number, or is missing; the server dies; it is given after another answer by the same
weights; it is given only once as many such prompts have come as the server decodes together."""
LONG = 59
"""First token of a prompt, of `LONG_PROMPT` tokens, that is not answered before the server pauses as many times as the
second token says. It then has two more tokens each time: one that is aborted answers with them, one that is held keeps
them."""
LONG_PROMPT, LONG_TOKENS = 4, 2
MODEL_LENGTH = 1 << 20
"""Places of the model, which are the context of a server that is not told one."""
VLLM_MEMORY = ("weights", "kv_cache")
SGLANG_MEMORY = (*VLLM_MEMORY, "cuda_graph")
"""Kinds of device memory that the servers give back."""
PATIENCE_S = 120.0
"""Most seconds that an answer waits for other requests or for a pause, which only a failure uses up."""

Reply = tuple[int, Any]
Logprobs = Sequence[float | None]
AnswerParts = tuple[Sequence[int], Logprobs, str]
"""Tokens, log-probs and finish reason."""


@dataclass(frozen=True)
class Flavour:
    """What differs between the two servers."""

    flags: frozenset[str]
    switches: frozenset[str]
    sampling_keys: frozenset[str]
    batch_size: str
    context: str
    most_tokens: str
    seed: str
    prompt: str
    shares_port: bool
    """Whether it binds with SO_REUSEPORT."""
    lists: frozenset[str] = frozenset({"--lora-target-modules"})
    """Flags with several values."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# From `--help` and the sources of vLLM 0.25.1 and SGLang 0.5.17.
FLAVOURS = {
    "vllm.entrypoints.openai.api_server": Flavour(
        flags=_words(
            "--model --tokenizer --host --port --dtype --seed --tensor-parallel-size --pipeline-parallel-size "
            "--max-num-seqs --max-model-len --generation-config --logprobs-mode --uvicorn-log-level --load-format "
            "--gpu-memory-utilization --weight-transfer-config --worker-extension-cls --scheduler-cls "
            "--middleware --uds --nnodes --node-rank --master-addr --master-port --max-loras --max-lora-rank "
            "--speculative-config --limit-mm-per-prompt --mm-processor-kwargs"
        ),
        switches=_words(
            "--disable-log-stats --disable-uvicorn-access-log --enable-sleep-mode --enforce-eager "
            "--enable-return-routed-experts --enable-lora --enable-mixed-moe-lora-format"
        ),
        sampling_keys=_words(
            "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop "
            "stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs detokenize skip_special_tokens "
            "spaces_between_special_tokens include_stop_str_in_output logit_bias allowed_token_ids bad_words "
            "routed_experts_prompt_start"
        ),
        batch_size="--max-num-seqs",
        context="--max-model-len",
        most_tokens="max_tokens",
        seed="seed",
        prompt="token_ids",
        shares_port=True,
    ),
    "fivefold_sglang": Flavour(
        flags=_words(
            "--model-path --tokenizer-path --host --port --dtype --random-seed --tp-size --pp-size "
            "--max-running-requests --context-length --sampling-defaults --log-level --load-format "
            "--mem-fraction-static --nnodes --node-rank --dist-init-addr --max-loras-per-batch --max-lora-rank "
            "--lora-backend --speculative-algorithm "
            "--speculative-draft-model-path --speculative-num-steps --speculative-eagle-topk "
            "--speculative-num-draft-tokens --speculative-draft-load-format"
        ),
        switches=_words(
            "--enable-memory-saver --sleep-on-idle --disable-radix-cache --skip-tokenizer-init "
            "--enable-return-routed-experts --enable-weights-cpu-backup --enable-lora --lora-strict-loading "
            "--enable-draft-weights-cpu-backup --enable-metrics"
        ),
        sampling_keys=_words(
            "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty "
            "presence_penalty repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos "
            "skip_special_tokens spaces_between_special_tokens no_stop_trim logit_bias sampling_seed"
        ),
        batch_size="--max-running-requests",
        context="--context-length",
        most_tokens="max_new_tokens",
        seed="sampling_seed",
        prompt="input_ids",
        shares_port=False,
    ),
}

FLAVOURS["vllm.entrypoints.cli.main"] = FLAVOURS["vllm.entrypoints.openai.api_server"]
HEADLESS = ["serve", "--headless"]
"""Words between the module and the flags of vLLM on a node after the first."""


def answer_to(prompt: Sequence[int], seed: int, most_tokens: int) -> tuple[tuple[int, ...], tuple[float, ...], str]:
    """Return tokens (3 to 52), log-probs that JSON carries exactly, and the finish reason."""
    length = 1 + seed % most_tokens
    token_ids = tuple(3 + (prompt[-1] + seed // 7 + 5 * i) % 50 for i in range(length))
    logprobs = tuple(-(1 + (seed + 3 * i) % 97) / 16 for i in range(length))
    return token_ids, logprobs, "length" if length == most_tokens else "stop"


def experts_of(token: int, place: int, layer: int, n_pauses: int, top_k: int) -> list[int]:
    """Return the experts, out of 4, of a token that is computed after so many pauses."""
    return [(token + place + layer + n_pauses + expert) % 4 for expert in range(top_k)]


def write_python(folder: Path, **environment: str) -> str:
    """Write a program in `folder` that runs this file instead of the module it is given; return its path.

    The log is in `folder` too. `environment` holds further variables of the server.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "python"
    variables = {FOLDER: str(folder), **environment}
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    program.write_text(f'#!/bin/sh\n{exports}exec {sys.executable} {shlex.quote(__file__)} "$@"\n')
    program.chmod(0o755)
    return str(program)


class Log:
    """The events of the servers of a folder, as rows of JSON."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "log.jsonl"

    def write(self, **row: Any) -> None:
        line = json.dumps({"pid": os.getpid(), **row}) + "\n"
        with self._file.open("ab", buffering=0) as file:
            file.write(line.encode())

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Return the rows of one kind: `start` (command line), `request` and `reply` (path and body), or `load`."""
        if not self._file.exists():
            return []
        # Another process may see the beginning of a row before its end is written.
        whole, _, _ = self._file.read_text().rpartition("\n")
        rows = [json.loads(line) for line in whole.splitlines()]
        return [row for row in rows if row["kind"] == kind]

    def hang(self) -> None:
        """Let the server that was started last hang."""
        (self._file.parent / HANGS).write_text(str(self.rows("start")[-1]["pid"]))

    def posts(self) -> list[str]:
        """Return the paths of all POST requests, in order."""
        return [row["path"] for row in self.rows("request") if row["method"] == "POST"]


def read_tensors(file: Path) -> list[dict[str, Any]]:
    """Return name, dtype, shape and checksum of each tensor in a safetensors file."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    entries.pop("__metadata__", None)
    tensors = []
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        checksum = hashlib.sha256(data[start + begin : start + end]).hexdigest()
        tensors.append({"name": name, "dtype": entry["dtype"], "shape": entry["shape"], "sha256": checksum})
    return tensors


@dataclass
class FakeServer:
    """The state of one server, and its endpoints."""

    flavour: Flavour
    options: dict[str, str]
    folder: Path
    load_format: str
    has_stale_cache: bool = False
    is_paused: bool = False
    n_pauses: int = 0
    versions: list[int | None] = field(default_factory=lambda: [None])
    """Versions of the weights with which it went on: the first until it was held for the first time, and so on."""
    is_prepared: bool = False
    is_in_update: bool = False
    weight_version: str = "default"
    tensors: list[dict[str, Any]] = field(default_factory=list)
    """What `read_tensors` tells of the weights that it has from files."""
    are_other_weights: bool = True
    """Whether they are other ones than before the last update."""
    adapters: str | None = None
    """Name of the adapters that it has next to its weights."""
    released: set[str] = field(default_factory=set)
    """Kinds of device memory that it has given back."""
    is_held: bool = False
    n_long: int = 0
    """Number of requests that began with `LONG` and are not answered."""
    n_here: int = 0
    most_here: int = 0
    n_together: int = 0
    n_answered: int = 0
    """Number of replies with completions since it got its weights."""
    n_answered_ever: int = 0
    is_well: bool = True
    """Whether its engine lives."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def may_die(self) -> bool:
        """Return whether no server of the folder has died, or all may."""
        if DIES_ONCE not in os.environ:
            return True
        try:
            (self.folder / "died").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    @property
    def log(self) -> Log:
        return Log(self.folder)

    @property
    def hangs(self) -> bool:
        return (self.folder / HANGS).exists() and (self.folder / HANGS).read_text() == str(os.getpid())

    def generate(self, n_pauses: int, n_holds: int, body: dict[str, Any]) -> Reply:
        """Answer a request that began after so many pauses. One that comes during a pause waits for its end."""
        if (self.folder / STUCK).exists():
            threading.Event().wait()
        sampling, prompt = body["sampling_params"], body[self.flavour.prompt]
        for image in body.get("images" if self.flavour.prompt == "token_ids" else "image_data", ()):
            checksum = hashlib.sha256(Path(image["path"]).read_bytes()).hexdigest()
            self.log.write(kind="image", sha256=checksum, **image)
        # No pause comes between the wait for the end of one and the look at what the server has.
        with self.changed:
            is_cut_short = self._is_cut_short(prompt, n_pauses, n_holds)
            self.n_long -= prompt[0] == LONG
            held = self.versions[n_holds if prompt[0] == LONG else -1 :]
            problem = None if is_cut_short else self._problem(sampling, body) or self._no_room(prompt)
        if problem:
            return 400, {"error": {"message": problem, "type": "BadRequestError", "param": None, "code": 400}}
        if prompt[0] == DEADLY:
            os._exit(STATUS_IN_REQUEST)
        self._wait_for_its_turn(prompt[0])
        most_tokens = min(sampling[self.flavour.most_tokens], self._room(len(prompt)))
        seed = sampling.get(self.flavour.seed, LONG_TOKENS)
        answer = _spoilt(prompt[0], *answer_to(prompt, seed, most_tokens))
        if is_cut_short:
            tokens, logprobs, _ = answer
            answer = tokens[:LONG_TOKENS], logprobs[:LONG_TOKENS], "abort"
        routes = self._routes(body, [*prompt, *answer[0]], n_pauses)
        if self.flavour.prompt == "input_ids":
            return 200, _sglang_reply(prompt, *answer, with_logprobs=body["return_logprob"], routes=routes)
        return 200, _vllm_reply(answer, held, with_logprobs="logprobs" in sampling, routes=routes)

    def _routes(self, body: dict[str, Any], tokens: Sequence[int], n_pauses: int) -> list[list[list[int]]] | None:
        """Return the experts of all tokens but the last one, by layer, as far as a request asks for them."""
        is_vllm = self.flavour.prompt == "token_ids"
        if not self.options["--enable-return-routed-experts"]:
            return None
        model = json.loads((Path(self.options["--model" if is_vllm else "--model-path"]) / "config.json").read_text())
        n_layers, top_k = model["num_hidden_layers"], model["num_experts_per_tok"]
        if is_vllm:
            layers, first = body.get("route_layers"), body["sampling_params"].get("routed_experts_prompt_start", 0)
        else:
            layers = range(n_layers) if body.get("return_routed_experts") else None
            first = body.get("routed_experts_start_len", 0)
        if layers is None:
            return None
        return [
            [experts_of(tokens[place], place, layer, n_pauses, top_k) for layer in layers]
            for place in range(first, len(tokens) - 1)
        ]

    def _problem(self, sampling: dict[str, Any], body: dict[str, Any]) -> str | None:
        named = body.get("lora_path", self.adapters if self.flavour.prompt == "token_ids" else None)
        if named != self.adapters or (self.options["--enable-lora"] and named is None):
            return f"the request is for the adapters {named}, and the server has {self.adapters}"
        if self.load_format == "dummy":
            return "there are no weights"
        if self.released:
            return f"an illegal memory access was encountered: {', '.join(sorted(self.released))}"
        if self.is_in_update:
            return "the server is paused"
        if self.has_stale_cache:
            return "keys and values of other weights are in the prefix cache"
        if sampling["stop"] and (sampling.get("detokenize") is False or self.options.get("--skip-tokenizer-init")):
            return "stop texts need detokenization"
        if unknown := sampling.keys() - self.flavour.sampling_keys:
            return f"unknown sampling parameters {sorted(unknown)}"
        return None

    def _room(self, n_prompt_tokens: int) -> int:
        """Return the most tokens that may follow a prompt. SGLang keeps two places of its context to itself."""
        kept = 2 if self.flavour.context == "--context-length" else 0
        return int(self.options[self.flavour.context] or MODEL_LENGTH) - kept - n_prompt_tokens

    def _no_room(self, prompt: Sequence[int]) -> str | None:
        """SGLang refuses prompts that leave fewer than seven places."""
        least = 5 if self.flavour.context == "--context-length" else 1
        return None if self._room(len(prompt)) >= least else f"a prompt of {len(prompt)} tokens is too long"

    def _is_cut_short(self, prompt: Sequence[int], n_pauses: int, n_holds: int) -> bool:
        """Return whether the server has paused again before an answer was whole; while paused, it answers nothing."""
        n_missing = 0 if prompt[0] != LONG else prompt[1] - (len(prompt) - LONG_PROMPT) // LONG_TOKENS

        def is_whole() -> bool:
            return not self.is_paused and not self.is_held and self.n_holds - n_holds >= n_missing

        assert self.changed.wait_for(lambda: is_whole() or (n_missing > 0 and self.n_pauses > n_pauses), PATIENCE_S)
        return not is_whole()

    @property
    def n_holds(self) -> int:
        """How often it was held before what begins now."""
        return len(self.versions) - 1 + self.is_held

    def _wait_for_its_turn(self, first_token: int) -> None:
        with self.changed:
            self.n_here += 1
            self.most_here = max(self.most_here, self.n_here)
            if first_token == LATE:
                assert self.changed.wait_for(lambda: self.n_answered > 0, PATIENCE_S)
            if first_token == TOGETHER:
                batch_size = int(self.options[self.flavour.batch_size])
                batch_full = (self.n_together // batch_size + 1) * batch_size
                self.n_together += 1
                self.changed.notify_all()
                assert self.changed.wait_for(lambda: self.n_together >= batch_full, PATIENCE_S)
            self.n_here -= 1

    def answered(self, path: str) -> None:
        """Record that the reply to a request at `path` is in the log, and about to be sent."""
        with self.changed:
            self.n_answered += path in ("/generate", "/fivefold/generate")
            self.n_answered_ever += path in ("/generate", "/fivefold/generate")
            self.changed.notify_all()

    def load(self, folder: Path) -> str | None:
        """Read all weights; return the problem with them, if there is one."""
        self.n_answered, before = 0, self.tensors
        files = sorted(folder.iterdir())
        weights = [file for file in files if file.suffix == ".safetensors"]
        self.tensors = [tensor for file in weights for tensor in read_tensors(file)]
        self.are_other_weights = self.tensors != before
        self.log.write(
            kind="load",
            folder=str(folder),
            files=[file.name for file in files],
            inodes=[file.stat().st_ino for file in weights],
            dtype=json.loads((folder / "config.json").read_text())["dtype"],
            tensors=self.tensors,
        )
        return "it holds no weights" if not weights else None

    def take_adapters(self, name: str, folder: Path) -> Reply:
        """Read a folder of PEFT."""
        assert self.options["--enable-lora"]
        assert not self.is_without_weights
        if status := self.refusal():
            return status, {"success": False, "error_message": "no such adapters"}
        self.adapters = name
        tensors = read_tensors(folder / "adapter_model.safetensors")
        config = json.loads((folder / "adapter_config.json").read_text())
        self.log.write(kind="adapters", name=name, folder=str(folder), config=config, tensors=tensors)
        return 200, {"success": True, "error_message": ""}

    def load_lora(self, body: dict[str, Any]) -> Reply:
        """As vLLM's adapters, by Fivefold's endpoint, or SGLang's, which takes no second ones here."""
        if self.flavour.prompt == "token_ids":
            assert body.keys() == {"path", "version"}
            return self.take_adapters(str(body["version"]), Path(body["path"]))
        if self.adapters is not None:
            return 400, {"success": False, "error_message": f"{self.adapters} is loaded"}
        return self.take_adapters(body["lora_name"], Path(body["lora_path"]))

    def unload_lora(self, body: dict[str, Any]) -> Reply:
        if body["lora_name"] != self.adapters:
            return 400, {"success": False, "error_message": f"LoRA with name {body['lora_name']} does not exist"}
        self.adapters = None
        return 200, {"success": True, "error_message": ""}

    def refusal(self) -> int | None:
        """Return the status with which weights are refused; None: they are not."""
        switch = self.folder / REFUSAL
        return int(switch.read_text()) if switch.exists() else None

    def collective_rpc(self, body: dict[str, Any]) -> Reply:
        method, kwargs = body["method"], body.get("kwargs", {})
        if method in (
            "fivefold_watch_weights",
            "fivefold_load_faster",
            "fivefold_guard_updates",
            "fivefold_keep_features",
        ):
            self.log.write(kind=method)
            return 200, {"results": [None]}
        if method == "fivefold_unused_adapters":
            unused = self.folder / UNUSED
            return 200, {"results": json.loads(unused.read_text()) if unused.exists() else [[]]}
        if method in ("fivefold_load_draft", "fivefold_load_tower"):
            self.log.write(kind=method, files=kwargs["files"])
            return 200, {"results": [None]}
        if method == "fivefold_weight_checksum":
            return 200, {"results": [(self.folder / CHECKSUM).read_text()]}
        if method == "update_config":
            self.load_format = kwargs["overrides"]["load_config"]["load_format"]
            return 200, {"results": [None]}
        assert method == "reload_weights"
        if status := self.refusal():
            return status, {"error": {"message": "no such weights", "type": "InternalServerError", "code": status}}
        if self.load_format == "dummy" or self.is_without_weights:
            return 500, {"error": {"message": "Model reloading with `dummy` format", "code": 500}}
        problem = self.load(Path(kwargs["weights_path"]))
        self.has_stale_cache = True
        return (500, {"error": {"message": problem, "code": 500}}) if problem else (200, {"results": [None]})

    def reset_prefix_cache(self, body: dict[str, Any]) -> Reply:
        self.has_stale_cache = False
        return 200, None

    @property
    def is_newer(self) -> bool:
        """Whether it has the weight endpoints of vLLM 0.26 and later."""
        return _release() >= (0, 26)

    def pause(self, body: dict[str, Any]) -> Reply:
        if self.flavour.prompt == "input_ids":
            assert body == {"mode": "abort"}
        else:
            self.has_stale_cache = False
        with self.changed:
            self.is_paused = True
            self.n_pauses += 1
            self.changed.notify_all()
        return 200, {"status": "paused"}

    def resume(self, body: dict[str, Any]) -> Reply:
        with self.changed:
            self.is_paused = False
            self.changed.notify_all()
        return 200, {"status": "resumed"}

    def beat(self, body: dict[str, Any]) -> Reply:
        """Answer once a token is sampled, as happens at once."""
        if (self.folder / STUCK).exists():
            threading.Event().wait()
        return 200, {}

    def hold(self, body: dict[str, Any]) -> Reply:
        with self.changed:
            self.is_held = True
        return 200, {}

    def go_on(self, body: dict[str, Any]) -> Reply:
        """Go on; only requests of the same version are served from what was cached with other weights."""
        version = body["version"]
        with self.changed:
            self.has_stale_cache &= version == self.versions[-1] and self.are_other_weights
            self.versions = [*(self.versions if self.is_held else self.versions[:-1]), version]
            self.is_held = False
            self.changed.notify_all()
        return 200, {}

    def init_transfer(self, body: dict[str, Any]) -> Reply:
        backend = json.loads(self.options["--weight-transfer-config"])["backend"]
        packing = {"packed", "packed_buffer_size_bytes", "packed_num_buffers"}
        forms = {
            ("ipc", False): (set(), set()),
            ("ipc", True): (set(), {"packed"}),
            ("nccl", False): ({"master_address", "master_port", "rank_offset", "world_size"}, set()),
            ("nccl", True): ({"nccl_unique_id_b64", "rank_offset", "world_size"}, packing),
        }
        needed, allowed = forms[backend, self.is_newer]
        keys = body["init_info"].keys()
        if not needed <= keys <= needed | allowed:
            return 500, {"error": {"message": f"Invalid init_info: {sorted(keys)}", "code": 500}}
        self.is_prepared = True
        return 200, {"message": "Weight transfer initialized"}

    def start_update(self, body: dict[str, Any]) -> Reply:
        self.is_in_update = True
        return 200, {"message": "Weight update started"}

    def update_weights(self, body: dict[str, Any]) -> Reply:
        info = body["update_info"]
        allowed = {"names", "dtype_names", "shapes", "ipc_handles_pickled", "tensor_sizes"}
        if not self.is_newer:
            allowed |= {"packed", "packed_buffer_size_bytes", "packed_num_buffers"}
        if not (self.is_prepared and self.is_in_update and info.keys() <= allowed) or self.is_without_weights:
            return 500, {"error": {"message": f"Invalid update_info: {sorted(info)}", "code": 500}}
        if status := self.refusal():
            return status, {"error": {"message": "no such weights", "type": "InternalServerError", "code": status}}
        return 200, {"message": "Weights updated"}

    def finish_update(self, body: dict[str, Any]) -> Reply:
        self.is_in_update, self.load_format = False, "auto"
        self.weight_version = body.get("weight_version", self.weight_version)
        return 200, {"message": "Weight update finished"}

    def enter_group(self, body: dict[str, Any]) -> Reply:
        self.is_prepared = True
        return 200, {"success": True, "message": "Succeeded to initialize custom process group."}

    def update_by_bucket(self, body: dict[str, Any]) -> Reply:
        self.has_stale_cache = not body.get("flush_cache", True)
        if status := self.refusal():
            return status, {"success": False, "message": "no such weights"}
        self.load_format = "auto"
        return 200, {"success": True, "message": "Success"}

    def flush_cache(self, body: dict[str, Any]) -> Reply:
        self.has_stale_cache = False
        return 200, None

    def update_version(self, body: dict[str, Any]) -> Reply:
        assert body["abort_all_requests"] is False
        self.weight_version = body["new_version"]
        return 200, {"success": True, "new_version": body["new_version"]}

    def information(self) -> dict[str, Any]:
        """Return what GET requests answer, by path."""
        version = {"weight_version": "default" if (self.folder / FORGETFUL).exists() else self.weight_version}
        if self.flavour.prompt == "input_ids":
            told = {"/metrics": self.counts().encode()} if "--enable-metrics" in sys.argv else {}
            return {"/health": None, "/health_generate": None, "/model_info": {"model_path": "", **version}, **told}
        newer = {"/weight_info": version} if self.is_newer else {}
        return {
            "/health": None,
            "/version": {"version": ".".join(map(str, _release()))},
            "/metrics": self.counts().encode(),
            **newer,
        }

    def counts(self) -> str:
        """Return what it has counted."""
        n = float(self.n_answered_ever)
        if self.flavour.prompt == "input_ids":
            return SGLANG_COUNTS.format(queries=20 * n, device=15 * n, host=n)
        return COUNTS.format(drafted=3 * n, accepted=2 * n, queries=20 * n, hits=16 * n)

    def update_weights_from_disk(self, body: dict[str, Any]) -> Reply:
        status, problem = self.refusal(), "no such weights"
        if status is None and self.is_without_weights:
            status, problem = 400, "the memory is released"
        if status is None:
            self.load_format = body.get("load_format", self.load_format)
            self.weight_version = body.get("weight_version", self.weight_version)
            self.has_stale_cache = not body.get("flush_cache", True)
            problem = self.load(Path(body["model_path"])) or ""
            status = 400 if problem else 200
        message = problem or "Succeeded to update model weights."
        return status, {"success": status == 200, "message": message, "num_paused_requests": 0}

    @property
    def is_without_weights(self) -> bool:
        """Whether the memory of its weights is given back."""
        return "weights" in self.released

    def release(self, tags: Sequence[str], *, keeps_weights: bool = False) -> Reply:
        """Give memory back; the real servers fail if it is not there. Weights are lost unless the host keeps them."""
        if self.released.intersection(tags):
            return 500, {"error": {"message": f"{tags} are given back already", "code": 500}}
        self.released.update(tags)
        if not (keeps_weights or self.options.get("--enable-weights-cpu-backup")):
            self.load_format = "dummy"
        return 200, None

    def take_back(self, tags: Sequence[str]) -> Reply:
        """Take memory back; the real servers fail if it is there."""
        if not self.released.issuperset(tags):
            return 500, {"error": {"message": f"{tags} are not all given back", "code": 500}}
        self.released.difference_update(tags)
        return 200, None

    def _wake(self, tag: str, body: dict[str, Any]) -> Reply:
        return self.take_back([tag])

    def endpoints(self, n_pauses: int, n_holds: int) -> dict[str, Callable[[dict[str, Any]], Reply]]:
        """Return what answers a request that begins after so many pauses, by path."""
        if self.flavour.prompt == "input_ids":
            return {
                "/generate": partial(self.generate, n_pauses, n_holds),
                "/update_weights_from_disk": self.update_weights_from_disk,
                "/init_weights_update_group": self.enter_group,
                "/update_weights_from_tensor": self.update_by_bucket,
                "/update_weights_from_distributed": self.update_by_bucket,
                "/load_lora_adapter": self.load_lora,
                "/unload_lora_adapter": self.unload_lora,
                "/pause_generation": self.pause,
                "/continue_generation": self.resume,
                "/flush_cache": self.flush_cache,
                "/update_weight_version": self.update_version,
                "/release_memory_occupation": lambda body: self.release(body.get("tags") or SGLANG_MEMORY),
                "/resume_memory_occupation": lambda body: self.take_back(body.get("tags") or SGLANG_MEMORY),
            }
        # Fivefold's own endpoint, which exists only if vLLM can import the code that is inside it.
        module, _, _ = (self.options["--middleware"] or "").rpartition(".")
        has_endpoint = module == "fivefold_generate" and find_spec(module) is not None
        own = {
            "/fivefold/generate": partial(self.generate, n_pauses, n_holds),
            "/fivefold/beat": self.beat,
            "/fivefold/hold": self.hold,
            "/fivefold/go_on": self.go_on,
            "/fivefold/adapters": self.load_lora,
        }
        generate = own if has_endpoint else {}
        if os.environ.get("VLLM_SERVER_DEV_MODE") != "1":
            return generate
        return {
            **generate,
            "/collective_rpc": self.collective_rpc,
            "/reset_prefix_cache": self.reset_prefix_cache,
            "/pause?mode=abort": self.pause,
            "/resume": self.resume,
            "/init_weight_transfer_engine": self.init_transfer,
            "/start_weight_update": self.start_update,
            "/update_weights": self.update_weights,
            "/finish_weight_update": self.finish_update,
            "/sleep?level=1": lambda _: self.release(VLLM_MEMORY, keeps_weights=True),
            "/sleep?level=2": lambda _: self.release(VLLM_MEMORY),
            "/wake_up": lambda _: self.take_back(VLLM_MEMORY),
            **{f"/wake_up?tags={tag}": partial(self._wake, tag) for tag in VLLM_MEMORY},
        }


def _spoilt(first_token: int, token_ids: Sequence[int], logprobs: Logprobs, reason: str) -> AnswerParts:
    """Return an answer, less what the first token of the prompt says."""
    if first_token in (ABORTED, ABORTED_AT_ONCE):
        n_kept = 2 if first_token == ABORTED else 0
        return token_ids[:n_kept], logprobs[:n_kept], "abort"
    if first_token in (NOT_FINITE, CUT_SHORT):
        return token_ids, (*logprobs[:-1], *([None] if first_token == NOT_FINITE else [])), reason
    return token_ids, logprobs, reason


def _vllm_reply(
    answer: AnswerParts,
    versions: Sequence[int | None],
    *,
    with_logprobs: bool,
    routes: list[list[list[int]]] | None,
) -> bytes:
    """Return an answer in the form that `inside_vllm/fivefold_generate.py` describes.

    All `versions` but the last one sampled `LONG_TOKENS` of it.
    """
    token_ids, logprobs, reason = answer
    n = len(token_ids)
    complete = with_logprobs and len(logprobs) == n
    spans = [(version, LONG_TOKENS) for version in versions[:-1]]
    spans.append((versions[-1], n - LONG_TOKENS * len(spans)))
    told = {} if versions[-1] is None else {"versions": spans}
    head = {"n_tokens": n, "finish_reason": reason, "has_logprobs": complete, **told}
    numbers = [math.nan if logprob is None else logprob for logprob in logprobs] if complete else []
    packed = struct.pack(f"<{n}i", *token_ids) + struct.pack(f"<{len(numbers)}f", *numbers)
    if routes is not None:
        experts = bytes(expert for row in routes for layer in row for expert in layer)
        head["routes"] = ["uint8", len(routes), len(routes[0]), len(routes[0][0])]
        packed += experts
    return json.dumps(head).encode() + b"\n" + packed


def _sglang_reply(
    prompt: Sequence[int],
    token_ids: Sequence[int],
    logprobs: Logprobs,
    reason: str,
    *,
    with_logprobs: bool,
    routes: list[list[list[int]]] | None,
) -> Any:
    details = {"stop": {"matched": 2}, "length": {"length": len(token_ids)}, "abort": {"message": "Aborted"}}
    meta = {
        "id": "1",
        "finish_reason": {"type": reason, **details[reason]},
        "prompt_tokens": len(prompt),
        "weight_version": "default",
        "completion_tokens": len(token_ids),
        "e2e_latency": 0.01,
    }
    if with_logprobs:
        rows = [[logprob, token, None] for token, logprob in zip(token_ids, logprobs, strict=False)]
        meta |= {"input_token_logprobs": [], "output_token_logprobs": rows}
    if routes is not None:
        experts = [expert for row in routes for layer in row for expert in layer]
        meta["routed_experts"] = base64.b64encode(struct.pack(f"<{len(experts)}i", *experts)).decode()
    return {"text": 'a "output_ids": [7]', "output_ids": token_ids, "meta_info": meta}


def _first_half(reply: Any) -> bytes:
    data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    return data[: len(data) // 2]


class Handler(BaseHTTPRequestHandler):
    """Hands requests to `FakeServer`, and sends its replies."""

    protocol_version = "HTTP/1.1"
    server: HttpServer

    def do_GET(self) -> None:
        self.server.fake.log.write(kind="request", method="GET", path=self.path, body=None)
        information = self.server.fake.information()
        status = 200 if self.path in information else 404
        if self.path == "/health_generate" and (self.server.fake.folder / STUCK).exists():
            status = 503
        if self.path == "/health_generate" and self.server.fake.hangs:
            threading.Event().wait()
        is_well = self.server.is_ready.is_set() and self.server.fake.is_well
        self._send(status if is_well else 503, information.get(self.path))
        self.server.is_ready.set()

    def do_POST(self) -> None:
        key = os.environ.get("FIVEFOLD_SERVER_KEY")
        if key is not None and self.headers["Authorization"] != f"Bearer {key}":
            self._send(401, {"error": "Unauthorized"})
            return
        fake = self.server.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        # A pause that comes once the request is in the log comes after the request.
        with fake.changed:
            n_pauses, n_holds = fake.n_pauses, fake.n_holds
            prompt = body.get(fake.flavour.prompt)
            fake.n_long += prompt is not None and prompt[0] == LONG
            fake.log.write(kind="request", method="POST", path=self.path, body=body)
        cuts = False
        if os.environ.get(DIES_IN) == self.path and fake.may_die():
            how = os.environ.get(HOW)
            if how is None:
                os._exit(STATUS_IN_REQUEST)
            elif how == "engine":
                fake.is_well = False
                threading.Timer(ENGINE_DEATH_S, os._exit, (STATUS_IN_REQUEST,)).start()
            elif how == "hangs":
                fake.log.hang()
            cuts = how == "cuts"
        if not fake.is_well:
            self._send(500, b"EngineDeadError()")
            return
        if fake.hangs:
            threading.Event().wait()
        endpoint = fake.endpoints(n_pauses, n_holds).get(self.path)
        status, reply = endpoint(body) if endpoint else (404, {"detail": "Not Found"})
        fake.log.write(kind="reply", path=self.path, body=body, status=status, most_here=fake.most_here)
        fake.answered(self.path)
        self._send(status, _first_half(reply) if cuts else reply)

    def _send(self, status: int, reply: Any) -> None:
        data = reply if isinstance(reply, bytes) else b"" if reply is None else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream" if isinstance(reply, bytes) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class HttpServer(ThreadingHTTPServer):
    """The HTTP server, which is ready from its second `/health` on."""

    request_queue_size = 128

    def __init__(self, fake: FakeServer) -> None:
        self.allow_reuse_port = fake.flavour.shares_port
        self.fake = fake
        self.is_ready = threading.Event()
        if path := fake.options.get("--uds"):
            self.address_family = socket.AF_UNIX
            # Neither family nor address of a Unix socket is what the class expects.
            self.allow_reuse_port = self.allow_reuse_address = False
            super().__init__(path, Handler)  # type: ignore[arg-type]
        else:
            super().__init__((fake.options["--host"], int(fake.options["--port"])), Handler)

    def server_bind(self) -> None:
        """Bind; the class would look up the host's name, which a Unix socket has not."""
        TCPServer.server_bind(self)


def _release() -> tuple[int, ...]:
    return tuple(int(part) for part in os.environ.get(RELEASE, "0.25.1").split("."))


def _options(flavour: Flavour, arguments: Sequence[str]) -> dict[str, str]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in flavour.flags:
        parser.add_argument(flag, dest=flag)
    for flag in flavour.lists:
        parser.add_argument(flag, dest=flag, nargs="*")
    for switch in flavour.switches:
        parser.add_argument(switch, dest=switch, action="store_true")
    return vars(parser.parse_args(arguments))


def _meet(options: dict[str, str]) -> int:
    """Wait for the processes of the other nodes, if there are any, and stay connected; return the node's rank."""
    n_nodes, rank = int(options["--nnodes"] or 1), int(options["--node-rank"] or 0)
    if n_nodes == 1:
        return 0
    address = options.get("--dist-init-addr") or f"{options['--master-addr']}:{options['--master-port']}"
    host, _, port = address.rpartition(":")
    if rank == 0:
        listener = socket.create_server((host, int(port)))
        MET.extend([listener, *(listener.accept()[0] for _ in range(n_nodes - 1))])
        return 0
    while not MET:
        with suppress(ConnectionRefusedError):
            MET.append(socket.create_connection((host, int(port))))
    return rank


MET: list[socket.socket] = []
"""Connections to the processes of other nodes."""


def _start_child() -> int:
    """Start a process that only SIGKILL ends; return its id."""
    return subprocess.Popen(
        ["sleep", "1000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    ).pid


def main() -> None:
    """Run the server of `-m MODULE --flags...`."""
    _, module, *arguments = sys.argv[1:]
    flavour, folder = FLAVOURS[module], Path(os.environ[FOLDER])
    child = _start_child() if HAS_CHILD in os.environ else None
    Log(folder).write(
        kind="start", command=sys.argv[1:], environment=dict(os.environ), child=child, parent=os.getppid()
    )
    if os.environ.get(DIES_IN) == "start":
        sys.exit(STATUS_AT_START)
    is_headless = arguments[: len(HEADLESS)] == HEADLESS
    options = _options(flavour, arguments[len(HEADLESS) :] if is_headless else arguments)
    if _meet(options) > 0:
        assert is_headless == module.startswith("vllm")
        Log(folder).write(kind="join")
        threading.Event().wait()
    fake = FakeServer(flavour, options, folder, options["--load-format"] or "auto")
    HttpServer(fake).serve_forever()


if __name__ == "__main__":
    main()
