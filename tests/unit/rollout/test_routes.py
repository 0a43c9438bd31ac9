"""The experts that the embedded engine reports, against the choices of transformers' own routers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fivefold.rollout import embedded_stream
from fivefold.rollout.contract import complete
from fivefold.rollout.protocol import group_requests
from fivefold.types import UNKNOWN_EXPERT
from tests.unit.rollout.test_transformers_engine import engine_at, ragged_prompts, sampling

Folder = Callable[..., Path]
MOE = ("qwen3_moe", "mixtral", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe")


def own_choices(path: Path, sequences: Sequence[Sequence[int]]) -> list[Any]:
    """Return what the routers choose in one forward pass over each sequence, sorted, [tokens, MoE layers, top_k]."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    seen: list[torch.Tensor] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda _module, _args, output: seen.append(output[2]))
    choices = []
    with torch.no_grad():
        for tokens in sequences:
            seen.clear()
            model(torch.tensor([tokens]))
            choices.append(torch.stack(seen, 1).sort(-1).values.numpy())
    return choices


@pytest.mark.parametrize("family", MOE)
def test_each_token_has_the_experts_of_a_forward_pass_over_the_whole_sequence(
    family: str, model_folder: Folder
) -> None:
    """Prompts are padded, computed once for a group, and decoded in waves; rows end at different times."""
    path = model_folder(family)
    prompts = ragged_prompts(5, seed=3)
    requests = group_requests(prompts, 3, ("routes",))
    engine = engine_at(path, records_routes=True, max_batch_size=7)
    completions = complete(engine, requests, sampling(stop_token_ids=list(range(3, 67, 9))))
    sequences = [
        [*request.token_ids, *done.token_ids.tolist()] for request, done in zip(requests, completions, strict=True)
    ]
    for completion, tokens, want in zip(completions, sequences, own_choices(path, sequences), strict=True):
        assert completion.routes is not None
        assert completion.routes.dtype == np.int8
        assert completion.routes.shape == want.shape
        np.testing.assert_array_equal(np.sort(completion.routes[:-1], -1), want[:-1])
        assert (completion.routes[-1] == UNKNOWN_EXPERT).all(), "no model was given the last token"
        assert len(completion.routes) == len(tokens)


@pytest.mark.parametrize("recomputes", [False, True])
def test_new_weights_leave_the_routes_of_earlier_tokens(
    recomputes: bool, model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A second passes at each look at the clock.
    monkeypatch.setattr(embedded_stream, "time", SimpleNamespace(monotonic=count().__next__))
    paths = [model_folder("qwen3_moe"), model_folder("qwen3_moe", 1)]
    engine = engine_at(paths[0], records_routes=True, recomputes=recomputes)
    [request] = group_requests(ragged_prompts(1, seed=5), 1, ("swap",))
    engine.submit(0, request, sampling(max_new_tokens=24, min_new_tokens=24))
    assert not engine.collect(5.5)
    engine.update_weights(engine_at(paths[1]).weights(), 1)
    answers: dict[int, Any] = {}
    while not answers:
        answers = dict(engine.collect(5.5))
    routes, tokens = answers[0].routes, [*request.token_ids, *answers[0].token_ids.tolist()]
    n_old = len(request.token_ids) + int((answers[0].versions == 0).sum()) - 1
    [of_old] = own_choices(paths[0], [tokens])
    np.testing.assert_array_equal(np.sort(routes[:n_old], -1), of_old[:n_old])
    if recomputes:
        [of_new] = own_choices(paths[1], [tokens])
        np.testing.assert_array_equal(np.sort(routes[n_old + 1 : -1], -1), of_new[n_old + 1 : -1])


def test_a_model_without_experts_has_no_routes(model_folder: Folder) -> None:
    with pytest.raises(ValueError, match="the rollout's model has none"):
        engine_at(model_folder("llama"), records_routes=True)
