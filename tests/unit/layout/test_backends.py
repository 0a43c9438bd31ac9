"""The table of backends: every row can be written as a layout, and messages list them."""

from __future__ import annotations

import pytest

from fivefold.layout.backends import BACKENDS, backend_names, example_layout
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.parser import parse_backend


@pytest.mark.parametrize("name", BACKENDS)
def test_a_layout_of_every_backend_knows_its_kind(name: str) -> None:
    layout = parse_backend(f"{name}:" + "".join(f"{letter}2" for letter in BACKENDS[name].letters))
    assert (layout.is_training, layout.is_server) == {
        "trainer": (True, False), "embedded": (False, False), "server": (False, True),
    }[BACKENDS[name].kind]  # fmt: skip


def test_a_server_has_the_facts_that_other_rooms_need() -> None:
    for backend in BACKENDS.values():
        facts = (backend.workspace_bytes, backend.asleep_bytes, backend.distributions, backend.variables)
        assert all(map(bool, facts)) if backend.is_server else not any(facts), backend.name


def test_messages_list_the_backends() -> None:
    assert backend_names(trains=True) == "megatron or fsdp"
    assert backend_names(trains=False) == "transformers, vllm or sglang"
    for trains in (True, False):
        assert parse_backend(example_layout(trains=trains)).is_training == trains


def test_a_layout_of_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"backend is 'deepspeed'; use one of megatron, fsdp"):
        ParallelLayout("deepspeed", tp=1, pp=1, cp=1, dp=1, vpp=1, ep=1, etp=1, edp=1)
