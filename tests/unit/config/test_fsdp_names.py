"""Every parameter of PyTorch's FSDP2 and AdamW is either a key of the recipe or refused with a reason."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fivefold.config.library_names import REFUSED
from fivefold.config.schema.fsdp import FSDPConfig, FSDPMixedPrecision, FSDPOptimizerFields, TorchParameters

SECTIONS: dict[type[TorchParameters], Callable[..., Any]] = {
    FSDPConfig: fully_shard,
    FSDPMixedPrecision: MixedPrecisionPolicy,
    FSDPOptimizerFields: torch.optim.AdamW,
}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.owner)
def test_every_parameter_is_a_key_or_has_a_reason(section: type[TorchParameters]) -> None:
    names = set(inspect.signature(SECTIONS[section]).parameters)
    taken, refused = set(section.model_fields) - section.added, set(REFUSED[section.owner])
    assert taken | refused >= names
    assert not taken & refused
    assert taken <= names
    for name in refused:
        with pytest.raises(ValidationError, match=f"{name} of PyTorch's {section.owner} cannot be set in a recipe"):
            section.model_validate({name: 1})
