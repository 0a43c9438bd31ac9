"""Routes from vLLM's second model runner: how the engine gives each request its own."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.unit.rollout.inside_engine import (
    BLOCK,
    CONFIG,
    Engine,
    FullAttention,
    Uniform,
    check,
    config_of,
    open_inside,
)


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules inside vLLM, as attributes of one."""
    yield from open_inside(monkeypatch)


def test_a_request_gets_its_routes_once_when_it_ends(inside: Any) -> None:
    engine = Engine(inside)
    long, short = engine.add("long", 6, 3), engine.add("short", 2, 2, routed_experts_prompt_start=1)
    engine.run((long, 4), (short, 2))
    engine.run((short, 1), (long, 2))
    check(short, first=1)
    engine.run((long, 1))
    assert not long.told
    engine.run((long, 1))
    check(long)
    assert len(long.told) == 1
    assert not engine.scheduler._next


def test_blocks_of_the_cache_have_the_routes_with_which_they_were_computed(inside: Any) -> None:
    engine = Engine(inside)
    first = engine.add("first", 5, 2)
    engine.run((first, 5))
    second = engine.add("second", 6, 2, cached_of="first")
    engine.run((first, 1), (second, 2))
    engine.run((second, 1))
    check(first)
    check(second)
    np.testing.assert_array_equal(second.told[0][:BLOCK], first.told[0][:BLOCK])


def test_steps_are_scheduled_before_the_last_one_has_arrived(inside: Any) -> None:
    """The step after a request's last token overwrites nothing of who gets its blocks then."""
    engine = Engine(inside)
    ends, other = engine.add("ends", 3, 1), engine.add("other", 3, 3)
    engine.schedule((ends, 3), (other, 3))
    engine.schedule((ends, 1), (other, 1))
    engine.arrive()
    check(ends)
    late = engine.add("late", 4, 1)
    engine.schedule((late, 4), (other, 1))
    engine.arrive()
    engine.arrive()
    check(late)
    check(other)


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("begins", [1, 2])
def test_a_preempted_request_keeps_the_routes_with_which_its_tokens_were_computed_first(
    inside: Any, is_ahead: bool, begins: int
) -> None:
    """Others get its blocks while its last step is on the way. `begins`: steps before it is preempted."""
    engine = Engine(inside)
    engine.scheduler.free = [4, 3, 2, 1, 0]
    lost, other = engine.add("lost", 5, 4), engine.add("other", 3, 4)
    engine.run((other, 3))
    for _ in range(begins - 1):
        engine.run((lost, 5))
    engine.schedule((lost, lost.num_tokens - lost.computed))
    if not is_ahead:
        engine.arrive()
    engine.preempt(lost)
    taker = engine.add("taker", 8, 1)
    engine.schedule((taker, 8), (other, 1))
    while engine.on_the_way:
        engine.arrive()
    check(taker)
    assert not engine.scheduler._lost
    assert lost.num_output_tokens == begins
    engine.run((lost, lost.num_tokens))
    while lost.num_output_tokens < lost.most:
        engine.run((lost, 1))
    check(lost)


def test_a_preempted_request_may_end_with_the_step_that_was_on_the_way(inside: Any) -> None:
    engine = Engine(inside)
    engine.scheduler.free = [1, 0]
    lost = engine.add("lost", 5, 2)
    engine.run((lost, 5))
    engine.schedule((lost, 1))
    engine.preempt(lost)
    taker = engine.add("taker", 8, 1)
    engine.schedule((taker, 8))
    engine.arrive()
    check(lost)
    engine.arrive()
    check(taker)


def test_a_request_that_lost_its_prompt_has_the_routes_that_counted(inside: Any) -> None:
    engine = Engine(inside)
    lost = engine.add("lost", 6, 1)
    engine.run((lost, 4))
    engine.preempt(lost)
    engine.run((lost, 6))
    check(lost)


def test_with_stop_strings_each_output_has_the_routes_until_then(inside: Any) -> None:
    """The API server ends the request, and the engine sends nothing more."""
    engine = Engine(inside)
    request = engine.add("a", 5, 9, stop=["."])
    engine.run((request, 5))
    check(request)
    for _ in range(3):
        engine.run((request, 1))
        check(request)
    engine.scheduler.finish_requests(["a"], "aborted")
    assert not engine.scheduler._ended


def test_a_pause_tells_the_routes_of_all_requests(inside: Any) -> None:
    """What is on the way then is dropped, and so is a prompt of which nothing was sampled."""
    engine = Engine(inside)
    part, prompt = engine.add("part", 3, 9), engine.add("prompt", 8, 9)
    engine.run((part, 3), (prompt, 4))
    engine.run((part, 1))
    engine.schedule((part, 1), (prompt, 4))
    names = engine.scheduler.finish_requests(None, "aborted")
    sent: list[Any] = []
    process = SimpleNamespace(scheduler=engine.scheduler, output_queue=SimpleNamespace(put_nowait=sent.append))
    inside.core.EngineCoreProc._send_finish_outputs_to_client(process, names, 7, "abort")
    [(client, outputs)] = sent
    assert (client, outputs.finished_requests) == (7, ["part", "prompt"])
    by_name = {output.request_id: output for output in outputs.outputs}
    assert {output.finish_reason for output in outputs.outputs} == {"abort"}
    part.told = [by_name["part"].routed_experts]
    check(part)
    assert by_name["prompt"].routed_experts is None
    engine.arrive()
    assert not engine.scheduler._ended


def test_a_step_without_routes_is_an_error(inside: Any) -> None:
    """Some of vLLM's executors call its model runner, and not the worker."""
    engine = Engine(inside)
    engine.schedule((engine.add("a", 3, 2), 3))
    engine.on_the_way[0][1].routed_experts = None
    with pytest.raises(RuntimeError, match="sent no routes with a step: drop --distributed-executor-backend"):
        engine.arrive()


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"kv_transfer_config": SimpleNamespace(is_kv_transfer_instance=True)}, "--kv-transfer-config"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
    ],
)
def test_options_with_which_places_tell_nothing_are_refused(inside: Any, changes: dict[str, Any], option: str) -> None:
    with pytest.raises(ValueError, match=f"no routes with {option}: drop it from rollout.server_args"):
        inside.fivefold_scheduler.scheduler(vllm_config=config_of(**changes), kv_cache_config=CONFIG)


def test_the_group_of_layers_with_all_keys_and_values_is_found(inside: Any) -> None:
    groups = [[object()], [Uniform(FullAttention(), object())], [Uniform(FullAttention(), FullAttention())]]
    configs = [SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in of]) for of in groups]
    for config in configs[:2]:
        with pytest.raises(ValueError, match="no layer of vLLM's model keeps all of its keys"):
            inside.fivefold_routes.attention_group(config)
    assert inside.fivefold_routes.attention_group(configs[2]) == 0
    assert inside.fivefold_routes.attention_group(CONFIG) == 1
