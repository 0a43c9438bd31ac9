"""A tiny model of each family, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tiny_gguf import TinyModel, save_tiny_model, tiny_config


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    @cache
    def make(family: str) -> TinyModel:
        folder: Path = tmp_path_factory.mktemp(family)
        return save_tiny_model(folder, tiny_config(family))

    return make
