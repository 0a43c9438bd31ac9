"""Requests that the embedded engine answers in parallel while its weights change, against transformers itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from fivefold.rollout import embedded_stream
from fivefold.rollout.contract import complete
from fivefold.rollout.protocol import GenerationRequest, group_requests
from fivefold.rollout.transformers_engine import TransformersEngine
from fivefold.types import Completion
from tests.unit.rollout.test_transformers_engine import engine_at, ragged_prompts, sampling, teacher_forced

Folder = Callable[..., Path]


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a second pass at each look at the clock: `collect(n + 0.5)` goes on for n tokens, on any machine."""
    monkeypatch.setattr(embedded_stream, "time", SimpleNamespace(monotonic=count().__next__))


def run(engine: TransformersEngine, answers: dict[int, Completion], n: int) -> None:
    """Decode some tokens at a time until `n` requests are answered."""
    while len(answers) < n:
        answers |= dict(engine.collect(0.5) or engine.collect(3.5))


def model_at(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("rows", [5, 64])
def test_requests_that_join_at_any_time_have_the_completions_that_they_have_alone(
    family: str, rows: int, model_folder: Folder
) -> None:
    path = model_folder(family)
    params = sampling(max_new_tokens=30, stop_token_ids=list(range(3, 67, 12)))
    requests = group_requests(ragged_prompts(12, seed=4), 3, ("stream",))
    expected = complete(engine_at(path), requests, params)
    engine = engine_at(path, max_batch_size=rows)
    answers: dict[int, Completion] = {}
    for number, request in enumerate(requests):
        engine.submit(number, request, params)
        if number % 3 == 2:
            answers |= dict(engine.collect(3.5))
    run(engine, answers, 36)
    got = [answers[number] for number in range(36)]
    assert [c.token_ids.tolist() for c in got] == [c.token_ids.tolist() for c in expected]
    assert [c.finish_reason for c in got] == [c.finish_reason for c in expected]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=1e-4)


def changed_midway(
    engine: TransformersEngine, requests: Sequence[GenerationRequest], other: Path, *, sleeps: bool
) -> list[Completion]:
    """Submit each request, and give the engine the weights of `other`, as version 1, on the way."""
    params = sampling(max_new_tokens=24, min_new_tokens=24)
    answers: dict[int, Completion] = {}
    for number, request in enumerate(requests):
        engine.submit(number, request, params)
        assert not engine.collect(0.5)
        assert not engine.collect(2.5)
    if sleeps:
        engine.sleep()
        engine.wake_weights()
    engine.update_weights(engine_at(other).weights(), 1)
    engine.wake()
    run(engine, answers, len(requests))
    return [answers[number] for number in range(len(requests))]


@pytest.mark.parametrize(("recomputes", "sleeps"), [(True, False), (False, True)])
def test_new_weights_go_on_as_if_they_had_read_what_the_old_ones_sampled(
    recomputes: bool, sleeps: bool, model_folder: Folder
) -> None:
    paths = [model_folder("qwen3_moe"), model_folder("qwen3_moe", 1)]
    models = [model_at(path) for path in paths]
    requests = group_requests(ragged_prompts(5, seed=5), 1, ("swap",))
    answers = changed_midway(engine_at(paths[0], recomputes=recomputes), requests, paths[1], sleeps=sleeps)
    for request, answer in zip(requests, answers, strict=True):
        versions = answer.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}, "the weights changed on the way"
        by_version = torch.stack(
            [teacher_forced(model, request.token_ids, answer.token_ids.tolist()) for model in models]
        )
        logits = by_version[versions, range(len(versions))].index_fill(1, torch.tensor([2]), -torch.inf)
        expected = logits.log_softmax(-1)[range(len(versions)), answer.token_ids.tolist()]
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, rtol=0, atol=1e-4)


def test_kept_keys_and_values_are_those_of_the_weights_that_read_each_token(model_folder: Folder) -> None:
    paths = [model_folder("llama"), model_folder("llama", 1)]
    models = [model_at(path) for path in paths]
    requests = group_requests(ragged_prompts(4, seed=6), 1, ("kept",))
    for request, answer in zip(
        requests, changed_midway(engine_at(paths[0]), requests, paths[1], sleeps=False), strict=True
    ):
        versions = answer.versions.tolist()
        assert set(versions) == {0, 1}
        cache, inputs, expected = DynamicCache(), list(request.token_ids), []
        for version, token in zip(versions, answer.token_ids.tolist(), strict=True):
            with torch.no_grad():
                output = models[version](input_ids=torch.tensor([inputs]), past_key_values=cache, use_cache=True)
            logits = output.logits[0, -1].index_fill(0, torch.tensor([2]), -torch.inf)
            expected.append(logits.log_softmax(-1)[token].item())
            inputs = [token]
        torch.testing.assert_close(torch.tensor(answer.logprobs), torch.tensor(expected), rtol=0, atol=1e-4)


def test_an_engine_that_has_no_weights_refuses_to_go_on(model_folder: Folder) -> None:
    engine = engine_at(model_folder("llama"))
    assert engine.collect(1.5) == []
    engine.submit(0, *group_requests([[5, 6]], 1, ()), sampling())
    engine.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        engine.collect(1.5)
