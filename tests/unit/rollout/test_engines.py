"""Which engine is built for which backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fivefold.layout.backends import BACKENDS
from fivefold.rollout.engines import DIALECTS, build_engine
from fivefold.rollout.transformers_engine import TransformersEngine
from fivefold.weights.folder import NodePlace
from tests.unit.rollout.conftest import spec_of

PLACE = NodePlace("run", 0, 1)


def test_every_server_of_the_table_is_spoken_to() -> None:
    assert set(DIALECTS) == {name for name, backend in BACKENDS.items() if backend.is_server}


def test_every_embedded_backend_has_an_engine(model_folder: Callable[..., Path]) -> None:
    engines = {
        name: type(build_engine(spec_of(name, model_folder("llama")), PLACE, save=lambda folder, weights: None))
        for name, backend in BACKENDS.items()
        if backend.kind == "embedded"
    }
    assert engines == {"transformers": TransformersEngine}


def test_a_backend_that_trains_has_no_engine_that_generates() -> None:
    with pytest.raises(ValueError, match=r"no engine generates with megatron: use transformers, vllm or sglang"):
        build_engine(spec_of("megatron", Path()), PLACE, save=lambda folder, weights: None)
