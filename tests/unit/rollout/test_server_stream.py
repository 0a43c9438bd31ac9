"""Requests that a server answers in parallel while its weights change: a server that answers by a formula."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fivefold.rollout.protocol import Begun, GenerationRequest, SamplingParams
from fivefold.rollout.servers import dialect as dialects
from fivefold.rollout.servers import stream as stream_of_servers
from fivefold.rollout.servers.client import HttpClient
from fivefold.rollout.servers.dialect import Answer, AnswerEnd, Ask
from fivefold.rollout.servers.life import ServerLife
from fivefold.rollout.servers.sglang_dialect import SGLangDialect
from fivefold.rollout.servers.stream import ServerStream
from fivefold.rollout.stopping import StopRule
from fivefold.types import UNKNOWN_EXPERT, Completion
from tests.unit.rollout import fake_server
from tests.unit.rollout.conftest import BATCH_SIZE, spec_of
from tests.unit.rollout.fake_server import LONG, LONG_TOKENS, answer_to, write_python
from tests.unit.rollout.served import Served, completed_beside, requests_of, sampling, start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Folder = Callable[..., Path]

LONGEST_S = 120.0
"""Most seconds that a wait may take, which only a failure uses up."""
PAUSES = {"vllm": ("/pause?mode=abort", "/resume"), "sglang": ("/pause_generation", "/continue_generation")}


@pytest.fixture(autouse=True)
def _answers_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let answers take as long as they need on a busy machine."""
    monkeypatch.setattr(stream_of_servers, "GRACE_S", LONGEST_S)


class OneSampling:
    """A stream all of whose requests are sampled in one way."""

    def __init__(
        self,
        send: Callable[[Ask, SamplingParams], bytes],
        read: Callable[[bytes, Ask], Answer],
        params: SamplingParams,
        *,
        end_token_ids: Sequence[int] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        **sizes: int,
    ) -> None:
        def stop_rule(of: SamplingParams) -> StopRule:
            return StopRule(of, frozenset(end_token_ids), tokenizer, torch.device("cpu"))

        self._params = params
        self._stream = ServerStream(send, read, stop_rule, **sizes)

    def submit(self, number: int, request: GenerationRequest) -> None:
        self._stream.submit(number, request, self._params)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def collected(served: Served, n: int) -> dict[int, Completion]:
    answers: dict[int, Completion] = {}
    while len(answers) < n:
        answers |= dict(served.engine.collect(0.3))
    return answers


def restartable(model_folder: Folder, tmp_path: Path, max_restarts: int = 1) -> Served:
    """Return a server with weights of version 0 that may be started again so often."""
    model = model_folder("qwen3_moe")
    spec = spec_of("sglang", model, python=write_python(tmp_path), can_sleep=False, max_restarts=max_restarts)
    served = Served(spec, start(spec), tmp_path, load_file(model / "model.safetensors"))
    served.update(0)
    return served


def as_it_came(reply: bytes, ask: Ask) -> Answer:
    """Return what a stream reads of a reply that is an answer."""
    return cast(Answer, pickle.loads(reply))


def reply_of(*answer: Any) -> bytes:
    """Return a reply that is an answer."""
    return pickle.dumps(Answer(*answer))


def answer(reason: AnswerEnd) -> bytes:
    """Return a reply of one token."""
    return reply_of(np.array([9], np.int32), np.array([-1.0], np.float32), reason)


def never_again(wait: Callable[[ServerLife], None]) -> Callable[[ServerLife], None]:
    """Return a wait for a server that is ready; for others, prompts that it has lost would wait too."""

    def checked(server: ServerLife) -> None:
        assert server.is_ready, "its prompts wait until it has started again"
        wait(server)

    return checked


def long_request(n_pauses: int, seed: int = 77) -> GenerationRequest:
    return GenerationRequest((LONG, n_pauses, 11, 12), seed)


def continued(request: GenerationRequest, n_pauses: int, params: SamplingParams) -> tuple[list[int], list[float]]:
    """Return what the server's formula gives if each pause leaves two tokens more."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for pause in range(n_pauses + 1):
        seed = request.seed + len(tokens)
        more, their_logprobs, _ = answer_to(
            (*request.token_ids, *tokens), seed, params.max_new_tokens - len(tokens)
        )  # fmt: skip
        n = LONG_TOKENS if pause < n_pauses else len(more)
        tokens += more[:n]
        logprobs += their_logprobs[:n]
    return tokens, logprobs


def test_completions_come_back_with_the_numbers_of_their_requests(server: Served) -> None:
    server.engine.wake()
    server.update(3)
    params = sampling()
    requests = requests_of(3 * BATCH_SIZE)
    for number, request in enumerate(requests):
        server.engine.submit(number, request, params)
    answers = collected(server, len(requests))
    for number, request in enumerate(requests):
        tokens, logprobs, reason = answer_to(request.token_ids, request.seed, params.max_new_tokens)
        assert answers[number].token_ids.tolist() == list(tokens)
        assert answers[number].logprobs.tolist() == list(logprobs)
        assert set(answers[number].versions.tolist()) == {3}
        assert answers[number].finish_reason == reason
    assert server.engine.collect(0.01) == []


@pytest.mark.parametrize("backend", PAUSES)
def test_routes_are_those_with_which_each_token_was_computed_first(
    backend: str, model_folder: Folder, tmp_path: Path
) -> None:
    """The model's first layer is dense. Each answer adds the tokens that no earlier one has told of."""
    model = model_folder("qwen3_moe")
    spec = spec_of(backend, model, python=write_python(tmp_path), returns_routes=True)
    served = Served(spec, start(spec), tmp_path, load_file(model / "model.safetensors"))
    served.update(0)
    params, request = sampling(max_new_tokens=9), long_request(2)
    served.engine.submit(0, request, params)
    answers: dict[int, Completion] = {}
    for version in (1, 2):
        answers |= dict(served.engine.collect(0.01))
        served.wait_for_long(version)
        served.update(version)
    answers |= collected(served, 1)
    served.engine.close()
    tokens = [*request.token_ids, *answers[0].token_ids.tolist()]
    routes, n_prompt = answers[0].routes, len(request.token_ids)
    assert routes is not None
    assert routes.dtype == np.int8
    for place, (token, row) in enumerate(zip(tokens[:-1], routes.tolist(), strict=False)):
        n_pauses = min(2, max(0, place - n_prompt + 1) // LONG_TOKENS)
        assert row == [fake_server.experts_of(token, place, 1, n_pauses, top_k=2)], place
    assert routes[-1].tolist() == [[UNKNOWN_EXPERT] * 2]
    assert len(routes) == len(tokens)


@pytest.mark.parametrize("sleeps", [False, True])
def test_requests_go_on_over_updates_and_tell_which_weights_sampled_each_token(server: Served, sleeps: bool) -> None:
    server.engine.wake()
    server.update(0)
    params = sampling(max_new_tokens=20)
    requests = {0: long_request(2), 1: long_request(1), 2: long_request(0)}
    n_long = server.n_long()
    for number, request in requests.items():
        server.engine.submit(number, request, params)
    answers = collected(server, 1)
    assert set(answers) == {2}, "only what needs no pause is done"
    before = len(server.log.posts())
    # All three are asked for; after the first update two of them go on.
    for version, n_asked in ((1, 3), (2, 5)):
        server.wait_for_long(n_long + n_asked)
        if sleeps:
            server.engine.sleep()
            server.engine.wake_weights()
        server.update(version)
        server.engine.wake()
        # What is asked beside the stream is answered meanwhile.
        beside = completed_beside(server.engine, requests_of(3), answers)
        assert {completion.versions[0] for completion in beside} == {version}
        while 2 - version not in answers:
            answers |= collected(server, 1)
    for number, request in requests.items():
        completion = answers[number]
        n_pauses = request.token_ids[1]
        tokens, logprobs = continued(request, n_pauses, params)
        assert completion.token_ids.tolist() == tokens
        assert completion.logprobs.tolist() == logprobs
        first = [version for version in range(n_pauses) for _ in range(LONG_TOKENS)]
        assert completion.versions.tolist() == first + [n_pauses] * (len(tokens) - len(first))
    pause, resume = PAUSES[server.backend]
    posts = [path for path in server.log.posts()[before:] if path in (pause, resume)]
    assert posts == [pause, resume] * 2


def test_each_completion_of_a_group_ends_and_makes_room_by_itself(server: Served) -> None:
    server.engine.wake()
    server.update(0)
    params = replace(sampling(max_new_tokens=20), seeded=False)
    before, n_long = len(server.bodies()), server.n_long()
    for number, request in enumerate([*(long_request(1, seed) for seed in range(3)), *requests_of(2)]):
        server.engine.submit(number, request, params)
    assert server.engine.n_running == 5
    answers = collected(server, 2)
    assert set(answers) == {3, 4}, "the requests that need no pause are answered"
    assert server.engine.n_running == 3
    server.wait_for_long(n_long + 3)
    server.update(1)
    answers |= collected(server, 3)
    bodies = server.bodies()[before:]
    assert len(bodies) == 5 + 3
    assert all("seed" not in body and "seed" not in body["sampling_params"] for body in bodies)
    assert all(set(c.versions.tolist()) <= {0, 1} and c.versions[0] == 0 for c in answers.values())
    assert server.engine.n_running == 0


def test_requests_that_have_begun_go_on_before_those_that_wait() -> None:
    asked: list[tuple[int, ...]] = []
    is_asked, is_paused = threading.Event(), threading.Event()

    def complete(ask: Ask, params: SamplingParams) -> bytes:
        asked.append(ask.token_ids)
        is_asked.set()
        assert is_paused.wait(LONGEST_S)
        one_token, is_new = (np.array([9], np.int32), np.array([-1.0], np.float32)), len(ask.token_ids) == 1
        return reply_of(*one_token, "abort" if is_new and len(asked) == 1 else "stop")

    # One request at a time, so that their order is that in which they are asked for.
    stream = OneSampling(complete, as_it_came, sampling(), most=1)
    for number in range(3):
        stream.submit(number, GenerationRequest((number,), 0))
    assert stream.collect(0, 0.1) == []
    assert is_asked.wait(LONGEST_S)
    stream.hold()
    is_paused.set()
    stream.interrupted()
    stream.resumed(1)
    done: dict[int, Completion] = {}
    while len(done) < 3:
        done |= dict(stream.collect(1, LONGEST_S))
    assert asked == [(0,), (0, 9), (1,), (2,)]
    assert done[0].versions.tolist() == [0, 1]
    assert done[1].versions.tolist() == done[2].versions.tolist() == [1]


def test_chunks_of_a_completion_arrive_before_its_end() -> None:
    asked: list[tuple[int, int, int]] = []

    def complete(ask: Ask, params: SamplingParams) -> bytes:
        """Give each completion ten tokens, numbered from 1, in as many asks as that takes."""
        number, *sampled = ask.token_ids
        asked.append((number, len(sampled), params.max_new_tokens))
        tokens = list(range(len(sampled) + 1, 11))[: params.max_new_tokens]
        is_whole = len(sampled) + len(tokens) == 10
        return reply_of(np.array(tokens, np.int32), -np.array(tokens, np.float32), "stop" if is_whole else "length")

    params = replace(sampling(max_new_tokens=9), min_new_tokens=6)
    stream = OneSampling(complete, as_it_came, params, most=1, most_tokens=4)
    for number in (100, 200):
        stream.submit(number, GenerationRequest((number,), 0))
    assert stream.collect(0, LONGEST_S) == []
    so_far = stream.unfinished()[100]
    assert so_far.begun is not None
    assert so_far.begun.token_ids.tolist() == [1, 2, 3, 4]
    assert so_far.begun.finish_reason is None
    done: dict[int, Completion] = {}
    while len(done) < 2:
        done |= dict(stream.collect(3, LONGEST_S))
    assert sorted(asked) == [(number, *seam) for number in (100, 200) for seam in ((0, 4), (4, 4), (8, 1))]
    for completion in done.values():
        assert completion.token_ids.tolist() == list(range(1, 10))
        assert completion.logprobs.tolist() == [-float(token) for token in range(1, 10)]
        assert completion.finish_reason == "length", "it has as many tokens as it may have"
    assert done[200].versions.tolist()[-1] == 3


class Letters:
    """A tokenizer whose tokens are characters."""

    def batch_decode(self, rows: list[list[int]], **_: Any) -> list[str]:
        return ["".join(map(chr, row)) for row in rows]


@pytest.mark.parametrize(
    ("text", "least", "ends"),
    [
        ("one. END. two", 0, "one. END"),  # across two answers
        ("abcENDtwo", 0, "abcEND"),  # in one answer, where the server finds it
        ("one.xEND.END two", 9, "one.xEND.END"),  # the first one comes too early
        ("one.E.N.D", 0, "one.E.N.D"),
    ],
)
@pytest.mark.parametrize("end", ["length", "abort"])
def test_a_stop_text_across_two_answers_ends_a_completion(text: str, least: int, ends: str, end: AnswerEnd) -> None:
    def complete(ask: Ask, params: SamplingParams) -> bytes:
        """Go on with the text, up to a stop text in this answer, by three tokens at most."""
        begun = len(ask.token_ids) - 1
        tokens = text[begun : begun + 3]
        is_found = "END" in tokens
        reason: AnswerEnd = "stop" if is_found or begun + len(tokens) == len(text) else end
        return reply_of(np.array([*map(ord, tokens)], np.int32), -np.ones(len(tokens), np.float32), reason)

    params = sampling(max_new_tokens=20, min_new_tokens=least, stop=["END"])
    tokenizer = cast("PreTrainedTokenizerBase", Letters())
    stream = OneSampling(complete, as_it_came, params, most=1, most_tokens=3, tokenizer=tokenizer)
    stream.submit(0, GenerationRequest((100,), 0))
    done: dict[int, Completion] = {}
    while not done:
        done = dict(stream.collect(0, LONGEST_S))
    completion = done[0]
    assert "".join(map(chr, completion.token_ids)) == ends
    assert len(completion.logprobs) == len(completion.versions) == len(ends)
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("reason", ["abort", "length"])
@pytest.mark.parametrize(
    ("answers", "ends"),
    [
        (["abc", "de."], "stop"),  # its end token
        (["abc", "def", "gh"], "length"),  # as many tokens as it may have
        (["abc", "END"], "stop"),  # a stop text
    ],
)
def test_an_answer_whose_last_token_ends_the_completion_is_its_end_whatever_the_server_says(
    answers: list[str], ends: str, reason: AnswerEnd
) -> None:
    """SGLang samples one more token of what it aborts, and does not look at that, nor at the last one of a chunk."""
    left = list(answers)

    def complete(ask: Ask, params: SamplingParams) -> bytes:
        assert params.max_new_tokens > 0
        tokens = left.pop(0)
        return reply_of(np.array([*map(ord, tokens)], np.int32), -np.ones(len(tokens), np.float32), reason)

    tokenizer = cast("PreTrainedTokenizerBase", Letters())
    params = sampling(max_new_tokens=8, stop=["END"])
    stream = OneSampling(
        complete, as_it_came, params, most=1, most_tokens=3, end_token_ids=[ord(".")], tokenizer=tokenizer
    )
    stream.submit(0, GenerationRequest((100,), 0))
    done: dict[int, Completion] = {}
    while not done:
        done = dict(stream.collect(0, LONGEST_S))
    completion = done[0]
    assert "".join(map(chr, completion.token_ids)) == "".join(answers)
    assert completion.finish_reason == ends


def completed(stream: OneSampling, version: int) -> list[int]:
    """Return the versions of the tokens of the one completion of a stream."""
    while not (done := stream.collect(version, LONGEST_S)):
        pass
    [(_, completion)] = done
    return completion.versions.tolist()


@pytest.mark.parametrize(
    ("ends", "versions"),
    [
        (["stop"], [1]),  # the server had held it back
        (["abort", "stop"], [0, 1]),  # it had been aborted
    ],
)
def test_an_answer_that_comes_after_new_weights_has_the_version_of_those_that_sampled_it(
    ends: list[AnswerEnd], versions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_of_servers, "GRACE_S", 0.01)
    has_weights, left = threading.Event(), list(ends)

    def complete(ask: Ask, params: SamplingParams) -> bytes:
        assert has_weights.wait(LONGEST_S)
        return answer(left.pop(0))

    stream = OneSampling(complete, as_it_came, sampling(), most=1)
    stream.submit(0, GenerationRequest((0,), 0))
    assert stream.collect(0, 0.1) == []
    stream.hold()
    stream.interrupted()
    stream.resumed(1)
    has_weights.set()
    assert completed(stream, 1) == versions


def test_an_answer_that_ended_before_new_weights_has_the_old_version_however_late_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one that a server held back goes on with the new weights, and is aborted before newer ones."""
    monkeypatch.setattr(stream_of_servers, "GRACE_S", 0.01)
    has_arrived, may_go_on, may_abort = threading.Event(), threading.Event(), threading.Event()

    def complete(ask: Ask, params: SamplingParams) -> bytes:
        if ask.token_ids == (0,):
            return answer("stop")
        if ask.token_ids == (1,):
            assert may_abort.wait(LONGEST_S)
            return answer("abort")
        return answer("stop")

    def read(reply: bytes, ask: Ask) -> Answer:
        if ask.token_ids == (0,):
            has_arrived.set()
            assert may_go_on.wait(LONGEST_S)
        return as_it_came(reply, ask)

    stream = OneSampling(complete, read, sampling(), most=2)
    for number in range(2):
        stream.submit(number, GenerationRequest((number,), 0))
    assert stream.collect(0, 0.1) == []
    assert has_arrived.wait(LONGEST_S)
    stream.hold()
    # The server is read to the end of what it had, and not longer.
    threading.Timer(0.2, may_go_on.set).start()
    stream.interrupted()
    assert may_go_on.is_set()
    stream.resumed(1)
    [(number, completion)] = stream.collect(1, LONGEST_S)
    assert (number, completion.versions.tolist()) == (0, [0])
    stream.hold()
    may_abort.set()
    stream.interrupted()
    stream.resumed(2)
    assert completed(stream, 2) == [1, 2]


def test_a_server_answers_until_the_weights_that_it_is_to_load_are_there(server: Served) -> None:
    server.engine.wake()
    server.update(0)
    params, pause = sampling(max_new_tokens=20), PAUSES[server.backend]
    n_long = server.n_long()
    server.engine.submit(0, long_request(1), params)
    server.engine.submit(1, *requests_of(1), params)
    before, answers = len(server.log.posts()), dict[int, Completion]()

    def weights() -> Iterator[tuple[str, Tensor]]:
        for number, weight in enumerate(server.weights.items()):
            if number == 1:
                answers.update(collected(server, 1))
                server.wait_for_long(n_long + 1)
            yield weight

    server.engine.stage_weights(weights(), 1)
    assert set(answers) == {1}
    assert not set(server.log.posts()[before:]) & set(pause)
    server.engine.swap_weights()
    assert [path for path in server.log.posts()[before:] if path in pause] == [*pause]
    assert server.left_behind() == []
    [completion] = collected(server, 1).values()
    assert completion.versions.tolist() == [0] * LONG_TOKENS + [1] * (len(completion.versions) - LONG_TOKENS)


@pytest.mark.parametrize("dies_in", ["load", "resume"])
def test_a_server_that_dies_while_it_loads_weights_is_started_again_without_any(
    dies_in: str, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = restartable(model_folder, tmp_path)
    engine = served.engine
    engine.submit(4, long_request(1), sampling(max_new_tokens=20))
    assert engine.collect(0.1) == []
    served.wait_for_long(1)

    def die(self: SGLangDialect, http: HttpClient, *_: Any, **__: Any) -> None:
        os.kill(served.log.rows("start")[-1]["pid"], signal.SIGKILL)
        http.post("/flush_cache")

    with monkeypatch.context() as dying:
        dying.setattr(SGLangDialect, dies_in, die)
        served.update(1)
    assert not engine.has_weights
    assert served.left_behind() == []
    lost = engine.take_lost()[4]
    assert lost.begun is not None
    assert lost.begun.versions.tolist() == [0] * LONG_TOKENS
    served.update(1)
    assert engine.has_weights
    engine.close()


def test_a_server_that_dies_before_its_first_prompt_is_started_again(model_folder: Folder, tmp_path: Path) -> None:
    served = restartable(model_folder, tmp_path)
    os.kill(served.log.rows("start")[-1]["pid"], signal.SIGKILL)
    served.update(1)
    assert not served.engine.has_weights
    served.update(1)
    assert served.engine.has_weights
    served.engine.close()


@pytest.mark.parametrize("dies_before", ["a report", "new weights"])
def test_a_server_that_dies_is_started_again_and_gets_the_next_weights(
    dies_before: str, model_folder: Folder, tmp_path: Path
) -> None:
    served = restartable(model_folder, tmp_path)
    engine = served.engine
    assert engine.has_weights
    params, waits = sampling(max_new_tokens=20), {number: long_request(2, number) for number in (4, 8)}
    [quick] = requests_of(1)
    for number, request in [*waits.items(), (9, quick)]:
        engine.submit(number, request, params)
    assert set(collected(served, 1)) == {9}
    assert engine.take_lost() == {}
    served.wait_for_long(2)
    served.update(1)
    assert engine.collect(0.1) == []
    served.wait_for_long(4)

    def die() -> None:
        os.kill(served.log.rows("start")[-1]["pid"], signal.SIGKILL)

    die()
    if dies_before == "a report":
        assert engine.collect(LONGEST_S) == []
        assert not engine.has_weights
    served.update(2)
    assert engine.has_weights
    assert sorted(engine.unfinished()) == [4, 8], "a checkpoint has what nobody was told yet"
    lost = engine.take_lost()
    assert sorted(lost) == [4, 8]
    assert engine.unfinished() == {}
    assert engine.take_lost() == {}
    assert engine.n_running == 0
    assert len(served.log.rows("start")) == 2
    # What had arrived is kept: two tokens of each before the first update.
    for number, request in lost.items():
        assert request.begun is not None
        assert request.begun.versions.tolist() == [0] * LONG_TOKENS
        engine.submit(number, request, params)
    # What another server has answered whole is not asked for again.
    whole = Begun(np.array([5], np.int32), np.array([-1.0], np.float32), np.array([0], np.int32), "stop")
    engine.submit(9, replace(quick, begun=whole), params)
    answers = collected(served, 1)
    assert answers.pop(9).token_ids.tolist() == [5]
    served.wait_for_long(6)
    before = len(served.bodies())
    served.update(3)
    answers |= collected(served, 2)
    assert len(served.bodies()) == before + 2
    for number, request in waits.items():
        tokens, logprobs = continued(request, 2, params)
        assert answers[number].token_ids.tolist() == tokens
        assert answers[number].logprobs.tolist() == logprobs
        assert answers[number].versions.tolist() == [0, 0, 2, 2, *[3] * (len(tokens) - 4)]
    # It may die as often as the recipe says.
    engine.submit(12, long_request(1), params)
    assert engine.collect(0.1) == []
    die()
    with pytest.raises(RuntimeError, match="the server ended with status"):
        engine.collect(LONGEST_S)
    engine.close()


def test_a_server_that_dies_while_it_starts_again_is_started_once_more(model_folder: Folder, tmp_path: Path) -> None:
    """Such as one whose predecessor's memory is not free yet."""
    served = restartable(model_folder, tmp_path, max_restarts=2)
    engine = served.engine
    engine.submit(4, long_request(1), sampling(max_new_tokens=20))
    assert engine.collect(0.1) == []
    served.wait_for_long(1)
    lives = (tmp_path / "python").read_text()
    write_python(tmp_path, **{fake_server.DIES_IN: "start"})
    os.kill(served.log.rows("start")[-1]["pid"], signal.SIGKILL)
    assert engine.collect(LONGEST_S) == []
    while len(served.log.rows("start")) < 2:
        time.sleep(0.01)
    (tmp_path / "python").write_text(lives)
    served.update(1)
    assert engine.has_weights
    assert len(served.log.rows("start")) == 3
    engine.close()


@pytest.mark.parametrize("found", ["new weights", "no answers"])
def test_a_server_that_hangs_is_ended_and_started_again(
    found: str, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialects, "PAUSE_S", 0.5)
    served = restartable(model_folder, tmp_path)
    engine = served.engine
    engine.submit(4, long_request(2), sampling())
    assert engine.collect(0.1) == []
    served.log.hang()
    if found == "no answers":
        with monkeypatch.context() as starting:
            starting.setattr(engine._life, "_spec", replace(served.spec, server_timeout_s=0.2))
            starting.setattr(ServerLife, "wait_until_ready", never_again(ServerLife.wait_until_ready))
            assert engine.collect(0.3) == []
        assert not engine.has_weights
    served.update(1)
    assert len(served.log.rows("start")) == 2
    assert list(engine.take_lost()) == [4]
    # Its successor has its own time for a first answer.
    engine.submit(8, long_request(2), sampling())
    with monkeypatch.context() as probing:
        probing.setattr(SGLangDialect, "beat", lambda *_: pytest.fail("it has just begun"))
        assert engine.collect(0.01) == []
    engine.close()
