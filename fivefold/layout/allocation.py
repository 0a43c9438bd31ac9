"""Allocation strings: which backend each role runs, how it is split, and who shares devices.

    sglang:d4t4+megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)        16 devices generate, 16 train
    vllm[rollout]:d*|megatron[actor]:d4t2                    both on the same 8 devices, in turn

    allocation := group ("+" group)*         "+": devices of their own
    group      := role ("|" role)*           "|": the same devices, in turn; binds tighter
    role       := backend ["[" name "]"] ":" (degrees | hybrid)
    hybrid     := "(" "attn" ":" degrees "|" "ffn" ":" degrees ")"
    degrees    := (letter number)+           d data, t tensor, p pipeline, c context, e expert, v virtual stages;
                                             `d*`: as many as the devices that are left allow

`parse` reads it, `str()` of what it returns prints it, and the printed form parses to an equal value.
"""

from __future__ import annotations

from fivefold.layout.errors import AllocationError, RuleError
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.parser import AllocationParser
from fivefold.layout.roles import Allocation, RoleAllocation

__all__ = [
    "Allocation",
    "AllocationError",
    "ParallelLayout",
    "RoleAllocation",
    "RuleError",
    "parse",
    "parse_backend",
    "parse_role",
]


def parse(text: str) -> Allocation:
    """The allocation that `text` describes.

    Raises:
        AllocationError: if it breaks the grammar or a rule, with a caret under the character.
    """
    return AllocationParser(text).allocation()


def parse_role(text: str) -> RoleAllocation:
    """One role's string, such as `actor.backend`: no `+`, no name; `d*` is kept open."""
    return AllocationParser(text).single_role()


def parse_backend(text: str, n_devices: int | None = None) -> ParallelLayout:
    """The layout in one role's string; `n_devices` resolves `d*`.

    Raises:
        AllocationError: for a string that cannot be read, or `d*` that `n_devices` does not settle.
    """
    return parse_role(text).resolve(n_devices)
