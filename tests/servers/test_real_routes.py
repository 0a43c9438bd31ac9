"""The routes that a real vLLM tells, against the routers of transformers' model.

VLLM_PYTHON=/opt/vllm/bin/python python -m pytest tests/servers/test_real_routes.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from fivefold.rollout.contract import complete
from fivefold.rollout.protocol import GenerationRequest
from fivefold.rollout.servers.engine import ServerEngine
from fivefold.types import UNKNOWN_EXPERT, Completion
from tests.servers.test_real_servers import DTYPE, ON_CUDA, requests_of, sampling, save_model, spec_of, start

FEW_BLOCKS = "--num-gpu-blocks-override=80 --no-enforce-eager"
"""Too few for all requests that run together, so that some are preempted; and CUDA graphs."""
SAME = 0.93 if ON_CUDA else 0.995
"""Share of the choices that are the same at least. Of other tokens, a quarter would be."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerEngine, PreTrainedModel, Path]]:
    """A server with few blocks, transformers' model of its weights, and their folder."""
    if "VLLM_PYTHON" not in os.environ:
        pytest.skip("VLLM_PYTHON names no Python that has vLLM")
    folder = save_model("qwen3_moe", 0, tmp_path_factory.mktemp("routes"))
    spec = spec_of("vllm", os.environ["VLLM_PYTHON"], folder, "folder")
    engine = start(replace(spec, returns_routes=True, arguments=(*spec.arguments, *FEW_BLOCKS.split())))
    engine.update_weights(load_file(folder / "model.safetensors").items(), 0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPE).float()
    yield engine, model.eval(), folder
    engine.close()


@torch.no_grad()
def same_choices(
    model: PreTrainedModel, requests: Sequence[GenerationRequest], completions: Sequence[Completion]
) -> float:
    """Return the share of the experts told that transformers' routers choose too."""
    shares = []
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.tensor([[*request.token_ids, *completion.token_ids]])
        assert completion.routes is not None
        told = torch.from_numpy(completion.routes).long()
        assert told.shape == (ids.shape[1], model.config.num_hidden_layers, model.config.num_experts_per_tok)
        assert (told[:-1] != UNKNOWN_EXPERT).all()
        assert (told[-1] == UNKNOWN_EXPERT).all()
        scores = torch.stack(model(input_ids=ids, output_router_logits=True).router_logits, dim=1)[:-1]
        chosen = scores.topk(told.shape[2]).indices
        shares.append((told[:-1, :, :, None] == chosen[:, :, None]).any(-1).float().flatten())
    return float(torch.cat(shares).mean())


@pytest.mark.parametrize("stop", [[], ["Q", "7"]], ids=["", "stop texts"])
def test_routes_are_those_of_the_routers(served: tuple[ServerEngine, PreTrainedModel, Path], stop: list[str]) -> None:
    engine, model, _ = served
    requests = requests_of(30, seed=3)
    completions = complete(engine, requests, sampling(max_new_tokens=30, stop=stop))
    assert same_choices(model, requests, completions) > SAME


def test_an_update_between_two_parts_of_a_completion_keeps_the_routes(
    served: tuple[ServerEngine, PreTrainedModel, Path],
) -> None:
    engine, model, folder = served
    requests = [request for request in requests_of(12, seed=5) if len(request.token_ids) <= 20]
    params = sampling(max_new_tokens=220, min_new_tokens=220)
    for number, request in enumerate(requests):
        engine.submit(number, request, params)
    done = dict(engine.collect(0.2))
    engine.update_weights(load_file(folder / "model.safetensors").items(), 1)
    while len(done) < len(requests):
        done |= dict(engine.collect(5.0))
    completions = [done[number] for number in range(len(requests))]
    assert any(len(set(completion.versions.tolist())) > 1 for completion in completions), "none was interrupted"
    assert same_choices(model, requests, completions) > SAME
