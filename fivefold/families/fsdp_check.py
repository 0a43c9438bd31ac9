"""Checks of a role's section `fsdp` against its layout."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.config.schema.fsdp import FSDPConfig
from fivefold.layout.allocation import RoleAllocation
from fivefold.layout.parallel import ParallelLayout


def check_fsdp(config: FSDPConfig, layout: ParallelLayout) -> None:
    """Refuse options of FSDP that the layout cannot take.

    Raises:
        ValueError: a line for each problem.
    """
    if problems := list(fsdp_problems("actor", config, layout)):
        raise ValueError("\n".join(problems))


def fsdp_problems(role: str, config: FSDPConfig, layout: ParallelLayout | RoleAllocation) -> Iterator[str]:
    """Yield a line for each key of a role's section `fsdp` that its layout cannot take."""
    kept = config.reshard_after_forward
    if isinstance(kept, bool) or layout.dp is None:
        return
    ranks = layout.dp * layout.cp
    if kept >= ranks or ranks % kept:
        yield (
            f"{role}.fsdp.reshard_after_forward={kept} must be smaller than the {ranks} ranks over which weights are "
            "sharded (d x c), and divide them: choose a divisor, or true or false"
        )
