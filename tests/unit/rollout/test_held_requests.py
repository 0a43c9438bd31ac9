"""Requests that keep their keys and values while weights change: a server that answers by a formula."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fivefold.rollout.protocol import GenerationRequest
from fivefold.rollout.servers import dialect as dialects
from fivefold.rollout.servers.client import HttpClient
from fivefold.rollout.servers.sglang_dialect import SGLangDialect
from fivefold.rollout.servers.vllm_dialect import BEAT, GO_ON, HOLD, VLLMDialect
from fivefold.types import Completion
from tests.unit.rollout.conftest import spec_of
from tests.unit.rollout.fake_server import LONG, LONG_TOKENS, answer_to, write_python
from tests.unit.rollout.served import Served, completed_beside, requests_of, sampling, start

Folder = Callable[..., Path]

LONGEST_S = 120.0
PARAMS = sampling(max_new_tokens=20)


def served_in(folder: Path, model_folder: Folder, **changes: Any) -> Served:
    """Return a server with weights of version 0 that holds its requests, and may be started again once."""
    model = model_folder("qwen3_moe")
    spec = spec_of("vllm", model, python=write_python(folder), can_sleep=False, max_restarts=1, keeps_cache=True)
    spec = replace(spec, **changes)
    served = Served(spec, start(spec), folder, load_file(model / "model.safetensors"))
    served.update(0)
    return served


@pytest.fixture
def held(model_folder: Folder, tmp_path: Path) -> Iterator[Served]:
    """A server of `served_in`."""
    served = served_in(tmp_path, model_folder)
    yield served
    served.engine.close()


def long_request(n_holds: int, seed: int = 77) -> GenerationRequest:
    """Return a request that is answered after it was held so many times."""
    return GenerationRequest((LONG, n_holds, 11, 12), seed)


def begin(served: Served, requests: dict[int, GenerationRequest]) -> None:
    """Submit long requests, and wait until the server has them."""
    n = served.n_long()
    for number, request in requests.items():
        served.engine.submit(number, request, PARAMS)
    assert served.engine.collect(0.01) == []
    served.wait_for_long(n + len(requests))


def collected(served: Served, n: int) -> dict[int, Completion]:
    answers: dict[int, Completion] = {}
    while len(answers) < n:
        answers |= dict(served.engine.collect(0.3))
    return answers


def assert_sampled_at_one_go(request: GenerationRequest, completion: Completion, versions: list[int]) -> None:
    """Compare with the formula of one answer, in which each hold comes after two tokens more."""
    tokens, logprobs, reason = answer_to(request.token_ids, request.seed, PARAMS.max_new_tokens)
    assert completion.token_ids.tolist() == list(tokens)
    assert completion.logprobs.tolist() == list(logprobs)
    assert completion.finish_reason == reason
    before = [version for version in versions[:-1] for _ in range(LONG_TOKENS)]
    assert completion.versions.tolist() == before + [versions[-1]] * (len(tokens) - len(before))


def test_requests_go_on_over_updates_and_are_not_asked_for_again(held: Served) -> None:
    requests = {1: long_request(1, 77), 2: long_request(2, 78)}
    begin(held, requests)
    before = len(held.bodies())
    answers: dict[int, Completion] = {}
    for version in (1, 2):
        assert held.posts_during(lambda version=version: held.update(version)) == [
            HOLD,
            "/collective_rpc",
            "/collective_rpc",
            GO_ON,
        ]
        # Requests beside them that begin now have one version.
        evaluated = completed_beside(held.engine, [*requests_of(2), *2 * requests_of(1)], answers)
        assert {v for completion in evaluated for v in completion.versions.tolist()} == {version}
        while version not in answers:
            answers |= collected(held, 1)
    assert_sampled_at_one_go(requests[1], answers[1], [0, 1])
    assert_sampled_at_one_go(requests[2], answers[2], [0, 1, 2])
    assert sum(body["token_ids"][0] == LONG for body in held.bodies()[before:]) == 0
    # What begins now is sampled by the newest weights alone, though no request was held for them.
    held.update(3)
    held.engine.submit(3, *requests_of(1), PARAMS)
    assert set(collected(held, 1)[3].versions.tolist()) == {3}


def test_a_server_that_dies_after_it_was_held_loses_only_what_has_not_arrived(
    held: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, request = held.engine, long_request(1)
    begin(held, {4: request})

    def die(self: VLLMDialect, http: HttpClient, folder: Path, version: int, *, keeps_cache: bool) -> None:
        assert held.log.posts()[-1] == HOLD
        os.kill(held.log.rows("start")[-1]["pid"], signal.SIGKILL)
        http.post("/collective_rpc")

    with monkeypatch.context() as dying:
        dying.setattr(VLLMDialect, "load", die)
        held.update(1)
    assert not engine.has_weights
    lost = engine.unfinished()[4]
    assert lost.begun is None, "a held request is answered as a whole, or starts over"
    assert engine.take_lost() == {4: lost}
    held.update(1)
    assert engine.has_weights
    # Another replica, here the one that was started again, answers what is left, though it was never held.
    engine.submit(4, lost, PARAMS)
    assert engine.collect(0.01) == []
    held.wait_for_long(2)
    held.update(2)
    [completion] = collected(held, 1).values()
    assert_sampled_at_one_go(request, completion, [1, 2])


def test_pieces_of_a_held_request_follow_one_another(model_folder: Folder, tmp_path: Path) -> None:
    served = served_in(tmp_path, model_folder, new_tokens_per_chunk=4)
    # The first piece has four tokens, of which two are sampled before the update; so long is every piece but the last.
    begin(served, {1: long_request(1, seed=3)})
    served.update(1)
    [completion] = collected(served, 1).values()
    lengths = [len(body["token_ids"]) for body in served.bodies()]
    assert lengths == list(range(4, 4 + len(completion.token_ids), 4))
    assert len(lengths) > 1
    assert completion.versions.tolist() == [0, 0] + [1] * (len(completion.token_ids) - 2)
    served.engine.close()


def test_a_held_server_that_takes_long_goes_on_and_one_that_hangs_is_started_again(
    held: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = long_request(1)
    begin(held, {1: request})
    with monkeypatch.context() as stalled:
        stalled.setattr(held.engine._life, "_spec", replace(held.spec, server_timeout_s=0.0))
        assert held.posts_during(lambda: held.engine.collect(0.01)) == [BEAT]
    held.update(1)
    assert_sampled_at_one_go(request, collected(held, 1)[1], [0, 1])
    assert len(held.log.rows("start")) == 1
    begin(held, {2: request})
    monkeypatch.setattr(dialects, "PAUSE_S", 0.5)
    held.log.hang()
    held.update(2)
    assert len(held.log.rows("start")) == 2
    assert list(held.engine.take_lost()) == [2]
    # The new server knows its version without having been held.
    held.engine.submit(2, *requests_of(1), PARAMS)
    assert set(collected(held, 1)[2].versions.tolist()) == {2}


def test_sglang_cannot_hold_requests() -> None:
    for refused in (lambda: SGLangDialect().hold(None, 1.0), lambda: SGLangDialect().go_on(None, 1)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"drop rollout\.recompute_kv_cache"):
            refused()
