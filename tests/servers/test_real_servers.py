"""The engine over real servers, against transformers' forward pass of the same weights.

    VLLM_PYTHON=/opt/vllm/bin/python SGLANG_PYTHON=/opt/sglang/bin/python python -m pytest tests/servers

The tests of a server are skipped without its Python. VLLM_ARGS and SGLANG_ARGS are further arguments for the command
lines. On the CPU, vLLM takes minutes to start, and VLLM_CPU_KVCACHE_SPACE=1 keeps its cache small.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import urllib3
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from fivefold.bridge.hf_writer import save_hf
from fivefold.config.schema.rollout import GenerationConfig
from fivefold.rollout.contract import complete
from fivefold.rollout.engines import DIALECTS
from fivefold.rollout.protocol import GenerationRequest, SamplingParams, group_requests
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rollout.servers.engine import ServerEngine
from fivefold.types import Completion
from fivefold.weights.folder import NodePlace
from fivefold.weights.ipc_buffers import IPCSender
from fivefold.weights.stream import stacked
from fivefold.weights.table import TRANSPORTS
from fivefold.weights.transport import Route
from tests.unit.rollout.conftest import END, byte_tokenizer

ON_CUDA = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_CUDA else torch.float32
FRACTION = 0.3
POSITIONS = 256
TOKENIZER = byte_tokenizer()
VOCABULARY = len(TOKENIZER)
ARGUMENTS = {"vllm": "--enforce-eager", "sglang": "--disable-cuda-graph"}

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.15,
    "eos_token_id": END,
    "bos_token_id": 1,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def save_model(family: str, seed: int, folder: Path) -> Path:
    """Save a random model with its tokenizer; return its folder."""
    config = Qwen3MoeConfig(**COMMON, **EXPERTS) if family == "qwen3_moe" else Qwen3Config(**COMMON)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms begin as ones, which hide a mix-up
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def spec_of(backend: str, python: str, model: Path, transport: str) -> ReplicaSpec:
    further = f"{ARGUMENTS[backend]} {os.environ.get(f'{backend.upper()}_ARGS', '')}"
    return ReplicaSpec(
        backend=backend,
        path=str(model),
        tokenizer_path=str(model),
        dtype=str(DTYPE).removeprefix("torch."),
        max_batch_size=32,
        load_weights=False,
        run=uuid4().hex[:8],
        tp=1,
        pp=1,
        max_length=POSITIONS,
        seed=1,
        can_sleep=ON_CUDA,
        reserved=0,
        memory_fraction=FRACTION if ON_CUDA else None,
        python=python,
        arguments=tuple(further.split()),
        route=route_of(backend, transport),
    )


def start(spec: ReplicaSpec) -> ServerEngine:
    model = spec.path
    save = partial(save_hf, config_source=model, tokenizer_source=model)
    return ServerEngine(DIALECTS[spec.backend], spec, NodePlace(spec.run, 0, 1), save)


def route_of(backend: str, transport: str) -> Route:
    """Return a route with checksums where the server tells them."""
    return Route(TRANSPORTS[transport], str(DTYPE).removeprefix("torch."), checksum=backend == "vllm")


@dataclass
class Served:
    """An engine, two sets of weights for it, and the bytes of memory that were free before it started."""

    backend: str
    engine: ServerEngine
    folders: tuple[Path, Path]
    free_before: int
    transport: str = "folder"

    def use(self, which: int, version: int = 0) -> PreTrainedModel:
        """Send a set of weights to the server; return transformers' model of them."""
        weights = load_file(
            self.folders[which] / "model.safetensors", device="cuda" if self.transport == "ipc" else "cpu"
        )
        if self.transport == "ipc":
            # This process is the trainer: it shares the GPU with the server, and sends in small buckets.
            route = route_of(self.backend, self.transport)
            sender = IPCSender(route, 0, n_buffers=2, max_bytes=100_000)
            self.engine.load_buckets(sender.items(stacked(weights.items())), version)
            del weights
            sender.free()
        else:
            self.engine.update_weights(weights.items(), version)
        model = AutoModelForCausalLM.from_pretrained(
            self.folders[which], dtype=torch.float32, attn_implementation="eager"
        )
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPE).float()
        return model.eval()


KINDS = [
    f"{backend}-{family}-{transport}"
    for backend in ("vllm", "sglang")
    for family in ("qwen3_moe", "qwen3")
    for transport in (("ipc", "folder") if ON_CUDA else ("folder",))
]


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server of each kind for each model."""
    backend, family, transport = request.param.split("-")
    variable = f"{backend.upper()}_PYTHON"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no Python that has {backend}")
    first, second = (save_model(family, seed, tmp_path_factory.mktemp(f"{family}-{seed}")) for seed in range(2))
    free = torch.cuda.mem_get_info()[0] if ON_CUDA else 0
    engine = start(spec_of(backend, os.environ[variable], first, transport))
    yield Served(backend, engine, (first, second), free, transport)
    engine.close()


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams.from_config(GenerationConfig(**{"max_new_tokens": 16} | options))


def requests_of(n: int, seed: int = 0) -> list[GenerationRequest]:
    """Return two requests for each of n prompts, half of which are longer than the blocks that servers cache."""
    source = random.Random(seed)
    lengths = [source.randint(130, 220) if i % 2 else source.randint(1, 20) for i in range(n)]
    prompts = [[source.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]
    return group_requests(prompts, 2, (seed,))


@torch.no_grad()
def teacher_forced(model: PreTrainedModel, request: GenerationRequest, completion: Completion) -> Tensor:
    """Return the logits [N, V] that predict each token of the completion, from one forward over both."""
    ids = torch.tensor([[*request.token_ids, *completion.token_ids]])
    return model(input_ids=ids, use_cache=False).logits[0, len(request.token_ids) - 1 : -1]


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compare log-probs. The distributions are peaked, so that those of other weights differ by several nats."""
    gaps = torch.cat(list(actual)).sub(torch.cat(list(expected))).abs()
    if ON_CUDA:
        assert gaps.mean() < 0.1
    else:
        assert gaps.max() < 2e-3


def assert_logprobs(
    model: PreTrainedModel,
    requests: Sequence[GenerationRequest],
    completions: Sequence[Completion],
    temperature: float = 1.0,
    top_k: int = VOCABULARY,
    unlikely: int = 0,
) -> None:
    """Compare log-probs with a forward pass; the first `unlikely` tokens cannot be the end token."""
    actual, expected = [], []
    for request, completion in zip(requests, completions, strict=True):
        logits = teacher_forced(model, request, completion) / temperature
        logits[:unlikely, END] = -torch.inf
        logits[logits < logits.topk(top_k).values[:, -1:]] = -torch.inf
        tokens = torch.tensor(completion.token_ids)[:, None]
        expected.append(logits.log_softmax(-1).gather(1, tokens).squeeze(1))
        actual.append(torch.tensor(completion.logprobs))
    assert_close(actual, expected)


def test_a_port_answers_nobody_without_the_key(served: Served) -> None:
    http = served.engine._life.http
    if not isinstance(http._pool.port, int):
        pytest.skip("it listens at a socket that belongs to its user")
    paths = http.get("/openapi.json")["paths"]
    assert {"/generate", "/update_weights_from_tensor"} <= set(paths)
    asked = [(method, path) for path, methods in paths.items() for method in methods]
    replies = {
        path: urllib3.request(method, f"http://127.0.0.1:{http._pool.port}{path}", json={}, retries=False).status
        for method, path in asked
        if not path.startswith("/health")
    }
    assert {path: status for path, status in replies.items() if status != 401} == {}


def test_log_probs_are_those_of_the_latest_weights(served: Served) -> None:
    """The prompts are the same each time, so that a cache of earlier weights would change the log-probs."""
    requests = requests_of(12)
    for version, which in enumerate([0, 1, 0]):
        model = served.use(which, version)
        completions = complete(served.engine, requests, sampling())
        assert_logprobs(model, requests, completions)
        assert {used for completion in completions for used in completion.versions.tolist()} == {version}
        assert len({tuple(completion.token_ids.tolist()) for completion in completions}) > len(requests) // 2


def test_more_requests_than_are_decoded_together(served: Served) -> None:
    model, requests = served.use(0), requests_of(60, seed=1)
    completions = complete(served.engine, requests, sampling(max_new_tokens=5))
    assert_logprobs(model, requests, completions)


def test_a_group_gets_different_completions_of_one_prompt(served: Served) -> None:
    model, requests = served.use(0), requests_of(6, seed=9)
    completions = complete(served.engine, requests, replace(sampling(), seeded=False))
    assert_logprobs(model, requests, completions)
    pairs = [tuple(tuple(c.token_ids.tolist()) for c in completions[i : i + 2]) for i in range(0, len(completions), 2)]
    assert sum(first != second for first, second in pairs) > len(pairs) // 2


def test_greedy_completions_have_the_log_probs_of_the_likeliest_tokens(served: Served) -> None:
    model, requests = served.use(1), requests_of(10, seed=2)
    completions = complete(served.engine, requests, sampling(greedy=True))
    assert_logprobs(model, requests, completions)
    likeliest = [
        teacher_forced(model, *pair).log_softmax(-1).amax(-1) for pair in zip(requests, completions, strict=True)
    ]
    assert_close([torch.tensor(completion.logprobs) for completion in completions], likeliest)


def test_log_probs_are_at_the_temperature(served: Served) -> None:
    model, requests = served.use(0), requests_of(10, seed=3)
    assert_logprobs(model, requests, complete(served.engine, requests, sampling(temperature=0.7)), temperature=0.7)


def test_only_the_likeliest_tokens_are_sampled(served: Served) -> None:
    model, requests = served.use(0), requests_of(10, seed=4)
    completions = complete(served.engine, requests, sampling(top_k=3))
    # SGLang gives the log-probs of the distribution before the cut.
    cut = {"vllm": 3, "sglang": VOCABULARY}[served.backend]
    if not ON_CUDA:  # after rounding to bfloat16, other tokens may be the likeliest
        for request, completion in zip(requests, completions, strict=True):
            likely = teacher_forced(model, request, completion).topk(3).indices
            assert (likely == torch.tensor(completion.token_ids)[:, None]).any(-1).all()
        assert_logprobs(model, requests, completions, top_k=cut)
    elif served.backend == "sglang":
        assert_logprobs(model, requests, completions)


def test_a_completion_ends_with_its_first_stop_token(served: Served) -> None:
    model, stops = served.use(0), list(range(3, VOCABULARY, 9))
    requests = requests_of(20, seed=5)
    completions = complete(served.engine, requests, sampling(stop_token_ids=stops, max_new_tokens=20))
    ends = {END, *stops}
    for completion in completions:
        assert ends.isdisjoint(completion.token_ids[:-1])
        is_ended = completion.token_ids[-1] in ends
        assert completion.finish_reason == ("stop" if is_ended else "length")
        assert is_ended or len(completion.token_ids) == 20
    # Some of 20 completions have one of the seven stop tokens, whatever the server samples.
    assert {completion.token_ids[-1] for completion in completions} & set(stops)
    assert_logprobs(model, requests, completions)


def test_no_completion_ends_before_min_new_tokens(served: Served) -> None:
    model, requests = served.use(0), requests_of(40, seed=6)
    params = sampling(min_new_tokens=6, max_new_tokens=12, temperature=2.0)
    completions = complete(served.engine, requests, params)
    assert all(END not in completion.token_ids[:6] for completion in completions)
    assert all(6 < len(completion.token_ids) <= 12 for completion in completions)
    assert any(completion.finish_reason == "stop" for completion in completions), "no completion ended"
    assert_logprobs(model, requests, completions, temperature=2.0, unlikely=6)


def test_a_completion_ends_with_its_first_stop_text(served: Served) -> None:
    model, requests = served.use(1), requests_of(20, seed=7)
    free = complete(served.engine, requests, sampling(greedy=True, max_new_tokens=20))
    pairs = [text[4:6] for completion in free if len(text := TOKENIZER.decode(completion.token_ids)) > 6]
    stops = ["Q", "7", *pairs[:3]]
    completions = complete(served.engine, requests, sampling(greedy=True, max_new_tokens=20, stop=stops))
    found = set()
    for completion in completions:
        before, text = TOKENIZER.decode(completion.token_ids[:-1]), TOKENIZER.decode(completion.token_ids)
        assert not any(stop in before for stop in stops)
        is_ended = completion.token_ids[-1] == END or any(stop in text for stop in stops)
        assert completion.finish_reason == ("stop" if is_ended else "length")
        assert is_ended or len(completion.token_ids) == 20
        found |= {len(stop) for stop in stops if stop in text}
    assert found == {1, 2}, "no completion had a stop text of one or of two tokens"
    assert_logprobs(model, requests, completions)


@pytest.mark.skipif(not ON_CUDA, reason="servers sleep only on GPUs")
def test_a_sleeping_server_gives_its_memory_back(served: Served) -> None:
    served.use(0)
    requests = requests_of(8, seed=8)

    def used() -> int:
        return served.free_before - torch.cuda.mem_get_info()[0]

    awake, total = used(), torch.cuda.mem_get_info()[1]
    assert awake > 0.5 * FRACTION * total
    for version in (5, 6):
        served.engine.sleep()
        assert used() < 0.3 * awake
        served.engine.wake_weights()
        model = served.use(version % 2, version)
        assert used() < 0.8 * awake
        served.engine.wake()
        assert used() > 0.8 * awake
        completions = complete(served.engine, requests, sampling())
        assert_logprobs(model, requests, completions)
