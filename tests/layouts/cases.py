"""The case of a layout, whichever engine it is for."""

from __future__ import annotations

from typing import Any

from fsdp_cases import FSDPCase
from megatron_cases import Case

from fivefold.layout.parser import parse_backend

AnyCase = Case | FSDPCase


def case_of(layout: str, **options: Any) -> AnyCase:
    """Return the case of a layout; `options` are those that the engines have in common, such as `dtype`."""
    engines: dict[str, type[AnyCase]] = {"megatron": Case, "fsdp": FSDPCase}
    return engines[parse_backend(layout).backend](layout, **options)
